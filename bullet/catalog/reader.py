"""Reading a Hugging Face ``config.json`` under its architecture's entry (:mod:`bullet.catalog.architectures`).

What decides a model's size, its work or its KV cache and is not known to the entry is refused by name. The context is derived as
vLLM 0.19's ``ModelConfig`` does it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bullet import door
from bullet.catalog.architectures import (
    ALIASES,
    ARCHITECTURES,
    CHUNKED,
    CONTEXT,
    ENCODERS,
    HARMLESS,
    NESTED,
    RECURRENT,
    RECURRENT_KEYS,
    SIZES,
    Entry,
    Raw,
)
from bullet.catalog.quantization import Widths, read_widths
from bullet.catalog.spec import ModelSpec
from bullet.errors import ConfigError, printable, short

MOST, MOST_LAYERS = 10**9, 10_000
"""Above every size, and every depth, that a model has: what is larger is a slip or a broken file."""


def read_config(path: str | Path) -> ModelSpec:
    """The model that a ``config.json`` describes; a :class:`ConfigError` names the file and the key that prevents it."""
    path = Path(path)
    raw = read_object(path)
    outer = raw
    inner = next((raw[key] for key in NESTED if isinstance(raw.get(key), Mapping)), None)
    if inner is not None and not any(key in raw for key in SIZES["num_hidden_layers"]):
        raw = {
            **{k: raw[k] for k in ("tie_word_embeddings", "torch_dtype", "dtype", "quantization_config") if k in raw},
            **inner,
        }
    model_type, entry = _entry(path, raw, outer)
    nested = raw is not outer
    for key in entry.merged:
        part = raw.get(key) or {}
        if not isinstance(part, Mapping):
            raise ConfigError(f"{path}: {key} = {short(part)}: must be an object")
        raw = {**{k: v for k, v in raw.items() if k != key}, **{k: v for k, v in part.items() if k != "model_type"}}
    return _Reader(
        path, {**entry.defaults, **(entry.nested_defaults if nested else {}), **_given(raw)}, model_type, entry, nested
    ).spec(_name(path, outer))


def read_object(path: Path) -> dict[str, Any]:
    """The file's one JSON object."""
    return door.read_object(path, ConfigError, "a JSON model config")


def _given(raw: Raw) -> dict[str, Any]:
    """``null`` is what a file says of a key that it leaves to the default, but for those where it switches something off."""
    return {
        key: value
        for key, value in raw.items()
        if value is not None or key in ("sliding_window", "q_lora_rank", "n_shared_experts", "head_dim")
    }


def _name(path: Path, raw: Raw) -> str:
    return printable(raw.get("_name_or_path") or path.parent.name or path.stem)


def _entry(path: Path, raw: Raw, outer: Raw) -> tuple[str, Entry]:
    model_type = str(raw.get("model_type") or "").lower()
    classes = (
        [str(name) for name in outer.get("architectures") or raw.get("architectures") or ()]
        if isinstance(outer.get("architectures") or raw.get("architectures") or (), list)
        else []
    )
    recurrent = next((key for key in raw if re.match(RECURRENT_KEYS, key) and raw[key]), None)
    kinds = raw.get("layer_types")
    if isinstance(kinds, list):
        recurrent = next(
            (
                f"layer_types: {kind}"
                for kind in kinds
                if (isinstance(kind, str) and not kind.endswith("_attention")) or kind == "linear_attention"
            ),
            recurrent,
        )
    if model_type in RECURRENT or recurrent is not None:
        what = f"model_type = {model_type!r}" if recurrent is None else f"{recurrent} (model_type {model_type!r})"
        raise ConfigError(f"{path}: {what}: layers with linear attention or a recurrent state are not modelled")
    if raw.get("use_bidirectional_attention") is True:
        raise ConfigError(f"{path}: use_bidirectional_attention = true: encoders are not modelled, only decoders that generate "
                          "token by token")
    if model_type in ENCODERS or raw.get("is_encoder_decoder") is True:
        raise ConfigError(
            f"{path}: model_type = {model_type!r}: encoders are not modelled, only decoders that generate token by token"
        )
    if model_type in CHUNKED:
        raise ConfigError(f"{path}: attention_chunk_size (model_type {model_type!r}): layers that attend within chunks are not "
                          "modelled")
    if model_type not in ARCHITECTURES:
        known = ALIASES.get(model_type)
        known = known or next((name for name, entry in ARCHITECTURES.items() if set(entry.classes) & set(classes)), None)
        if known is None:
            said = f"model_type = {model_type!r}" if model_type else "'model_type' is missing"
            raise ConfigError(
                f"{path}: {said}{f', architectures = {classes}' if classes else ''}: not known; known are "
                f"{', '.join(sorted(ARCHITECTURES))}"
            )
        model_type = known
    return model_type, ARCHITECTURES[model_type]


class _Reader:
    """One file under one entry."""

    def __init__(self, path: Path, raw: Raw, model_type: str, entry: Entry, nested: bool) -> None:
        self.path, self.raw, self.model_type, self.entry, self.nested = path, raw, model_type, entry, nested
        self.used: set[str] = set()

    # ---- values ----------------------------------------------------------------------------------

    def fail(self, text: str) -> ConfigError:
        return ConfigError(f"{self.path}: {text}")

    def integer(self, *names: str, default: int | None = None) -> int:
        for name in names:
            self.used.add(name)
        for name in names:
            value = self.raw.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST:
                raise self.fail(f"{name} = {short(value)}: must be a whole number, 0 to 10^9")
            return value
        if default is None:
            raise self.fail(f"{names[0]!r} is missing")
        return default

    def size(self, key: str, default: int | None = None) -> int:
        said = {name: self.raw[name] for name in SIZES[key] if self.raw.get(name) is not None}
        if len(set(map(repr, said.values()))) > 1:
            raise self.fail(f"{' and '.join(f'{name} = {short(value)}' for name, value in said.items())}: one size, "
                            "must be equal")
        return self.integer(*SIZES[key], default=default)

    def alike(self, *names: str) -> int:
        """A size that a file may give for each layer, where all layers must have the same."""
        for name in names:
            value = self.raw.get(name)
            if isinstance(value, list):
                if len(set(map(repr, value))) != 1:
                    raise self.fail(f"{name} = {short(value)}: sizes that differ by layer are not modelled")
                self.raw = {**self.raw, name: value[0]}
        return self.integer(*names)

    def truth(self, key: str, default: bool = False) -> bool:
        self.used.add(key)
        value = self.raw.get(key, default)
        if not isinstance(value, bool):
            raise self.fail(f"{key} = {short(value)}: must be true or false")
        return value

    def flag(self, said: bool | str) -> bool:
        return self.truth(said) if isinstance(said, str) else said

    # ---- the whole -------------------------------------------------------------------------------

    def spec(self, name: str) -> ModelSpec:
        entry, raw = self.entry, self.raw
        layers, hidden, heads = self.size("num_hidden_layers"), self.size("hidden_size"), self.size("num_attention_heads")
        if heads == 0 or not 0 < layers <= MOST_LAYERS:
            raise self.fail(f"num_attention_heads = {heads}: must be positive" if heads == 0 else
                            f"num_hidden_layers = {layers}: must be a whole number, 1 to {MOST_LAYERS:,}")
        latent = self._latent() if entry.latent else {}
        head_dim = latent.pop("head_dim", 0) or self.size("head_dim", default=0)
        if not head_dim:
            head_dim = hidden // heads
            if hidden % heads:
                raise self.fail(f"hidden_size = {hidden}: must be a multiple of num_attention_heads = {heads}, as head_dim is "
                                "missing")
        kv_heads = heads if latent else self._kv_heads(heads)
        window_tokens, window_layers = self._windows(layers)
        mlp = self._mlp(layers, hidden)
        widths = read_widths(self.path, raw, layers)
        context = self._context()
        positions = 0 if entry.positions is None else context + entry.positions
        if self.model_type == "opt" and self.integer("word_embed_proj_dim", default=hidden) != hidden:
            raise self.fail(
                f"word_embed_proj_dim = {raw['word_embed_proj_dim']}: embeddings of another width than hidden_size are not "
                "modelled"
            )
        no_bias = self.model_type == "mpt" and not self.truth("no_bias", True)
        spec = ModelSpec(
            name=name,
            num_layers=layers,
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=self.size("vocab_size"),
            context_tokens=context,
            tie_embeddings=self.truth("tie_word_embeddings"),
            qk_norm=self.flag(entry.qk_norm),
            gated_mlp=entry.gated,
            qkv_bias=self.flag(entry.qkv_bias) or no_bias,
            o_bias=self.flag(entry.o_bias) or no_bias,
            mlp_bias=self.flag(entry.mlp_bias) or no_bias,
            learned_positions=positions,
            window_tokens=window_tokens,
            window_layers=window_layers,
            attention_bits=widths.attention_bits,
            mlp_bits=widths.mlp_bits,
            head_bits=widths.head_bits,
            gemm_dtype=widths.compute,
            kv_bytes=widths.kv_bytes or 2,
            notes=self._notes(widths),
            **mlp,
            **latent,
        )
        self._refuse_unknown()
        return spec

    def _notes(self, widths: Widths) -> tuple[str, ...]:
        notes = list(widths.notes)
        if self.nested:
            notes.append("text_config alone: parts for other media are left out")
        if self.raw.get("num_nextn_predict_layers"):
            notes.append("multi-token prediction layers are left out")
        return tuple(notes)

    def _refuse_unknown(self) -> None:
        known = [re.compile(rf"{key}$") for key in self.entry.keys]
        for key, value in self.raw.items():
            if key in self.used or value is None or value is False or re.match(HARMLESS, key) or any(k.match(key) for k in known):
                continue
            raise self.fail(
                f"{key} = {short(value)}: not known of model_type {self.model_type!r}, and may change its size or its work: "
                "take the key out if it does not"
            )

    # ---- attention -------------------------------------------------------------------------------

    def _kv_heads(self, heads: int) -> int:
        if self.model_type == "falcon":
            if self.truth("new_decoder_architecture"):
                return self.integer("num_kv_heads", "num_key_value_heads", "n_head_kv", default=heads)
            given = self.integer("n_head_kv", default=0)  # the first Falcon-40B (RefinedWeb) has groups and says so here alone
            self.integer("num_kv_heads", default=0)
            if given > 1:
                return given
            return 1 if self.truth("multi_query") else heads
        if self.model_type == "gpt_bigcode":
            self.integer("num_key_value_heads", default=1)
            return 1 if self.truth("multi_query") else heads
        if self.model_type == "chatglm" and not self.truth("multi_query_attention"):
            self.size("num_key_value_heads", default=0)
            return heads
        if self.model_type == "mpt":
            attention = self.raw.get("attn_config") or {}
            kind = attention.get("attn_type", "multihead_attention") if isinstance(attention, Mapping) else attention
            if kind == "multiquery_attention":
                return 1
            if kind == "grouped_query_attention":
                return int(attention["kv_n_heads"])
            if kind != "multihead_attention":
                raise self.fail(f"attn_config.attn_type = {short(kind)}: not modelled")
            return heads
        if self.model_type == "minimax_m2":
            kinds = self.raw.get("attn_type_list") or [1]
            if not isinstance(kinds, list) or any(kind != 1 for kind in kinds):
                raise self.fail("attn_type_list: layers with linear attention are not modelled")
        return self.size("num_key_value_heads", default=heads)

    def _latent(self) -> dict[str, Any]:
        rope, nope = self.integer("qk_rope_head_dim"), self.integer("qk_nope_head_dim")
        self.used |= {"head_dim", "num_key_value_heads", "num_kv_heads"}
        return {
            "head_dim": rope + nope,
            "rope_dim": rope,
            "value_dim": self.integer("v_head_dim"),
            "kv_lora_rank": self.integer("kv_lora_rank"),
            "q_lora_rank": self.integer("q_lora_rank", default=0),
        }

    def _windows(self, layers: int) -> tuple[int, int]:
        """Tokens of the window, and how many layers have it."""
        raw, entry = self.raw, self.entry
        window = raw.get("sliding_window", raw.get("sliding_window_size"))
        kinds = raw.get("layer_types")
        if kinds is not None:
            if not (isinstance(kinds, list) and len(kinds) == layers):
                raise self.fail(f"layer_types: must be a list of {layers} names, one a layer")
            odd = set(map(str, kinds)) - {"full_attention", "sliding_attention"}
            if odd:
                raise self.fail(
                    f"layer_types: {', '.join(sorted(odd))}: not modelled, known are full_attention, sliding_attention"
                )
        if window in (None, 0, False):
            if kinds is not None and "sliding_attention" in kinds:
                raise self.fail("layer_types: has sliding_attention, but sliding_window is missing")
            return 0, 0
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise self.fail(f"sliding_window = {short(window)}: must be a positive whole number")
        if window >= self._context():  # it spans whatever the model can hold
            return 0, 0
        if kinds is not None:
            counted = sum(kind == "sliding_attention" for kind in kinds)
            return (window, counted) if counted else (0, 0)
        if not entry.windows:
            if raw.get("use_sliding_window") is False:
                return 0, 0
            raise self.fail(f"sliding_window = {window}: model_type {self.model_type!r} is known without windows")
        if entry.windows == "all":
            return (window, layers) if raw.get("use_sliding_window", True) else (0, 0)
        if entry.windows == "alternate":
            return window, (layers + 1) // 2
        if entry.windows == "last":
            first = self.integer("max_window_layers", default=layers)
            counted = max(0, layers - first) if self.truth("use_sliding_window") else 0
            return (window, counted) if counted else (0, 0)
        every = raw.get("sliding_window_pattern", raw.get("_sliding_window_pattern", entry.pattern))
        if isinstance(every, str) and every and set(every) <= {"L", "G"}:  # EXAONE's: L local, G global, repeated
            return window, sum(every[i % len(every)] == "L" for i in range(layers))
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise self.fail(f"sliding_window_pattern = {short(every)}: must be a positive whole number")
        return window, layers - layers // every

    # ---- MLP -------------------------------------------------------------------------------------

    def _mlp(self, layers: int, hidden: int) -> dict[str, Any]:
        """Sizes of the MLP, routed and shared experts, and of the dense layers among them."""
        entry = self.entry
        experts = self.integer(*entry.experts, default=0) if entry.experts else 0
        if experts == 0:
            if self.model_type == "mpt":
                return {"intermediate_size": self.integer("expansion_ratio") * hidden}
            if self.model_type == "falcon":
                factor = self.integer("ff_factor", default=4)
                return {"intermediate_size": self.size("intermediate_size", default=factor * hidden)}
            if self.model_type == "qwen":  # the width of both halves together
                return {"intermediate_size": self.size("intermediate_size") // 2}
            default = 4 * hidden if self.model_type in ("gpt2", "gpt_bigcode", "gptj", "bloom") else None
            return {"intermediate_size": self.size("intermediate_size", default=default)}
        per_token = self.alike(*entry.experts_per_token)
        width = self.alike(entry.expert_size)
        if entry.shared and self.raw.get(entry.shared) is not None:
            self.alike(entry.shared)
        dense = self._dense_layers(layers)
        shared = 0
        if entry.shared.endswith("_size"):
            shared = self.integer(entry.shared, default=0)
        elif entry.shared:
            shared = self.integer(entry.shared, default=0) * width
        inner = self.size("intermediate_size", default=0)
        if dense and not inner:
            raise self.fail("'intermediate_size' is missing, and some layers are dense")
        return {
            "intermediate_size": width,
            "num_experts": experts,
            "experts_per_token": per_token,
            "shared_size": shared,
            "shared_gate": self.model_type == "qwen2_moe" and shared > 0,
            "dense_layers": dense,
            "dense_size": inner if dense else 0,
        }

    def _dense_layers(self, layers: int) -> int:
        """Layers of a mixture of experts whose MLP is dense."""
        if self.raw.get("mlp_layer_types") is not None:
            self.used.add("mlp_layer_types")
            kinds = self.raw["mlp_layer_types"]
            if not (isinstance(kinds, list) and len(kinds) == layers and set(kinds) <= {"dense", "sparse"}):
                raise self.fail(f"mlp_layer_types: must be {layers} times dense or sparse")
            return sum(kind == "dense" for kind in kinds)
        if self.model_type == "ernie4_5_moe":
            first, every = self.integer("moe_layer_start_index", default=1), self.integer("moe_layer_interval", default=1)
            last = self.raw.get("moe_layer_end_index", -1)
            if isinstance(last, bool) or not isinstance(last, int):
                raise self.fail(f"moe_layer_end_index = {short(last)}: must be a whole number")
            last = layers - 1 if last == -1 else last
            return layers - sum((i + 1) % (every or 1) == 0 and first <= i <= last for i in range(layers))
        first = self.integer(self.entry.dense_first, default=0) if self.entry.dense_first else 0
        every = self.integer("moe_layer_freq", "decoder_sparse_step", default=1) or 1
        only = self.raw.get("mlp_only_layers") or []
        if not (isinstance(only, Sequence) and all(isinstance(i, int) for i in only)):
            raise self.fail(f"mlp_only_layers = {short(only)}: must be a list of layers")
        step = "decoder_sparse_step" in self.entry.keys
        sparse = [i for i in range(layers) if i not in only and i >= first and ((i + 1) % every == 0 if step else i % every == 0)]
        return layers - len(sparse)

    # ---- context ---------------------------------------------------------------------------------

    def _context(self) -> int:
        """Longest context, rope scaling included, as vLLM derives it: ``factor`` times the limit, for YaRN times
        ``original_max_position_embeddings``; ``llama3``, ``longrope`` and multi-modal scalings leave the limit."""
        limits = [self.integer(key) for key in CONTEXT if self.raw.get(key) is not None]
        self.used |= set(CONTEXT)
        if not limits:
            raise self.fail(f"{CONTEXT[0]!r} is missing")
        limit = self.integer("model_max_length", default=0) or min(limits)
        scaling = self.raw.get("rope_scaling") or self.raw.get("rope_parameters")
        if scaling is None:
            return limit
        if not isinstance(scaling, Mapping):
            raise self.fail(f"rope_scaling = {short(scaling)}: must be an object")
        if "full_attention" in scaling:  # one for each kind of layer
            scaling = scaling["full_attention"]
            if not isinstance(scaling, Mapping):
                raise self.fail(f"rope_parameters.full_attention = {short(scaling)}: must be an object")
        kind = str(scaling.get("rope_type", scaling.get("type", "default")))
        if kind in ("default", "llama3", "longrope", "su", "mrope", "proportional") or self.model_type == "gemma3_text":
            return limit
        factor = scaling.get("factor", 1.0)
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 1 <= factor <= 1e6:
            raise self.fail(f"rope_scaling.factor = {short(factor)}: must be a number, 1 or more")
        if kind == "yarn":
            original = scaling.get("original_max_position_embeddings", limit)
            if isinstance(original, bool) or not isinstance(original, int) or original < 1:
                raise self.fail(f"rope_scaling.original_max_position_embeddings = {short(original)}: must be a positive whole "
                                "number")
            limit = original
        elif kind not in ("linear", "dynamic", "ntk"):
            raise self.fail(f"rope_scaling.rope_type = {short(kind)}: not known; known are linear, dynamic, yarn, llama3, "
                            "longrope")
        return int(limit * factor)
