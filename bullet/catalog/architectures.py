"""One table of architectures: how a ``config.json`` of each ``model_type`` is read, and what it may leave out.

What decides size, work or KV cache and is not known to the entry is refused by name (:data:`HARMLESS` lists what decides none of
them): a reader that drops what it does not know is silently wrong on the next architecture.

Defaults are those of the public configuration classes of transformers 5.24; parameter counts are checked against its modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Raw = Mapping[str, Any]

SIZES: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size", "n_embd", "d_model", "n_embed"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads", "kv_n_heads", "multi_query_group_num"),
    "intermediate_size": ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"),
    "head_dim": ("head_dim", "kv_channels", "attention_head_dim"),
    "vocab_size": ("vocab_size", "padded_vocab_size"),
}
"""Our key, and how files spell it. All are whole numbers; a file that says it twice must say the same."""
CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx", "model_max_length",
           "max_sequence_length", "max_seq_length", "seq_len", "max_target_positions")
"""Where the longest context stands; the least of them holds, and ``model_max_length`` (Command-R) before any, as in vLLM."""

HARMLESS = (
    r"(.*_token_ids?|.*dropout\w*|.*pdrop|.*_eps|.*epsilon|.*_coef|.*_bound|init\w*|.*_init|.*initializer\w*|.*jitter\w*"
    r"|(id2label|label2id|problem_type|task_specific_params|num_labels|architectures|model_type|auto_map"
    r"|_name_or_path|name_or_path|transformers_version|torch_dtype|dtype|quantization_config|compression_config|is_decoder|is_encoder_decoder|use_cache"
    r"|return_dict\w*|output_\w+|chunk_size_feed_forward|_attn_implementation\w*|attn_implementation|_commit_hash"
    r"|pretraining_tp|tie_encoder_decoder|torchscript|use_bfloat16|gradient_checkpointing|use_return_dict|unsloth\w*"
    r"|hidden_act\w*|activation\w*|rope_theta|rope_scaling|rope_parameters|rope_ratio|rope_interleave|rope_interleaved"
    r"|rope_local_base_freq|rope_traditional|original_max_position_embeddings|partial_rotary_factor|rotary_pct|rotary_emb_base"
    r"|rotary_dim|rotary_base|rotary|rotary_percent|no_rope_layers|no_rope_layer_interval|alibi|use_alibi|mrope\w*"
    r"|rms_norm|norm_type|layernorm_type|layer_norm_type|use_rmsnorm|layer_norm_elementwise_affine|do_layer_norm_before"
    r"|apply_residual_connection_post_layernorm|post_layer_norm|use_parallel_residual|parallel_attn|num_ln_in_parallel_attn"
    r"|embedding_multiplier|logits_scaling|residual_multiplier|attention_multiplier|logit_scale|logits_scale\w*|scale_\w+"
    r"|query_pre_attn_scalar|.*softcapping|clip_qkv|reorder_and_upcast_attn|attention_softmax_in_fp32|attn_temperature_tuning"
    r"|slow_but_exact|summary_\w+|layerdrop|use_stable_embedding|scoring_func|score_func\w*|topk_method|topk_group|n_group"
    r"|num_expert_group|norm_topk_prob|routed_scaling_factor|router_\w+|seq_aux|aux_loss\w*|ep_size|moe_use_\w+|moe_norm_min"
    r"|use_routing_bias|scale_seq_times|use_flash\w*|use_xformers|fp32_\w+|force_fp32\w*|swiglu_alpha|swiglu_limit"
    r"|experts_per_token|eod_token|max_new_tokens|length_penalty|temperature|top_[kp]"
    r"|num_nextn_predict_layers|use_mtp|num_mtp_modules|mtp_\w+|vision_config|image_\w+|video_\w+|vision_\w+|mm_\w+"
    r"|boi_\w+|eoi_\w+|spatial_merge_size|multimodal_\w+|projector_\w+|audio_config|embd_layer|attn_softmax_\w+|qk_head_dim|cache_implementation"
    r"|max_window_layers|use_sliding_window|sliding_window|sliding_window_size|sliding_window_pattern|_sliding_window_pattern"
    r"|layer_types|window_attn_skip_freq|interpolate_factor|full_attn_mod|rotary_scaling_factor|rope_pct|rope_percent|fc_type|tokenizer_name|tokenizer_class|prefix|pruned_heads|sep_token|finetuning_task|license|language))$"
)
"""Pattern of keys that decide neither size nor work nor KV: special tokens, training, scales, activation functions of the same
cost, rotary details, experts' routing rules, multi-token prediction (its layers are not loaded for plain serving), parts for
other media. The window keys are read by every entry, so that one that is switched on is refused where the architecture has none.
(A pattern, not compiled: a built-in model needs none.)"""

RECURRENT = frozenset({
    "mamba", "mamba2", "falcon_mamba", "rwkv", "rwkv5", "rwkv6", "rwkv7", "xlstm", "jamba", "bamba", "zamba", "zamba2",
    "falcon_h1", "nemotron_h", "recurrent_gemma", "granitemoehybrid", "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe",
    "qwen3_5_moe_text", "kimi_linear", "minimax", "minimax_text_01", "olmo_hybrid", "lfm2", "lfm2_moe", "plamo2",
    "bailing_hybrid", "bailing_moe_linear", "phi4flash", "hymba", "retnet"})
RECURRENT_KEYS = (
    r"(mamba\w*|ssm\w*|linear_\w+_heads?\w*|linear_attn_config|full_attention_interval|state_size|conv_kernel|d_conv"
    r"|attn_layer_period|attn_layer_indices|layers_block_type|hybrid_override_pattern|lru_width|block_types)$"
)
CHUNKED = frozenset({"llama4", "llama4_text"})
"""Layers that attend within chunks of ``attention_chunk_size`` tokens, whose blocks an engine frees at each chunk's end."""
NESTED = ("text_config", "llm_config", "language_config")
"""Where a file for several media keeps its language model."""
ENCODERS = frozenset({
    "bert", "roberta", "xlm-roberta", "distilbert", "albert", "electra", "deberta", "deberta-v2", "modernbert", "nomic_bert",
    "mpnet", "xlnet", "t5", "mt5", "umt5", "longt5", "bart", "mbart", "pegasus", "marian", "whisper", "blenderbot", "m2m_100",
    "clip", "vit"})


@dataclass(frozen=True)
class Entry:
    """How one architecture's file is read. A ``str`` in place of a truth value is the key that says so."""

    classes: tuple[str, ...] = ()
    defaults: Raw = field(default_factory=dict)
    """What the configuration class takes where the file is silent."""
    nested_defaults: Raw = field(default_factory=dict)
    """Sizes too, inside a ``text_config`` that lists differences alone."""
    gated: bool = True
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool | str = False
    positions: int | None = None
    """Learned positions: rows beside the context's own; ``None``: there are none."""
    windows: str = ""
    """Which layers have a window: ``""`` none, ``all``, ``alternate`` (the first and every other), ``pattern`` (all but every
    n-th), ``last`` (Qwen's: from ``max_window_layers`` on, if switched on). ``layer_types`` says it in any of them."""
    pattern: int = 0
    experts: tuple[str, ...] = ()
    """The keys of routed experts; empty: a dense model."""
    experts_per_token: tuple[str, ...] = ("num_experts_per_tok",)
    expert_size: str = "moe_intermediate_size"
    shared: str = ""
    """The key of the shared experts' number (x ``expert_size``), or of their width if it ends in ``_size``."""
    dense_first: str = ""
    latent: bool = False
    """Latent attention (DeepSeek V2): the KV cache holds ``kv_lora_rank + qk_rope_head_dim`` values a token and layer."""
    merged: tuple[str, ...] = ()
    """Objects inside the file whose keys are read as its own."""
    keys: tuple[str, ...] = ()
    """Further keys that this module reads for it, or that are known to change nothing here."""


_QWEN = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_GEMMA3 = {"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 9216,
          "hidden_size": 2304, "num_hidden_layers": 26, "max_position_embeddings": 131072}
_LLAMA = {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads":
          32, "max_position_embeddings": 2048}
_DEEPSEEK = ("n_routed_experts",)
_HUNYUAN = ("use_qk_norm", "cla_share_factor", "class_num", "dense_list", "pool_type", "text_start_id", "text_end_id",
            "use_rotary_pos_emb", "mask_init_id", "anyres_pooling_size", "use_mixed_mlp_moe", "moe_layer_num_skipped",
            "add_classification_head")
"""``use_cla``, layers that share a KV cache, is none of them."""
_GPT2 = {"tie_word_embeddings": True, "n_positions": 1024}
_MLA = ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "moe_layer_freq", "attention_bias",
        "mlp_bias")

ARCHITECTURES: Mapping[str, Entry] = {
    # dense, gated MLP
    "llama": Entry(("LlamaForCausalLM",), nested_defaults=_LLAMA, qkv_bias="attention_bias", o_bias="attention_bias",
        mlp_bias="mlp_bias"),
    "mistral": Entry(("MistralForCausalLM",), {"sliding_window": 4096, "num_key_value_heads": 8}, _LLAMA | {"intermediate_size":
        14336, "max_position_embeddings": 131072}, windows="all"),
    "ministral": Entry(("MinistralForCausalLM",), {"sliding_window": 4096, "num_key_value_heads": 8}, windows="all"),
    "ministral3": Entry(("Ministral3ForCausalLM",), {"num_key_value_heads": 8, "head_dim": 128}, windows="all"),
    "qwen2": Entry(("Qwen2ForCausalLM",), _QWEN, qkv_bias=True, windows="last"),
    "qwen3": Entry(("Qwen3ForCausalLM",), _QWEN | {"head_dim": 128}, qkv_bias="attention_bias", o_bias="attention_bias",
        qk_norm=True, windows="last"),
    "qwen2_vl_text": Entry(("Qwen2VLForConditionalGeneration",), _QWEN, qkv_bias=True, windows="last"),
    "qwen2_5_vl_text": Entry(("Qwen2_5_VLForConditionalGeneration",), _QWEN, qkv_bias=True, windows="last"),
    "qwen3_vl_text": Entry((), _QWEN | {"head_dim": 128}, qkv_bias="attention_bias", o_bias="attention_bias", qk_norm=True,
        windows="last"),
    "gemma": Entry(("GemmaForCausalLM",), {"tie_word_embeddings": True, "head_dim": 256}, qkv_bias="attention_bias",
        o_bias="attention_bias"),
    "gemma2": Entry(("Gemma2ForCausalLM",), {"tie_word_embeddings": True, "head_dim": 256, "sliding_window": 4096,
        "num_key_value_heads": 4}, qkv_bias="attention_bias", o_bias="attention_bias", windows="alternate"),
    "gemma3_text": Entry(("Gemma3ForCausalLM",), {"tie_word_embeddings": True, "head_dim": 256, "sliding_window": 4096}, _GEMMA3,
        qkv_bias="attention_bias", o_bias="attention_bias", qk_norm=True, windows="pattern", pattern=6),
    "phi3": Entry(("Phi3ForCausalLM",), qkv_bias="attention_bias", windows="all"),
    "olmo": Entry(("OlmoForCausalLM",), qkv_bias="attention_bias", o_bias="attention_bias"),
    "olmo2": Entry(("Olmo2ForCausalLM",), qkv_bias="attention_bias", o_bias="attention_bias", qk_norm=True),
    "olmo3": Entry(("Olmo3ForCausalLM",), {"sliding_window": 4096}, qkv_bias="attention_bias", o_bias="attention_bias",
        qk_norm=True, windows="pattern", pattern=4),
    "granite": Entry(("GraniteForCausalLM",), qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias"),
    "cohere": Entry(("CohereForCausalLM",), {"tie_word_embeddings": True}, qkv_bias="attention_bias", o_bias="attention_bias",
        qk_norm="use_qk_norm"),
    "cohere2": Entry(("Cohere2ForCausalLM",), {"tie_word_embeddings": True, "sliding_window": 4096}, qkv_bias="attention_bias",
        o_bias="attention_bias", windows="pattern", pattern=4, keys=("layer_switch", "order_of_interleaved_layers",
        "position_embedding_type", "use_embedding_sharing", "use_gated_activation", "use_parallel_block")),
    "stablelm": Entry(("StableLmForCausalLM",), qkv_bias="use_qkv_bias", qk_norm="qk_layernorm"),
    "glm": Entry(("GlmForCausalLM",), {"head_dim": 128, "attention_bias": True, "num_key_value_heads": 2},
        qkv_bias="attention_bias"),
    "glm4": Entry(("Glm4ForCausalLM",), {"head_dim": 128, "attention_bias": True, "num_key_value_heads": 2},
        qkv_bias="attention_bias"),
    "exaone4": Entry(("Exaone4ForCausalLM",), {"sliding_window": 4096}, qk_norm=True, windows="pattern", pattern=4),
    "smollm3": Entry(("SmolLM3ForCausalLM",), _QWEN | {"tie_word_embeddings": True, "num_key_value_heads": 4},
        qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias", windows="last"),
    "seed_oss": Entry(("SeedOssForCausalLM",), {"attention_bias": True, "head_dim": 128}, qkv_bias="attention_bias",
        o_bias="attention_out_bias", mlp_bias="mlp_bias"),
    "helium": Entry(("HeliumForCausalLM",), {"head_dim": 128}, qkv_bias="attention_bias", o_bias="attention_bias",
        mlp_bias="mlp_bias"),
    "exaone": Entry(("ExaoneForCausalLM",)),
    "baichuan": Entry(("BaichuanForCausalLM", "BaiChuanForCausalLM"), keys=("_from_model_config", "z_loss_weight")),
    "chatglm": Entry(("ChatGLMModel", "ChatGLMForConditionalGeneration"), {"add_qkv_bias": False, "add_bias_linear": False},
        qkv_bias="add_qkv_bias", o_bias="add_bias_linear", mlp_bias="add_bias_linear", keys=("multi_query_attention",
        "apply_query_key_layer_scaling", "bias_dropout_fusion", "original_rope", "rmsnorm", "attention_softmax_in_fp32")),
    "qwen": Entry(("QWenLMHeadModel",), qkv_bias=True, keys=("bf16", "fp16", "fp32", "no_bias", "use_dynamic_ntk",
        "use_logn_attn", "use_cache_\\w+", "softmax_in_fp32")),
    "minicpm": Entry(("MiniCPMForCausalLM",), {"tie_word_embeddings": True}, qkv_bias="attention_bias", o_bias="attention_bias",
        experts=("num_experts",), expert_size="intermediate_size", keys=("dim_model_base",)),
    "mimo": Entry(("MiMoForCausalLM",), _QWEN, qkv_bias="attention_bias", windows="last"),
    "internlm": Entry(("InternLMForCausalLM",), {"bias": True}, qkv_bias="bias", o_bias="bias"),
    "orion": Entry(("OrionForCausalLM",), qkv_bias="attention_bias", o_bias="attention_bias"),
    "internlm2": Entry(("InternLM2ForCausalLM",), qkv_bias="bias", o_bias="bias", keys=("attn_implementation",)),
    "hunyuan_v1_dense": Entry(("HunYuanDenseV1ForCausalLM",), qkv_bias="attention_bias", o_bias="attention_bias", qk_norm=True,
        keys=_HUNYUAN),
    "hunyuan_v1_moe": Entry(("HunYuanMoEV1ForCausalLM",), {"use_qk_norm": False}, qkv_bias="attention_bias",
        o_bias="attention_bias", qk_norm="use_qk_norm", experts=("num_experts",), experts_per_token=("moe_topk",),
        shared="num_shared_expert", keys=_HUNYUAN),
    "ernie4_5": Entry(("Ernie4_5ForCausalLM",), {"tie_word_embeddings": True, "head_dim": 128}, qkv_bias="use_bias",
        o_bias="use_bias", mlp_bias="use_bias"),
    # dense, plain MLP (two matrices)
    "phi": Entry(("PhiForCausalLM",), gated=False, qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm="qk_layernorm"),
    "gpt_neox": Entry(("GPTNeoXForCausalLM",), {"attention_bias": True}, gated=False, qkv_bias="attention_bias",
        o_bias="attention_bias", mlp_bias=True),
    "gpt2": Entry(("GPT2LMHeadModel",), _GPT2, gated=False, qkv_bias=True, o_bias=True, mlp_bias=True, positions=0,
        keys=("add_cross_attention",)),
    "gpt_bigcode": Entry(("GPTBigCodeForCausalLM",), _GPT2 | {"multi_query": True}, gated=False, qkv_bias=True, o_bias=True,
        mlp_bias=True, positions=0, keys=("multi_query", "attention_softmax_in_fp32", "attn_pdrop", "inference_runner",
        "validate_runner_input", "pad_key_length", "pre_allocate_kv_cache", "max_batch_size", "max_sequence_length")),
    "gptj": Entry(("GPTJForCausalLM",), gated=False, mlp_bias=True),
    "opt": Entry(("OPTForCausalLM",), {"tie_word_embeddings": True, "enable_bias": True}, gated=False, qkv_bias="enable_bias",
        o_bias="enable_bias", mlp_bias="enable_bias", positions=2, keys=("word_embed_proj_dim", "_remove_final_layer_norm")),
    "falcon": Entry(("FalconForCausalLM", "RWForCausalLM"), {"tie_word_embeddings": True, "multi_query": True,
        "max_position_embeddings": 2048}, gated=False, qkv_bias="bias", o_bias="bias", mlp_bias="bias", keys=("multi_query",
        "new_decoder_architecture", "ff_factor")),
    "mpt": Entry(("MPTForCausalLM", "MptForCausalLM"), {"tie_word_embeddings": True, "expansion_ratio": 4}, gated=False,
        keys=("attn_config", "expansion_ratio", "learned_pos_emb", "no_bias", "embedding_fraction", "init_config", "verbose",
        "attn_impl", "ffn_config")),
    "bloom": Entry(("BloomForCausalLM",), {"tie_word_embeddings": True, "seq_length": 2048}, gated=False, qkv_bias=True,
        o_bias=True, mlp_bias=True, keys=("offset_alibi", "skip_bias_add", "skip_bias_add_qkv", "unk_token_id",
        "attention_softmax_in_fp32", "masked_softmax_fusion", "bias_dropout_fusion", "n_inner")),
    "starcoder2": Entry(("Starcoder2ForCausalLM",), {"tie_word_embeddings": True, "use_bias": True, "num_key_value_heads": 2},
        gated=False, qkv_bias="use_bias", o_bias="use_bias", mlp_bias="use_bias", windows="all", keys=("mlp_type",)),
    "nemotron": Entry(("NemotronForCausalLM",), gated=False, qkv_bias="attention_bias", o_bias="attention_bias",
        mlp_bias="mlp_bias"),
    "arcee": Entry(("ArceeForCausalLM",), gated=False, qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias"),
    "apertus": Entry(("ApertusForCausalLM",), gated=False, qkv_bias="attention_bias", o_bias="attention_bias", qk_norm=True,
        keys=("post_norm", "qk_norm", "mlp_bias")),
    # mixture of experts
    "mixtral": Entry(("MixtralForCausalLM",), {"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
        windows="all", experts=("num_local_experts", "num_experts"), expert_size="intermediate_size"),
    "qwen2_moe": Entry(("Qwen2MoeForCausalLM",), _QWEN | {"qkv_bias": True}, qkv_bias="qkv_bias", windows="last",
        experts=("num_experts", "num_local_experts"), shared="shared_expert_intermediate_size", keys=("decoder_sparse_step",
        "mlp_only_layers")),
    "qwen3_moe": Entry(("Qwen3MoeForCausalLM",), _QWEN | {"head_dim": None}, qkv_bias="attention_bias", o_bias="attention_bias",
        qk_norm=True, windows="last", experts=("num_experts", "num_local_experts"), keys=("decoder_sparse_step",
        "mlp_only_layers")),
    "qwen3_vl_moe_text": Entry(("Qwen3VLMoeForConditionalGeneration",), {"head_dim": 128}, qkv_bias="attention_bias",
        o_bias="attention_bias", qk_norm=True, experts=("num_experts", "num_local_experts"), keys=("decoder_sparse_step",
        "mlp_only_layers")),
    "dbrx": Entry(("DbrxForCausalLM",), {"kv_n_heads": 1, "ffn_hidden_size": 3584, "moe_num_experts": 4, "moe_top_k": 1},
        merged=("attn_config", "ffn_config"), experts=("moe_num_experts",), experts_per_token=("moe_top_k",),
        expert_size="ffn_hidden_size", keys=("moe_loss_weight", "moe_jitter_eps", "moe_normalize_expert_weights", "ffn_act_fn",
        "uniform_expert_assignment")),
    "olmoe": Entry(("OlmoeForCausalLM",), {"num_experts": 64, "num_experts_per_tok": 8}, qkv_bias="attention_bias",
        o_bias="attention_bias", qk_norm=True, experts=("num_experts",), expert_size="intermediate_size"),
    "granitemoe": Entry(("GraniteMoeForCausalLM",), qkv_bias="attention_bias", o_bias="attention_bias",
        experts=("num_local_experts",), expert_size="intermediate_size"),
    "granitemoeshared": Entry(("GraniteMoeSharedForCausalLM",), qkv_bias="attention_bias", o_bias="attention_bias",
        experts=("num_local_experts",), expert_size="intermediate_size", shared="shared_intermediate_size"),
    "phimoe": Entry(("PhiMoEForCausalLM", "PhimoeForCausalLM"), {"num_local_experts": 16, "num_experts_per_tok": 2},
        qkv_bias="attention_bias", o_bias="attention_bias", windows="all", experts=("num_local_experts",),
        expert_size="intermediate_size", keys=("lm_head_bias",)),
    "deepseek": Entry(("DeepseekForCausalLM",), qkv_bias="attention_bias", o_bias="attention_bias", experts=_DEEPSEEK,
        shared="n_shared_experts", dense_first="first_k_dense_replace", keys=("moe_layer_freq",)),
    "deepseek_v2": Entry(("DeepseekV2ForCausalLM",), {"q_lora_rank": 1536}, experts=_DEEPSEEK, shared="n_shared_experts",
        dense_first="first_k_dense_replace", latent=True, keys=_MLA),
    "deepseek_v3": Entry(("DeepseekV3ForCausalLM",), {"q_lora_rank": 1536}, experts=_DEEPSEEK, shared="n_shared_experts",
        dense_first="first_k_dense_replace", latent=True, keys=_MLA),
    "glm4_moe_lite": Entry(("Glm4MoeLiteForCausalLM",), experts=_DEEPSEEK, shared="n_shared_experts",
        dense_first="first_k_dense_replace", latent=True, keys=_MLA),
    "kimi_k2": Entry((), {"q_lora_rank": 1536}, experts=_DEEPSEEK, shared="n_shared_experts", dense_first="first_k_dense_replace",
        latent=True, keys=_MLA),
    "glm4_moe": Entry(("Glm4MoeForCausalLM",), {"attention_bias": False}, qkv_bias="attention_bias", qk_norm="use_qk_norm",
        experts=_DEEPSEEK, shared="n_shared_experts", dense_first="first_k_dense_replace"),
    "dots1": Entry(("Dots1ForCausalLM",), qkv_bias="attention_bias", o_bias="attention_bias", qk_norm=True, experts=_DEEPSEEK,
        shared="n_shared_experts", dense_first="first_k_dense_replace", windows="last", keys=("moe_layer_freq",)),
    "gpt_oss": Entry(("GptOssForCausalLM",), {"attention_bias": True, "head_dim": 64, "sliding_window": 128,
        "num_key_value_heads": 8}, qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias=True, windows="alternate",
        experts=("num_local_experts", "num_experts"), expert_size="intermediate_size", keys=("initial_context_length",)),
    "ernie4_5_moe": Entry(("Ernie4_5_MoeForCausalLM", "Ernie4_5_MoeForCausalLM"), {"tie_word_embeddings": True},
        qkv_bias="use_bias", o_bias="use_bias", experts=("moe_num_experts",), experts_per_token=("moe_k",),
        shared="moe_num_shared_experts", keys=("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval",
        "moe_capacity", "moe_gate", "compression_ratio")),
    "minimax_m2": Entry(("MiniMaxM2ForCausalLM",), {"head_dim": 128}, qk_norm=True, experts=("num_local_experts",),
        expert_size="intermediate_size", keys=("attn_type_list", "use_qk_norm", "qk_norm_type", "shared_intermediate_size",
        "mlp_intermediate_size", "shared_moe_mode", "layernorm_\\w+")),
}
ALIASES: Mapping[str, str] = {
    "refinedweb": "falcon",
    "refinedwebmodel": "falcon",
    "internlm3": "internlm2",
    "stablelm_epoch": "stablelm",
    "yi": "llama",
    "aquila": "llama",
    "gemma3": "gemma3_text",
}
