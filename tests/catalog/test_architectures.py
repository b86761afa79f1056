"""Models as published: counts, bytes, context, and what is refused by name.

The files hold the public config.json's structural keys. Published sizes are the model cards' (parameters) or worked out
beside the entry; biases are counted, norms are not.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from bullet.catalog.models import ModelSpec
from bullet.catalog.reader import read_config
from bullet.errors import ConfigError

Raw = dict[str, Any]


def dense(model_type: str, layers: int, hidden: int, inner: int, heads: int, kv: int, vocab: int, context: int,
          **more: Any) -> Raw:
    return {"model_type": model_type, "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner,
            "num_attention_heads": heads, "num_key_value_heads": kv, "vocab_size": vocab, "max_position_embeddings": context,
            "torch_dtype": "bfloat16", **more}


DEEPSEEK_V3 = dense("deepseek_v3", 61, 7168, 18432, 128, 128, 129280, 163840, n_routed_experts=256, n_shared_experts=1,
                    num_experts_per_tok=8, moe_intermediate_size=2048, first_k_dense_replace=3, kv_lora_rank=512,
                    q_lora_rank=1536,
                    qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, moe_layer_freq=1, num_nextn_predict_layers=1,
                    rope_scaling={"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
                    quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"})
MIXTRAL = dense("mixtral", 32, 4096, 14336, 32, 8, 32000, 32768, num_local_experts=8, num_experts_per_tok=2, sliding_window=None)
GPT_OSS_20B = {
    "model_type": "gpt_oss", "num_hidden_layers": 24, "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088, "max_position_embeddings": 131072, "num_local_experts": 32,
    "num_experts_per_tok": 4, "experts_per_token": 4, "sliding_window": 128, "attention_bias": True, "swiglu_limit": 7.0,
    "initial_context_length": 4096, "tie_word_embeddings": False,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]}}

# name: file, parameters in 1e9 as the card (or the arithmetic) has them, KiB of KV a token and what a test of its own looks at
PUBLISHED: dict[str, tuple[Raw, float, float]] = {
    "Llama-3.1-8B": (dense("llama", 32, 4096, 14336, 32, 8, 128256, 131072), 8.030, 128),
    "Llama-3.2-1B": (dense("llama", 16, 2048, 8192, 32, 8, 128256, 131072, head_dim=64, tie_word_embeddings=True), 1.236, 32),
    "Llama-3.1-70B": (dense("llama", 80, 8192, 28672, 64, 8, 128256, 131072), 70.554, 320),
    "Llama-3.1-405B": (dense("llama", 126, 16384, 53248, 128, 8, 128256, 131072), 405.85, 504),
    "Llama-2-7B": (dense("llama", 32, 4096, 11008, 32, 32, 32000, 4096, torch_dtype="float16"), 6.738, 512),
    "TinyLlama-1.1B": (dense("llama", 22, 2048, 5632, 32, 4, 32000, 2048), 1.100, 22),
    "Mistral-7B-v0.3": (dense("mistral", 32, 4096, 14336, 32, 8, 32768, 32768, sliding_window=None), 7.248, 128),
    "Mistral-Small-24B": (dense("mistral", 40, 5120, 32768, 32, 8, 131072, 32768, head_dim=128, sliding_window=None), 23.572,
                          160),
    "Qwen2.5-7B": (dense("qwen2", 28, 3584, 18944, 28, 4, 152064, 131072, use_sliding_window=False, sliding_window=131072,
                         max_window_layers=28), 7.616, 56),
    "Qwen2.5-72B": (dense("qwen2", 80, 8192, 29568, 64, 8, 152064, 131072, use_sliding_window=False), 72.706, 320),
    "Qwen3-0.6B": (dense("qwen3", 28, 1024, 3072, 16, 8, 151936, 40960, head_dim=128, tie_word_embeddings=True), 0.596, 112),
    "Qwen3-8B": (dense("qwen3", 36, 4096, 12288, 32, 8, 151936, 40960, head_dim=128), 8.191, 144),
    "Qwen3-32B": (dense("qwen3", 64, 5120, 25600, 64, 8, 151936, 40960, head_dim=128), 32.762, 256),
    "Gemma-7B": (dense("gemma", 28, 3072, 24576, 16, 16, 256000, 8192, head_dim=256), 8.538, 448),
    "Gemma-2-9B": (dense("gemma2", 42, 3584, 14336, 16, 8, 256000, 8192, head_dim=256, sliding_window=4096), 9.242, 336),
    "Gemma-3-27B text": ({"model_type": "gemma3", "text_config": {
        "model_type": "gemma3_text", "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62, "head_dim": 128,
        "num_attention_heads": 32, "num_key_value_heads": 16, "sliding_window": 1024, "query_pre_attn_scalar": 168},
        "vision_config": {"hidden_size": 1152}, "torch_dtype": "bfloat16"}, 27.009, 496),
    "Phi-3-mini": (dense("phi3", 32, 3072, 8192, 32, 32, 32064, 4096, sliding_window=2047), 3.821, 384),
    "phi-2": (dense("phi", 32, 2560, 10240, 32, 32, 51200, 2048, torch_dtype="float16"), 2.780, 320),
    "Pythia-6.9B": ({"model_type": "gpt_neox", "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 16384,
                     "num_attention_heads": 32, "vocab_size": 50432, "max_position_embeddings": 2048, "torch_dtype": "float16",
                     "tie_word_embeddings": False, "hidden_act": "gelu", "rotary_pct": 0.25}, 6.857, 512),
    "GPT-2": ({"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024, "n_ctx": 1024,
               "vocab_size": 50257}, 0.1244, 36),
    "OPT-6.7B": ({"model_type": "opt", "num_hidden_layers": 32, "hidden_size": 4096, "ffn_dim": 16384, "num_attention_heads": 32,
                  "vocab_size": 50272, "max_position_embeddings": 2048, "word_embed_proj_dim": 4096,
                  "torch_dtype": "float16"}, 6.658, 512),
    "Falcon-7B": ({"model_type": "falcon", "num_hidden_layers": 32, "hidden_size": 4544, "num_attention_heads": 71,
                   "vocab_size": 65024, "multi_query": True, "new_decoder_architecture": False, "parallel_attn": True,
                   "alibi": False, "bias": False, "torch_dtype": "bfloat16"}, 6.922, 8),
    "StarCoder2-7B": (dense("starcoder2", 32, 4608, 18432, 36, 4, 49152, 16384, sliding_window=4096, use_bias=True), 7.174, 64),
    "OLMo-2-7B": (dense("olmo2", 32, 4096, 11008, 32, 32, 100352, 4096, torch_dtype="float32"), 7.299, 512),
    "Command-R 35B": (dense("cohere", 40, 8192, 22528, 64, 64, 256000, 8192), 34.981, 1280),
    "Mixtral-8x7B": (MIXTRAL, 46.703, 128),
    "Qwen3-30B-A3B": (dense("qwen3_moe", 48, 2048, 6144, 32, 4, 151936, 40960, head_dim=128, num_experts=128,
                            num_experts_per_tok=8,
                            moe_intermediate_size=768, decoder_sparse_step=1, mlp_only_layers=[]), 30.532, 96),
    "Qwen3-235B-A22B": (dense("qwen3_moe", 94, 4096, 12288, 64, 4, 151936, 40960, head_dim=128, num_experts=128,
                              num_experts_per_tok=8, moe_intermediate_size=1536), 235.094, 188),
    "Qwen1.5-MoE-A2.7B": (dense("qwen2_moe", 24, 2048, 5632, 16, 16, 151936, 8192, num_experts=60, num_experts_per_tok=4,
                                moe_intermediate_size=1408, shared_expert_intermediate_size=5632), 14.316, 192),
    "DeepSeek-MoE-16B": (dense("deepseek", 28, 2048, 10944, 16, 16, 102400, 4096, n_routed_experts=64, n_shared_experts=2,
                               num_experts_per_tok=6, moe_intermediate_size=1408, first_k_dense_replace=1, moe_layer_freq=1),
                         16.376, 224),
    "DeepSeek-V2-Lite": (dense("deepseek_v2", 27, 2048, 10944, 16, 16, 102400, 163840, n_routed_experts=64, n_shared_experts=2,
                               num_experts_per_tok=6, moe_intermediate_size=1408, first_k_dense_replace=1, kv_lora_rank=512,
                               q_lora_rank=None, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128), 15.706, 30.375),
    "DeepSeek-V3": (DEEPSEEK_V3, 671.026, 68.625),
    "GLM-4.5-Air": (dense("glm4_moe", 46, 4096, 10944, 96, 8, 151552, 131072, head_dim=128, n_routed_experts=128,
                          n_shared_experts=1,
                          num_experts_per_tok=8, moe_intermediate_size=1408, first_k_dense_replace=1, attention_bias=True),
                    106.85, 184),
    "gpt-oss-20b": (GPT_OSS_20B, 20.91, 48),
    # names of their own for the same sizes
    "ChatGLM3-6B": ({"model_type": "chatglm", "num_layers": 28, "hidden_size": 4096, "ffn_hidden_size": 13696, "kv_channels": 128,
                     "num_attention_heads": 32, "multi_query_attention": True, "multi_query_group_num": 2, "seq_length": 8192,
                     "padded_vocab_size": 65024, "add_qkv_bias": True, "add_bias_linear": False, "rmsnorm": True,
                     "torch_dtype": "float16"}, 6.244, 28),
    "GLM-4-9B-Chat": ({"model_type": "chatglm", "num_layers": 40, "num_hidden_layers": 40, "hidden_size": 4096,
                       "ffn_hidden_size": 13696, "kv_channels": 128, "num_attention_heads": 32, "multi_query_attention": True,
                       "multi_query_group_num": 2, "seq_length": 131072, "padded_vocab_size": 151552, "add_qkv_bias": True,
                       "rope_ratio": 500}, 9.400, 40),
    "DBRX": ({"model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 40, "max_seq_len": 32768, "vocab_size": 100352,
              "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "model_type": "", "rope_theta": 500000}, "ffn_config": {
                  "ffn_hidden_size": 10752, "model_type": "", "moe_jitter_eps": 0, "moe_loss_weight": 0.05, "moe_num_experts": 16,
                  "moe_top_k": 4}}, 131.596, 160),
    "Baichuan2-13B": ({"model_type": "baichuan", "num_hidden_layers": 40, "hidden_size": 5120, "intermediate_size": 13696,
                       "num_attention_heads": 40, "vocab_size": 125696, "model_max_length": 4096, "z_loss_weight": 0},
                      13.897, 800),
    "Qwen-7B": ({"model_type": "qwen", "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 22016,
                 "kv_channels": 128, "num_attention_heads": 32, "vocab_size": 151936, "seq_length": 8192, "no_bias": True,
                 "use_logn_attn": True}, 7.721, 512),
    "Hunyuan-A13B": (dense("hunyuan_v1_moe", 32, 4096, 3072, 32, 8, 128167, 32768, attention_head_dim=128, num_experts=64,
                           moe_topk=[8] * 32, moe_intermediate_size=[3072] * 32, num_shared_expert=[1] * 32, use_qk_norm=True,
                           cla_share_factor=2, use_cla=False, tie_word_embeddings=True), 80.393, 128),
    "Command-R7B": (dense("cohere2", 32, 4096, 14336, 32, 8, 256000, 8192, head_dim=128, sliding_window=4096, layer_switch=4,
                          sliding_window_pattern=4, order_of_interleaved_layers="local_attn_first"), 8.028, 128),
    "EXAONE-3.5-7.8B": ({"model_type": "exaone", "num_layers": 32, "hidden_size": 4096, "intermediate_size": 14336,
                         "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 102400,
                         "max_position_embeddings": 32768, "activation_function": "silu"}, 7.818, 128),
    "MiniCPM-2B": (dense("minicpm", 40, 2304, 5760, 36, 36, 122753, 4096, scale_emb=12, dim_model_base=256, scale_depth=1.4),
                   2.725, 360),
    # Its file says that the head is its own, unlike the 3B's and the 7B's.
    "StarCoder2-15B": (dense("starcoder2", 40, 6144, 24576, 48, 4, 49152, 16384, sliding_window=4096, use_bias=True,
                             tie_word_embeddings=False), 15.958, 80),
    "Kimi-K2": (DEEPSEEK_V3 | {"model_type": "kimi_k2", "first_k_dense_replace": 1, "n_routed_experts": 384, "vocab_size": 163840,
                               "num_attention_heads": 64, "num_key_value_heads": 64}, 1026.41, 68.625),
}


def read(folder: Path, raw: object, name: str = "config.json") -> ModelSpec:
    path = folder / name
    path.write_text(json.dumps(raw), encoding="utf-8")
    return read_config(path)


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_are_the_published_ones(name: str, tmp_path: Path) -> None:
    raw, billions, kv_kib = PUBLISHED[name]
    model = read(tmp_path, raw)
    assert model.num_parameters / 1e9 == pytest.approx(billions, rel=5e-3)
    assert model.kv_bytes_per_token / 1024 == kv_kib


def test_there_are_thirty_of_them() -> None:
    assert len(PUBLISHED) >= 30


@pytest.mark.parametrize(("name", "change", "gigabytes"), [
    # Worked out by hand: 16-bit weights are two bytes each.
    ("Llama-3.1-8B", {}, 16.06), ("OLMo-2-7B", {}, 14.60), ("DeepSeek-MoE-16B", {}, 32.75),
    # Linear layers 6.979e9 x (4 + (16 + 4) / 128) / 8, and two embeddings of 128,256 x 4,096 in 16 bits: the published 5.73 GB.
    ("Llama-3.1-8B", {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}}, 5.73),
    ("Llama-3.1-8B", {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}}, 5.73),
    # One byte each, embeddings two: the published 9.08 GB.
    ("Llama-3.1-8B", {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}}, 9.08),
    ("Llama-3.1-8B", {"quantization_config": {"quant_method": "compressed-tensors", "ignore": ["lm_head"], "config_groups": {
        "group_0": {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}, "input_activations": {"num_bits": 8}}}}},
        9.08),
    # 671.0e9 of one byte less embeddings' two: (671.026 + 2 x 129,280 x 7,168 / 1e9) GB, and a 4-byte scale for 128 x 128.
    ("DeepSeek-V3", {}, 673.0),
    # Experts 24 x 32 x 3 x 2,880 x 2,880 x 4.25 / 8, the rest 16 bits: the published 13.8 GB (12.8 GiB).
    ("gpt-oss-20b", {}, 13.76)])
def test_weight_bytes(name: str, change: Raw, gigabytes: float, tmp_path: Path) -> None:
    assert read(tmp_path, PUBLISHED[name][0] | change).weight_bytes / 1e9 == pytest.approx(gigabytes, rel=5e-3)


def test_a_quantisers_file_beside_the_config(tmp_path: Path) -> None:
    raw = PUBLISHED["Llama-3.1-8B"][0]
    plain = read(tmp_path, raw)
    assert (plain.mlp_bits, plain.gemm_dtype, plain.kv_bytes) == (16, "16", 2)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(
        {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8",
                                                            "exclude_modules": ["lm_head"]}}))
    model = read(tmp_path, raw)
    assert (model.attention_bits, model.mlp_bits, model.head_bits, model.gemm_dtype, model.kv_bytes) == (8, 8, 16, "fp8", 1)
    assert model.kv_bytes_per_token == 64 * 1024
    (tmp_path / "hf_quant_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"hf_quant_config\.json: cannot be read"):
        read(tmp_path, raw)


def test_layers_left_in_16_bits_are_counted(tmp_path: Path) -> None:
    """Attention everywhere, and the MLPs of 8 of 32 layers."""
    skipped = ["self_attn", *(f"model.layers.{i}.mlp" for i in range(8)), "lm_head"]
    model = read(tmp_path, PUBLISHED["Llama-3.1-8B"][0] | {"quantization_config": {
        "quant_method": "fbgemm_fp8", "modules_to_not_convert": skipped}})
    assert (model.attention_bits, model.mlp_bits, model.head_bits) == (16, 8 * 0.75 + 16 * 0.25, 16)


@pytest.mark.parametrize("layers", ["language_model.model.layers", "model.language_model.layers"])
def test_layers_of_a_model_for_several_media_are_called_otherwise(layers: str, tmp_path: Path) -> None:
    """Half of the MLPs and no attention in 16 bits; the vision tower is not counted."""
    skipped = ["re:vision_tower.*", "lm_head", *(f"{layers}.{i}.mlp.{one}_proj" for i in range(16) for one in
                                                    ("gate", "up", "down"))]
    model = read(tmp_path, {"model_type": "llava", "text_config": PUBLISHED["Llama-3.1-8B"][0], "vision_config": {},
                            "quantization_config": {"quant_method": "compressed-tensors", "ignore": skipped, "config_groups": {
                                "group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
                                            "input_activations": {"num_bits": 8, "type": "float"}}}}})
    assert (model.attention_bits, model.mlp_bits, model.gemm_dtype) == (8, 12, "fp8")


@pytest.mark.parametrize(("name", "window"), [
    ("Gemma-2-9B", (4096, 21)),  # every other layer
    ("Gemma-3-27B text", (1024, 52)),  # all but every sixth: 62 - 10
    ("gpt-oss-20b", (128, 12)), ("Phi-3-mini", (2047, 32)), ("StarCoder2-7B", (4096, 32)),
    ("Mistral-7B-v0.3", (0, 0)), ("Qwen2.5-7B", (0, 0)), ("Llama-3.1-8B", (0, 0))])
def test_windows_by_layer(name: str, window: tuple[int, int], tmp_path: Path) -> None:
    model = read(tmp_path, PUBLISHED[name][0])
    assert (model.window_tokens, model.window_layers) == window


def test_a_window_that_the_file_leaves_out_is_the_architectures(tmp_path: Path) -> None:
    """Mistral v0.1's class takes 4,096; Qwen's windows begin at ``max_window_layers`` once switched on."""
    raw = {k: v for k, v in PUBLISHED["Mistral-7B-v0.3"][0].items() if k != "sliding_window"}
    assert (read(tmp_path, raw).window_tokens, read(tmp_path, raw).window_layers) == (4096, 32)
    model = read(tmp_path, PUBLISHED["Qwen2.5-7B"][0] | {"use_sliding_window": True, "sliding_window": 16384,
                                                         "max_window_layers": 20})
    assert (model.window_tokens, model.window_layers) == (16384, 8)


@pytest.mark.parametrize(("scaling", "tokens"), [
    (None, 32768), ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}, 32768),
    ({"type": "linear", "factor": 2.0}, 65536), ({"type": "dynamic", "factor": 2.0}, 65536),
    ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}, 32768),
    ({"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}, 32768), ({"rope_type": "default", "rope_theta": 1e4},
                                                                                 32768)])
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_the_context_is_derived_as_the_engine_does(key: str, scaling: Raw | None, tokens: int, tmp_path: Path) -> None:
    assert read(tmp_path, dense("qwen2", 28, 3584, 18944, 28, 4, 152064, 32768) | {key: scaling}).context_tokens == tokens


def test_latent_attention_keeps_the_latent_alone(tmp_path: Path) -> None:
    """512 + 64 values a token and layer, not 2 x 128 heads x 192."""
    model = read(tmp_path, DEEPSEEK_V3)
    assert (model.head_dim, model.rope_dim, model.value_dim, model.kv_values_per_token) == (192, 64, 128, 576)
    assert model.dense_layers == 3
    assert model.context_tokens == 163840
    assert "multi-token prediction layers are left out" in model.notes


def test_dense_layers_among_sparse_ones(tmp_path: Path) -> None:
    sparse = PUBLISHED["Qwen3-30B-A3B"][0]
    assert read(tmp_path, sparse).dense_layers == 0
    assert read(tmp_path, sparse | {"decoder_sparse_step": 2}).dense_layers == 24
    assert read(tmp_path, sparse | {"mlp_only_layers": [0, 5]}).dense_layers == 2
    assert read(tmp_path, PUBLISHED["DeepSeek-MoE-16B"][0]).dense_layers == 1


LLAMA = PUBLISHED["Llama-3.1-8B"][0]


@pytest.mark.parametrize(("change", "words"), [
    ({"vocab_size": None}, "'vocab_size' is missing"), ({"hidden_size": "wide"}, "hidden_size = 'wide': must be a whole number"),
    ({"num_attention_heads": 0}, "must be positive"), ({"num_key_value_heads": 7}, "a multiple of num_kv_heads = 7"),
    ({"torch_dtype": "int3"}, "'int3': must be one of bfloat16"),
    ({"kv_lora_rank": 512}, "kv_lora_rank = 512: not known of model_type 'llama'"),
    ({"num_experts": 8}, "num_experts = 8: not known of model_type 'llama'"),
    ({"n_routed_experts": 8}, "n_routed_experts = 8: not known"), ({"cross_attention_layers": [3]}, "cross_attention_layers"),
    ({"sliding_window": 4096}, "sliding_window = 4096: model_type 'llama' is known without windows"),
    ({"attention_chunk_size": 8192}, "attention_chunk_size"), ({"qk_norm": True}, "qk_norm = True"),
    ({"layer_types": ["full_attention"] * 31 + ["linear_attention"]}, "linear attention or a recurrent state"),
    ({"layer_types": ["full_attention"] * 31 + ["chunked_attention"]}, "chunked_attention: not modelled"),
    ({"layer_types": ["full_attention"]}, "a list of 32 names"),
    ({"model_type": "jamba"}, "recurrent state"), ({"model_type": "qwen3_next"}, "recurrent state"),
    ({"model_type": "llama", "mamba_d_state": 16}, "mamba_d_state"), ({"model_type": "bert"}, "encoders are not modelled"),
    ({"model_type": "whale"}, "model_type = 'whale'.*not known; known are .*llama"),
    ({"model_type": None}, "'model_type' is missing"),
    ({"rope_scaling": {"rope_type": "spiral", "factor": 2}}, "'spiral': not known"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": "big"}}, "factor = 'big'"),
    ({"tie_word_embeddings": "yes"}, "must be true or false"),
    ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "'bitsandbytes': not modelled"),
    ({"quantization_config": {"quant_method": "awq", "bits": 5}}, "bits = 5: must be 2, 3, 4 or 8"),
    ({"quantization_config": [4]}, "must be an object"),
    ({"num_hidden_layers": 10**18}, "num_hidden_layers = 1000000000000000000: must be a whole number, 0 to 10"),
    ({"num_hidden_layers": 10**6}, "num_hidden_layers = 1000000: must be a whole number, 1 to 10,000"),
    ({"hidden_size": -1}, "hidden_size = -1: must be"), ({"hidden_size": "4096"}, "hidden_size = '4096': must be"),
    ({"num_attention_heads": 31, "num_key_value_heads": 31},
     "hidden_size = 4096: must be a multiple of num_attention_heads = 31"),
    ({"num_layers": 31}, "num_hidden_layers = 32 and num_layers = 31: one size, must be equal"),
    ({"head_dim": 128, "kv_channels": 64}, "head_dim = 128 and kv_channels = 64: one size"),
    ({"rope_parameters": {"full_attention": 3}}, "rope_parameters.full_attention = 3: must be an object"),
    ({"model_type": "llama4_text"}, "attention_chunk_size .model_type 'llama4_text'.: layers that attend within chunks"),
    ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": {"num_bits": 4}}},
     "kv_cache_scheme = .*must be an object with num_bits = 8, or null"),
    ({"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"a": {
        "weights": {"num_bits": 4, "type": "int"}, "input_activations": {"num_bits": 8, "type": "int"}}}}},
     "input_activations beside weights of 4 bits: not modelled")])
def test_what_cannot_be_modelled_is_refused_by_name(change: Raw, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        read(tmp_path, LLAMA | change)


def test_layers_that_share_a_cache_or_differ_are_refused(tmp_path: Path) -> None:
    hunyuan = PUBLISHED["Hunyuan-A13B"][0]
    with pytest.raises(ConfigError, match="use_cla = True: not known of model_type 'hunyuan_v1_moe'"):
        read(tmp_path, hunyuan | {"use_cla": True})
    with pytest.raises(ConfigError, match=r"moe_topk = .*: sizes that differ by layer are not modelled"):
        read(tmp_path, hunyuan | {"moe_topk": [8, 4]})


def test_an_architecture_is_known_by_its_class_too(tmp_path: Path) -> None:
    raw = {k: v for k, v in LLAMA.items() if k != "model_type"} | {"architectures": ["LlamaForCausalLM"]}
    assert read(tmp_path, raw).num_parameters == read(tmp_path, LLAMA).num_parameters


def test_keys_of_published_files_that_change_nothing_are_read_past(tmp_path: Path) -> None:
    """Phi-4-mini's, Nemotron's, Falcon-11B's, StableLM's and ERNIE's own keys, as their config.json have them."""
    for raw in (
        dense("phi3", 32, 3072, 8192, 24, 8, 200064, 131072, interpolate_factor=1, full_attn_mod=1),
        dense("stablelm", 32, 2560, 6912, 32, 32, 50304, 4096, rotary_scaling_factor=1.0, rope_pct=0.25),
        dense("ernie4_5_moe", 28, 2560, 12288, 20, 4, 103424, 131072, moe_num_experts=64, moe_k=6, moe_intermediate_size=1536,
              moe_capacity=[64, 64, 64], moe_gate="topk", compression_ratio=1.0),
    ):
        assert read(tmp_path, raw).num_layers == raw["num_hidden_layers"]
    assert read(tmp_path, dense("nemotron", 32, 3072, 9216, 24, 8, 256000, 4096, kv_channels=256)).head_dim == 256
    falcon = dense("falcon", 60, 4096, 0, 32, 8, 65024, 8192, new_decoder_architecture=True, ff_factor=3)
    del falcon["intermediate_size"]
    assert read(tmp_path, falcon).intermediate_size == 3 * 4096


def test_the_first_falcon_40b_has_eight_key_value_heads(tmp_path: Path) -> None:
    model = read(tmp_path, {"model_type": "RefinedWeb", "architectures": ["RWForCausalLM"], "hidden_size": 8192, "n_head": 128,
                  "n_head_kv": 8, "n_layer": 60, "vocab_size": 65024, "bias": False, "alibi": False})
    assert (model.num_kv_heads, model.kv_bytes_per_token) == (8, 60 * 2 * 8 * 64 * 2)


def test_command_rs_context_is_its_model_max_length(tmp_path: Path) -> None:
    cohere = dense("cohere", 40, 8192, 22528, 64, 64, 256000, 8192, model_max_length=131072)
    assert read(tmp_path, cohere).context_tokens == 131072


def test_modelopts_kv_cache_scheme_is_read(tmp_path: Path) -> None:
    quantised = {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    model = read(tmp_path, dense("llama", 32, 4096, 14336, 32, 8, 128256, 131072, quantization_config=quantised))
    assert model.kv_bytes_per_token == 32 * 2 * 8 * 128


def test_bits_by_module_and_bidirectional_attention_are_refused(tmp_path: Path) -> None:
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"-:.*attn.*": {}}}
    with pytest.raises(ConfigError, match="dynamic = "):
        read(tmp_path, dense("llama", 32, 4096, 14336, 32, 8, 128256, 131072, quantization_config=gptq))
    with pytest.raises(ConfigError, match="use_bidirectional_attention = true"):
        read(tmp_path, dense("gemma3_text", 24, 768, 1152, 3, 1, 262144, 2048, use_bidirectional_attention=True))
