# SPDX-License-Identifier: Apache-2.0
"""Shape of a model from a Hugging Face `config.json`.

The names and defaults of fields, and the kinds of layers, are taken from the configuration class of
the model type in the package `transformers`. As a check, the result is compared with the model that
`transformers` builds on torch's meta device: number of parameters, and layers with experts or
windows. Model types that `transformers` does not have raise ValueError.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from . import config_classes
from .config_classes import Built
from .config_family import ACTIVATIONS, family_of
from .config_fields import Fields, Missing
from .layer_kinds import (
    CSA_RATIO,
    DELTA_NET,
    HYBRID,
    WINDOW,
    Hybrid,
    Indexer,
    Latent,
    Mixer,
    gated_delta_net,
    kimi_delta,
    lightning,
    mamba2,
)
from .model import Model

TOLERANCE = (
    0.03  # relative difference of the number of parameters; biases and small norms are not counted
)
KV_HEADS = "num_key_value_heads", "num_kv_heads"
HEAD_DIM = "head_dim", "attention_head_dim", "kv_channels"
FFN = "intermediate_size", "ffn_hidden_size", "ffn_dim"
EXPERTS = "n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts"
TOP_K = "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_k"
OF_EXPERT = "moe_intermediate_size", "expert_ffn_hidden_size"
SHARED_WIDTH = "shared_expert_intermediate_size", "shared_intermediate_size"
SHARED = "n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert"
# transformers' kind of layer -> letter of `layer_kinds.KINDS`. Layers in LAYER_TYPES have attention
# and an MLP, layers in HALVES have one of them.
LAYER_TYPES = {
    "full_attention": "F", "attention": "F", "indexed_attention": "F", "sliding_attention": "W",
    "chunked_attention": "C", "linear_attention": "L", "mamba": "L",
}  # fmt: skip
# The same for DeepSeek-V4, whose layers are hybrid attention: window keys only, CSA and HCA.
HYBRID_LAYER_TYPES = {
    "sliding_attention": "V", "compressed_sparse_attention": "S",
    "heavily_compressed_attention": "H",
}  # fmt: skip
HYBRIDS = ("deepseek_v4",)
HALVES = {
    "full_attention": "*", "attention": "*", "linear_attention": "M", "mamba": "M", "mlp": "-",
    "moe": "-",
}  # fmt: skip
ONE_HALF = ("nemotron_h",)
MLP_TYPES = {"dense": False, "sparse": True, "moe": True, "hash_moe": True}  # with experts
ALL_WINDOWS = (  # model types in which a window without a list of layers applies to all layers
    "mistral", "mixtral", "starcoder2", "phi3", "phimoe", "qwen3_moe", "moshi", "ministral3",
)  # fmt: skip
# Unsupported model types -> description of their attention, which no field describes.
OTHER_ATTENTION = {"diffllama": "differential attention"}
# Model types without attention.
STATES_ALONE = ("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm")
ALIBI = ("bloom", "mpt")
UNGATED = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu", "relu2", "xielu")
GATED = ("bitnet", "gemma", "recurrent_gemma", "vaultgemma", "glm4v", "diffusion_gemma")
NO_POSITIONS = ("nemotron_h", "kimi_linear", "jamba", "zamba")
GATED_OUTPUT = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text", "afmoe")
# Field for layers with a window -> field for the other layers. The two values must be equal.
OF_WINDOWS = {
    "swa_head_dim": "head_dim",
    "swa_v_head_dim": "v_head_dim",
    "swa_num_attention_heads": "num_attention_heads",
}
# Fields that transformers converts to `layer_types` and `mlp_layer_types`.
OF_LAYER_TYPES = (
    "sliding_window_pattern", "_sliding_window_pattern", "max_window_layers", "use_sliding_window",
    "full_attention_interval", "global_attn_every_n_layers", "hybrid_override_pattern",
    "linear_attn_config", "attn_layer_indices", "no_rope_layer_interval", "attn_type_list",
    "layers_block_type", "full_attn_idxs", "sliding_window_size",
)  # fmt: skip
OF_MLP_TYPES = (
    "first_k_dense_replace", "num_dense_layers", "interleave_moe_layer_step", "mlp_only_layers",
    "decoder_sparse_step", "moe_layer_freq",
)  # fmt: skip


class Source(NamedTuple):
    """Configuration of a language model, as fields and as an object of transformers.

    Attributes:
        fields: Values of the configuration, by the attribute names of its class in transformers.
        config: Configuration object of transformers.
        nested: Whether the configuration is nested in a multimodal configuration.
    """

    fields: Fields
    config: Any
    nested: bool

    @property
    def kind(self) -> str:
        """Model type, such as "llama"."""
        return self.config.model_type


def from_config(config: dict[str, Any], name: str = "config.json") -> Model:
    """Return the language model that a config.json describes.

    Args:
        config: Content of a `config.json`.
        name: Name of the file, for errors.

    Returns:
        The shape of the language model, without vision and audio parts.

    Raises:
        ValueError: A field is missing, unknown or has a wrong type, or the number of parameters
            differs from transformers' model by more than 3 %.
    """
    source = _source(config, name)
    fields = source.fields
    try:
        model = _model(source, config)
    except Missing as error:
        layers = fields.get("num_hidden_layers", 0)
        if unread := fields.unread(layers if isinstance(layers, int) else 0):
            missing = str(error).removeprefix(f"{fields.name}: ")
            raise ValueError(
                f"{fields.name}: unknown fields {', '.join(map(repr, unread))}, and {missing}"
            ) from None
        raise
    built = config_classes.built(source.config, name, model.layers)
    _compare(model, built, source)
    family, sinks = family_of(model, fields, source.kind, built)
    fields.check_unread(model.layers)
    return replace(model, family=family, sinks=sinks)


# --- selected fields -------------------------------------------------------------------------


def _source(config: dict[str, Any], name: str, nested: bool = False) -> Source:
    kind = config.get("model_type") or ""
    if not isinstance(kind, str):
        raise ValueError(f"{name}: 'model_type' must be a string, got {kind!r:.60}")
    if kind in STATES_ALONE:
        raise ValueError(
            f"{name}: model_type {kind!r} has no attention layers, which advise requires; "
            "hybrids such as nemotron_h are supported"
        )
    if kind in OTHER_ATTENTION:
        raise ValueError(
            f"{name}: model_type {kind!r} has {OTHER_ATTENTION[kind]}, which is not supported"
        )
    if kind in ALIBI:
        raise ValueError(
            f"{name}: model_type {kind!r} uses ALiBi, which neither Megatron-LM nor this package "
            "supports"
        )
    if not config_classes.is_known(kind):
        for key in config_classes.NESTED:
            if isinstance(inner := config.get(key), dict):
                tied = {k: config[k] for k in ("tie_word_embeddings",) if k in config}
                return _source(tied | inner, f"{name}: {key}", True)
        if not kind:
            raise ValueError(f"{name}: has no 'model_type', which transformers requires")
        raise ValueError(
            f"{name}: transformers {config_classes.version()} has no model_type {kind!r}; upgrade "
            "transformers, or describe the model by a Megatron command after --"
        )
    config = _as_layer_types(config)
    made, part = config_classes.config_of(config, name)
    values = config_classes.values_of(made)
    extras = {} if part else {k: v for k, v in config.items() if k not in values}
    aliases = {k: v for k, v in type(made).attribute_map.items() if k not in values}
    extras = {k: v for k, v in extras.items() if k not in aliases}
    fields = Fields(values | extras, name, aliases)
    fields.accept("model_type")
    return Source(fields, made, nested or part)


def _as_layer_types(config: dict[str, Any]) -> dict[str, Any]:
    """Convert lists of 0 and 1 to `layer_types` and `mlp_layer_types`, as transformers does."""
    made = dict(config)
    kinds = ("hybrid_layer_pattern", "layer_types", ("full_attention", "sliding_attention"))
    mlps = ("moe_layer_freq", "mlp_layer_types", ("dense", "sparse"))
    for key, target, words in (kinds, mlps):
        if isinstance(pattern := config.get(key), list) and target not in config:
            made[target] = [words[bool(sign)] for sign in pattern]
            del made[key]
    return made


# --- sizes -----------------------------------------------------------------------------------


def _model(source: Source, config: dict[str, Any]) -> Model:
    fields, kind = source.fields, source.kind
    hidden, heads, vocabulary = (
        _size(fields, key) for key in ("hidden_size", "num_attention_heads", "vocab_size")
    )
    blocks = fields.items_of("layers_block_type", str) if kind in ONE_HALF else []
    layers = len(blocks) or _size(fields, "num_hidden_layers", "num_layers")
    _check_positions(source)
    _check_windows(fields)
    pattern = _pattern(source, layers)
    with_mlp = sum(letter in "FWCLVSH-" for letter in pattern)
    mlp = _mlp(source, pattern, with_mlp, hidden)
    also = ("parts that are not the language model (vision, audio)",) * source.nested
    if fields.size("num_nextn_predict_layers") or fields.size("mtp_num_hidden_layers"):
        also += ("multi-token prediction",)
    sizes: dict[str, Any] = {
        "name": " ".join(str(config.get("_name_or_path") or fields.name.split(": ")[0]).split()),
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": _kv_heads(source, heads),
        "vocabulary": vocabulary,
        "head_dim": fields.size(*HEAD_DIM),
        "value_dim": fields.size("v_head_dim"),
        "gated": _gated(source),
        "tied": fields.flag("tie_word_embeddings"),
        "output_gate": fields.flag("attn_output_gate", kind in GATED_OUTPUT),
        "pattern": pattern if set(pattern) != {"F"} else "",
        "window": fields.needed("sliding_window") if "W" in pattern else 0,
        "chunk": fields.needed("attention_chunk_size") if "C" in pattern else 0,
        "mixer": _mixer(source) if set(pattern) & set("LM") else None,
        "also": also,
    }
    hybrid = _hybrid(fields, pattern) if kind in HYBRIDS else None
    sizes |= {"hybrid": hybrid, "also": also + ("hyper-connections",) * (hybrid is not None)}
    latent = _latent(fields, heads)
    if latent.get("indexer") is not None and sizes["pattern"]:
        raise ValueError(
            f"{fields.name}: 'index_topk' with several kinds in 'layer_types': a model with an "
            "indexer is supported only if all layers are of one kind"
        )
    return Model(**(sizes | latent | mlp))


def _size(fields: Fields, *keys: str) -> int:
    if not any(key in fields for key in keys):
        raise Missing(
            f"{fields.name}: has no {keys[0]!r}; a config.json of a decoder has "
            "num_hidden_layers, hidden_size, num_attention_heads, intermediate_size and vocab_size"
        )
    return fields.size(*keys)


def _check_positions(source: Source) -> None:
    """Raise ValueError if the model has position embeddings that are not rotary.

    Other position embeddings have a maximum length. Models without positions are accepted.
    """
    fields = source.fields
    if fields.flag("alibi") or fields.object_of("attn_config").flag("alibi"):
        raise ValueError(
            f"{fields.name}: 'alibi' is true: neither Megatron-LM nor this package has ALiBi"
        )
    position_type = fields.text("position_embedding_type")
    if position_type and not position_type.startswith(("rope", "rotary", "nope", "none")):
        raise ValueError(
            f"{fields.name}: 'position_embedding_type' is {position_type!r}; rope and nope are "
            "supported"
        )
    rotary = ("rope_parameters", "rope_theta", "rotary_dim", "rope_scaling", "rotary_pct")
    if position_type or source.kind in NO_POSITIONS:
        return
    if not any(key in fields for key in rotary):
        keys = ("n_positions", "max_position_embeddings", "max_seq_len")
        table = next((key for key in keys if key in fields), "model_type")
        raise ValueError(
            f"{fields.name}: {table!r} {fields.get(table)!r}: model_type {source.kind!r} has no "
            "rotary positions; only models with rotary positions are supported"
        )


def _check_windows(fields: Fields) -> None:
    """Raise ValueError if layers with a window have heads of another size or number."""
    for key, full_key in OF_WINDOWS.items():
        if (size := fields.size(key)) != fields.size(full_key) and size:
            raise ValueError(
                f"{fields.name}: {key!r} {size} differs from {full_key!r} {fields.size(full_key)}; "
                "only models whose layers all have the same heads are supported"
            )


def _kv_heads(source: Source, heads: int) -> int:
    fields, kind = source.fields, source.kind
    if kind == "falcon" and not fields.flag("new_decoder_architecture"):
        fields.accept(*KV_HEADS)
        return 1 if fields.flag("multi_query") else heads
    kv_heads = fields.size(*KV_HEADS) or heads
    if kind == "mimo_v2_flash":  # layers with a window have twice this number of heads
        fields.accept("swa_num_key_value_heads")
        return 2 * kv_heads
    return max(kv_heads, fields.size("swa_num_key_value_heads"))


def _gated(source: Source) -> bool:
    """Return whether the MLP is gated.

    The activation determines it; for gelu, the model family does.
    """
    fields = source.fields
    key = next((key for key in ACTIVATIONS if key in fields), "")
    act = fields.text(key) if key else "silu"
    return act not in UNGATED or source.kind.startswith(GATED)


def _latent(fields: Fields, heads: int) -> dict[str, Any]:
    """Return the fields of `Model` for multi-head latent attention; {} for other attention.

    Attention uses heads that are expanded from latents, so there is one key head per query head.
    """
    if not fields.size("kv_lora_rank"):
        return {}
    rope = fields.needed("qk_rope_head_dim")
    index = tuple(fields.size(f"index_{key}") for key in ("n_heads", "head_dim", "topk"))
    if set(fields.items_of("indexer_types", str)) - {"full"}:
        raise ValueError(
            f"{fields.name}: 'indexer_types' has {fields['indexer_types']!r:.60}; only 'full' "
            "(an indexer in each layer) is supported"
        )
    return {
        "indexer": Indexer(*index) if all(index) else None,
        "kv_heads": heads,
        "head_dim": fields.needed("qk_nope_head_dim") + rope,
        "value_dim": fields.needed("v_head_dim"),
        "latent": Latent(fields.size("kv_lora_rank"), rope, fields.size("q_lora_rank")),
    }


def _hybrid(fields: Fields, pattern: str) -> Hybrid:
    """Return the sizes of DeepSeek-V4's hybrid attention."""
    fields.accept("hc_mult", "hc_sinkhorn_iters", "hc_eps")  # hyper-connections, in `also`
    rows = fields.object_of("compress_rates")
    ratios = {letter: rows.size(kind) for kind, letter in HYBRID_LAYER_TYPES.items()}
    if "S" in pattern and ratios["S"] != CSA_RATIO:
        raise ValueError(
            f"{fields.name}: 'compress_rates' has {ratios['S']} for compressed_sparse_attention; "
            f"only {CSA_RATIO} is supported"
        )
    if "H" in pattern and not ratios["H"]:
        raise ValueError(
            f"{fields.name}: 'compress_rates' has no heavily_compressed_attention, which "
            "'layer_types' has"
        )
    index = [fields.needed(f"index_{key}") for key in ("n_heads", "head_dim", "topk")]
    return Hybrid(
        Indexer(*index),
        window=fields.needed("sliding_window"),
        ratio=ratios["H"] or Hybrid.ratio,
        q_rank=fields.needed("q_lora_rank"),
        groups=fields.needed("o_groups"),
        out_rank=fields.needed("o_lora_rank"),
    )


# --- MLPs and experts ------------------------------------------------------------------------


def _mlp(source: Source, pattern: str, with_mlp: int, hidden: int) -> dict[str, Any]:
    """Return the fields of `Model` that describe MLPs and experts."""
    fields, kind = source.fields, source.kind
    ffn = fields.size(*FFN) or 4 * hidden  # the default of GPT-2 and its descendants
    experts, of_expert = fields.size(*EXPERTS), fields.size(*OF_EXPERT)
    if kind == "granitemoehybrid" and not experts:  # only the shared MLP remains
        return {"ffn": fields.needed(*SHARED_WIDTH)}
    if experts <= 1:
        fields.accept(*TOP_K, *OF_EXPERT)
        return {"ffn": ffn}
    shared = fields.size(*SHARED_WIDTH)
    dense = ffn
    if kind.startswith("llama4"):
        dense, shared = fields.needed("intermediate_size_mlp"), ffn
    of_expert = of_expert or ffn
    number = fields.size(*SHARED)
    if not shared and number:
        shared = number * (fields.size("moe_shared_expert_intermediate_size") or of_expert)
    has_experts = _experts_at(source, pattern, with_mlp)
    if not any(has_experts):
        fields.accept(*TOP_K, "moe_shared_expert_intermediate_size")
        return {"ffn": dense or of_expert}
    return {
        "ffn": of_expert,
        "experts": experts,
        "top_k": fields.needed(*TOP_K),
        "shared": shared,
        "moe_layers": sum(has_experts),
        "expert_pattern": "".join("01"[has] for has in has_experts),
        "dense_ffn": dense or of_expert,
    }


def _experts_at(source: Source, pattern: str, with_mlp: int) -> list[bool]:
    """Return for each layer with an MLP whether it has experts."""
    fields = source.fields
    every = range(with_mlp)
    types = fields.items_of("layers_block_type", str)
    if _one_half(source, types):
        return [block == "moe" for block in types if HALVES[block] == "-"]
    if types := fields.items_of("mlp_layer_types", str):
        fields.accept(*OF_MLP_TYPES)
        return [_is_sparse(fields, block) for block in types]
    if isinstance(fields.get("moe_layers"), list):
        chosen = set(fields.items_of("moe_layers", int))
        fields.accept("interleave_moe_layer_step")
        return [layer in chosen for layer in every]
    step = fields.size("moe_layer_freq") or 1
    if "moe_layer_start_index" in fields:
        step = fields.size("moe_layer_interval") or 1
        first, last = fields.size("moe_layer_start_index"), fields["moe_layer_end_index"]
        last = with_mlp - 1 if last == -1 else last
        return [(layer + 1) % step == 0 and first <= layer <= last for layer in every]
    if period := fields.size("expert_layer_period"):
        return [layer % period == fields.size("expert_layer_offset") for layer in every]
    if step > 1 or fields.size("first_k_dense_replace"):
        dense = fields.size("first_k_dense_replace")
        return [layer >= dense and layer % step == 0 for layer in every]
    if dense := fields.size("num_dense_layers", "moe_layer_num_skipped"):
        return [layer >= dense for layer in every]
    step = fields.size("decoder_sparse_step", "interleave_moe_layer_step") or 1
    dense_ones = set(fields.items_of("mlp_only_layers", int))
    return [layer not in dense_ones and (layer + 1) % step == 0 for layer in every]


def _is_sparse(fields: Fields, kind: str) -> bool:
    if kind not in MLP_TYPES:
        raise ValueError(
            f"{fields.name}: 'mlp_layer_types' has {kind!r}; only {', '.join(MLP_TYPES)} are "
            "supported"
        )
    return MLP_TYPES[kind]


# --- kinds of attention ----------------------------------------------------------------------


def _pattern(source: Source, layers: int) -> str:
    """Return `Model.pattern`: one letter of `layer_kinds.KINDS` per layer."""
    fields = source.fields
    for key in ("layer_types", "layers_block_type"):
        if types := fields.items_of(key, str):
            break
    if types:
        letters = HALVES if _one_half(source, types) else LAYER_TYPES
        letters = HYBRID_LAYER_TYPES if source.kind in HYBRIDS else letters
        fields.accept("layer_types", "layers_block_type", *OF_LAYER_TYPES)
        if odd := sorted(set(types) - set(letters)):
            raise ValueError(
                f"{fields.name}: {key!r} has {odd[0]!r}; only {', '.join(letters)} are supported "
                "for this model"
            )
        if len(types) != layers:
            raise ValueError(
                f"{fields.name}: {key!r} must have {layers} entries (one per layer), got "
                f"{len(types)}"
            )
        if "sliding_attention" not in types:
            fields.accept("sliding_window")
        if "chunked_attention" not in types:
            fields.accept("attention_chunk_size")
        return "".join(letters[layer_type] for layer_type in types)
    if linear := fields.items_of("attn_type_list", int):  # MiniMax: 0 is linear attention
        if len(linear) != layers:
            raise ValueError(
                f"{fields.name}: 'attn_type_list' must have {layers} entries (one per layer), got "
                f"{len(linear)}"
            )
        return "".join("LF"[bool(full)] for full in linear)
    return _windows(source, layers)


def _one_half(source: Source, types: list[str]) -> bool:
    """Return whether each layer consists of attention, a mixer or an MLP alone."""
    return source.kind in ONE_HALF or bool({"mlp", "moe"} & set(types))


def _windows(source: Source, layers: int) -> str:
    """Return `Model.pattern` if there are no `layer_types`: a window in all layers, or in none."""
    fields = source.fields
    if source.kind not in ALL_WINDOWS:
        return "F" * layers  # `check_unread` raises for the field of the window
    used = fields.size("sliding_window") and fields.flag("use_sliding_window", True)
    fields.accept("max_window_layers")
    return ("W" if used else "F") * layers


def _mixer(source: Source) -> Mixer:
    """Return the mixer of linear-attention or state-space layers.

    The supported mixers are Mamba-2, Qwen3-Next's gated delta net, Kimi Linear's delta attention,
    and MiniMax's lightning attention.
    """
    fields, kind = source.fields, source.kind
    if "linear_num_value_heads" in fields:
        return gated_delta_net(*map(fields.needed, DELTA_NET))
    if "linear_num_heads" in fields:
        return kimi_delta(
            *map(fields.needed, ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"))
        )
    if kind == "minimax":
        fields.accept("block_size")
        heads = fields.size("num_attention_heads")
        return lightning(heads, fields.size("head_dim") or fields.size("hidden_size") // heads)
    fields.accept("mamba_expand", "mamba_chunk_size", "mamba_conv_bias", "use_conv_bias",
                  "chunk_size", "mamba_norm_before_gate", "mamba_proj_bias")  # fmt: skip
    if "mamba_n_heads" in fields:
        names = ("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv")
        return mamba2(*map(fields.needed, names))
    if "mamba_num_heads" in fields:
        return mamba2(*map(fields.needed, ("mamba_num_heads", "n_groups", "ssm_state_size",
                                           "mamba_head_dim", "conv_kernel")))  # fmt: skip
    unread = ", ".join(map(repr, fields.unread(0))) or f"model_type {kind!r}"
    raise ValueError(
        f"{fields.name}: cannot count layers of linear attention or of a state-space model from "
        f"{unread}; supported fields are 'linear_num_value_heads', 'linear_num_heads' and "
        "'mamba_num_heads'"
    )


# --- comparison with transformers' model -----------------------------------------------------


def _compare(model: Model, made: Built, source: Source) -> None:
    """Raise ValueError if parameters, experts or windows differ from transformers' model."""
    name, kind = source.fields.name, source.kind
    unread = source.fields.unread(model.layers)
    why = f"; unknown fields: {', '.join(unread)}" if unread else ""
    if _differ(model.parameters, made.parameters):
        raise ValueError(
            f"{name}: model_type {kind!r} is not supported: its fields give "
            f"{model.parameters / 1e9:.3f} billion parameters, but transformers' model has "
            f"{made.parameters / 1e9:.3f} billion{why}"
        )
    mlps = iter(model.experts_at)
    for at, (part, counted, layer) in enumerate(
        zip(model.parts, model.by_layer, made.layers, strict=False)
    ):
        sparse = part.mlp and next(mlps)
        window = model.window if part.attention == WINDOW else 0
        if part.attention in HYBRID and model.hybrid is not None:
            window = model.hybrid.window
        wrong = [
            (_differ(sum(counted), layer.parameters), f"{sum(counted):,} parameters",
             f"{layer.parameters:,}"),
            (bool(sparse) != layer.sparse, f"experts: {bool(sparse)}", f"{layer.sparse}"),
            (layer.window is not None and layer.window != window, f"a window of {window}",
             f"{layer.window}"),
        ]  # fmt: skip
        for differs, counted_text, built_text in wrong:
            if differs:
                raise ValueError(
                    f"{name}: model_type {kind!r} is not supported: layer {at} has {counted_text} "
                    f"by its fields, but {built_text} in transformers' model{why}"
                )


def _differ(counted: int, expected: int) -> bool:
    return abs(counted - expected) > TOLERANCE * expected
