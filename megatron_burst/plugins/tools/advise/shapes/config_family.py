# SPDX-License-Identifier: Apache-2.0
"""Flags of Megatron-LM for properties of a config.json that are not sizes.

Biases, norms and sinks are read from transformers' model on the meta device. Other properties are
read from fields of the config.json, or follow from the model type.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import NamedTuple

from .config_classes import Built
from .config_fields import Fields
from .model import NORMS, POSITIONS, Family, Model

ACTIVATIONS = (
    "mlp_hidden_act", "hidden_act", "hidden_activation", "activation_function", "activation",
)  # fmt: skip
OUTPUT = ("o_proj", "out_proj", "dense", "c_proj", "wo")  # names of attention's output projection
ATTENTION = ("attn", "attention", "self_attention", "mixer")
MLP = ("mlp", "feed_forward", "ffn", "block_sparse_moe", "mixer")
ZERO_CENTERED = (
    "gemma", "gemma2", "gemma3_text", "vaultgemma", "qwen3_next", "qwen3_5_text",
    "qwen3_5_moe_text", "nemotron",
)  # fmt: skip
NO_ROPE_IN_FULL = ("cohere2", "cohere2_moe", "exaone4", "exaone_moe", "afmoe")
SIGMOID = (  # model types whose router applies a sigmoid
    "deepseek_v3", "deepseek_v32", "glm4_moe", "glm4v_moe_text", "glm4_moe_lite", "glm_moe_dsa",
    "dots1", "kimi_linear", "nemotron_h", "minimax_m2", "mimo_v2_flash", "exaone_moe",
    "solar_open", "hy_v3", "afmoe", "llama4", "llama4_text",
)  # fmt: skip
SCORES = "scoring_func", "score_function", "score_func", "moe_router_activation_func"
SCALES = "routed_scaling_factor", "route_scale"
# Fields with factors that have no effect if they are 1.
FACTORS = (
    "embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling",
    "logit_scale", "scale_emb", "scale_depth", "attn_logit_softcapping",
    "final_logit_softcapping", "attention_value_scale", "lm_head_multiplier", "key_multiplier",
)  # fmt: skip


class Structure(NamedTuple):
    """Biases, norms, gates and sinks in the layers of a model.

    Attributes:
        qkv_bias: Whether projections to queries, keys and values have biases.
        out_bias: Whether the output projection of attention has a bias.
        mlp_bias: Whether the matrices of the MLP have biases.
        head_norms: Norms of queries and keys: "head" (per head), "all" (over all heads), or ""
            (none).
        layer_norm: Whether norms are LayerNorm instead of RMSNorm.
        norm_bias: Whether norms have a bias.
        norms: Number of norms of hidden states per layer.
        after: Whether norms are applied to the outputs of attention and MLP instead of the inputs.
        expert_bias: Whether the router has a bias per expert for load balancing.
        shared_gate: Whether the shared experts have a gate.
        sinks: Whether attention has sinks.
    """

    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_norms: str = ""
    layer_norm: bool = False
    norm_bias: bool = False
    norms: int = 2
    after: bool = False
    expert_bias: bool = False
    shared_gate: bool = False
    sinks: bool = False


def family_of(model: Model, fields: Fields, kind: str, made: Built) -> tuple[Family, bool]:
    """Return Megatron's flags for properties of a model that are not sizes, such as its norm.

    Args:
        model: Shape of the model.
        fields: Fields of the config.json.
        kind: Model type, such as "llama".
        made: Properties of transformers' model for the config.json.

    Returns:
        The flags, and whether attention has sinks.
    """
    structure = _of_model(made, model)
    fields.accept("add_swa_attention_sink_bias")  # sinks are read from the model
    numerics, rotary = _numerics(fields, model.head_dim)
    flags = [*_attention_flags(model, structure), *_norm_flags(kind, structure)]
    flags += _router_flags(fields, kind, structure) if model.experts else []
    flags += _no_rope(model, fields, kind)
    gate, activation = _activation(fields, model)
    flags += ["--squared-relu"] if not model.gated and _act(fields) == "relu2" else []
    lacking = [*_lacking(model, fields, kind, structure), *activation, *rotary]
    norms = NORMS.replace("RMSNorm", "LayerNorm") if structure.layer_norm else NORMS
    if structure.mlp_bias:
        norms = norms.replace(" --disable-bias-linear", "")
    if kind in ("nemotron_h",) or fields.get("position_embedding_type") in ("nope", "none"):
        norms = norms.replace("type rope", "type none")
    return Family(
        " ".join(flags),
        numerics,
        norms,
        gate,
        tuple(lacking),
        biases=structure.mlp_bias,
        left="" if numerics or rotary else POSITIONS,
    ), structure.sinks and model.hybrid is None  # hybrid attention always has sinks


# --- structure -------------------------------------------------------------------------------


def _of_model(made: Built, model: Model) -> Structure:
    biases = [key.split(".") for key in made.names if key.endswith(".bias")]
    linear = [parts for parts in biases if not any("norm" in p or "ln" in p for p in parts)]
    linear = [
        p for p in linear if not {"conv1d", "router", "gate", "mamba", "linear_attn"} & set(p)
    ]
    attention = [p for p in linear if any(x in part for x in ATTENTION for part in p[:-2])]
    attention = [p for p in attention if "mlp" not in p]
    mlp = [p for p in linear if p not in attention]
    heads = {
        shape[-1]
        for key, shape in made.names.items()
        if _is_head_norm(key) and shape and not key.endswith(".bias")
    }
    norms = [key for key, shape in made.names.items()
             if key.count(".") == 1 and key.endswith(".weight") and shape == (model.hidden,)
             and ("norm" in key or "ln" in key)]  # fmt: skip
    classes = [name for name in made.norms if "Norm" in name]
    layer_norm = bool(classes) and not any("RMS" in name for name in classes)
    halves = max((p.attention is not None) + p.mlp for p in model.parts)
    wide = heads and model.latent is None and max(heads) > model.head_dim
    return Structure(
        qkv_bias=any(p[-2] not in OUTPUT for p in attention),
        out_bias=any(p[-2] in OUTPUT for p in attention),
        mlp_bias=bool(mlp) or any("experts" in k and k.endswith("_bias") for k in made.names),
        head_norms=("all" if wide else "head") if heads else "",
        layer_norm=layer_norm,
        norm_bias=any("norm" in key or "ln" in key for key in map(".".join, biases)),
        norms=len(norms) + 2 - halves if norms else 2,
        after=any("post_feedforward" in key for key in norms)
        and not any("input" in key for key in norms),
        expert_bias=any(
            x in key
            for key in (*made.names, *made.buffers)
            for x in ("correction_bias", "expert_bias")
        ),
        shared_gate=any("shared_expert_gate" in key for key in made.names),
        sinks=any(key.endswith("sinks") for key in made.names),
    )


def _is_head_norm(key: str) -> bool:
    return any(
        part in ("q_norm", "k_norm", "query_layernorm", "key_layernorm", "q_layernorm",
                 "k_layernorm", "q_ln", "k_ln")
        for part in key.split(".")
    )  # fmt: skip


# --- flags -----------------------------------------------------------------------------------


def _attention_flags(model: Model, structure: Structure) -> Iterator[str]:
    latent = model.latent is not None or model.hybrid is not None
    if latent or structure.head_norms == "head":
        yield "--qk-layernorm"
    if latent and model.experts:
        yield "--moe-router-dtype fp32"
    if structure.qkv_bias and not structure.mlp_bias:
        yield "--add-qkv-bias"


def _norm_flags(kind: str, structure: Structure) -> Iterator[str]:
    if kind in ZERO_CENTERED:
        yield "--apply-layernorm-1p"


def _router_flags(fields: Fields, kind: str, structure: Structure) -> Iterator[str]:
    """Yield the flags for a router that is not a softmax over the selected experts."""
    score = _score_function(fields, kind)
    if score != "softmax":
        yield f"--moe-router-score-function {score}"
    elif fields.get("norm_topk_prob") is False:
        yield "--moe-router-pre-softmax"
    if score != "softmax" and structure.expert_bias:
        yield "--moe-router-enable-expert-bias"
    groups = fields.get("n_group") or 1
    if groups > 1 and (fields.get("topk_group") or 1) < groups:
        yield f"--moe-router-num-groups {groups} --moe-router-group-topk {fields['topk_group']}"
    scales = [fields.number(key) for key in SCALES if key in fields]
    if scales and scales[0] != 1:
        yield f"--moe-router-topk-scaling-factor {scales[0]:g}"
    if structure.shared_gate:
        yield "--moe-shared-expert-gate"


def _score_function(fields: Fields, kind: str) -> str:
    """Return the value of Megatron-LM's flag `--moe-router-score-function`."""
    stated = [fields.get(key) for key in SCORES]
    if "sqrtsoftplus" in stated:
        return "sqrtsoftplus"
    return "sigmoid" if kind in SIGMOID or "sigmoid" in stated else "softmax"


def _no_rope(model: Model, fields: Fields, kind: str) -> list[str]:
    """Return the flag for layers without rotary positions; [] if all layers have them."""
    fields.accept("no_rope_layer_interval")
    without = [not rotary for rotary in fields.items_of("no_rope_layers", int)]
    if kind in NO_ROPE_IN_FULL and 0 < model.windows < model.layers:
        without = [letter == "F" for letter in model.letters]
    if len(without) != model.layers or not any(without):
        return []
    return [f"--no-rope-freq {shlex.quote(str([int(x) for x in without]).replace(' ', ''))}"]


def _act(fields: Fields) -> str:
    return next((fields.text(key) for key in ACTIVATIONS if key in fields), "silu")


def _activation(fields: Fields, model: Model) -> tuple[str, list[str]]:
    """Return the flags for the activation of the MLP.

    Args:
        fields: Fields of the config.json.
        model: Shape of the model.

    Returns:
        The flags of a gated MLP; and a list with a description of the activation if no flag sets
        it, otherwise an empty list.
    """
    act = _act(fields)
    if not model.gated:
        return "--swiglu", [] if act.startswith(("gelu", "relu2")) else [f"activation {act!r}"]
    if "swiglu_limit" in fields:
        limit = fields.number("swiglu_limit")
        if model.hybrid is not None:  # clamped SwiGLU; --quick-geglu is GPT-OSS's activation
            return "--swiglu", [f"the limit {limit:g} of the activation"]
        return (
            f"--quick-geglu --glu-linear-offset 1.0 --activation-func-clamp-value {limit:.1f}",
            [],
        )
    if act in ("silu", "swish", "swiglu"):
        return "--swiglu", []
    return "--swiglu", [f"an MLP gated by {act}; --swiglu sets an MLP of the same size"]


def _lacking(model: Model, fields: Fields, kind: str, structure: Structure) -> Iterator[str]:
    if structure.out_bias and not structure.mlp_bias:
        yield "a bias of only the output projection of attention"
    if structure.mlp_bias and not structure.qkv_bias:
        yield "biases of the MLP without biases of attention"
    if structure.head_norms == "all":
        yield "norms of queries and keys over all heads"
    if structure.layer_norm and not structure.norm_bias:
        yield "LayerNorm without a bias"
    if fields.get("linear_allow_neg_eigval"):
        yield "negative eigenvalues of the gated delta net"
    if structure.after:
        yield "norms after attention and MLP but not before them"
    elif structure.norms > 2:
        yield "additional norms after attention and MLP"
    elif structure.norms < 2 or any(
        fields.get(key) is True for key in ("parallel_attn", "use_parallel_residual")
    ):
        yield "attention and MLP in parallel in a layer"
    if kind.startswith("gemma"):
        yield "scaled embeddings"
    factors = [key for key in FACTORS if fields.get(key) not in (None, 1, 1.0, 0, 0.0)]
    if factors:
        yield f"the factors {', '.join(factors)}"
    if (scale := fields.get("query_pre_attn_scalar")) and scale != model.head_dim:
        yield f"query_pre_attn_scalar {scale} with heads of width {model.head_dim}"
    narrow, wide = fields.get("num_key_value_heads"), fields.get("swa_num_key_value_heads")
    if kind == "mimo_v2_flash" or (wide is not None and wide != narrow):
        yield (
            f"{model.kv_heads} key/value heads in layers with a window and fewer in other layers; "
            f"the forecast assumes {model.kv_heads} in all layers"
        )
    if structure.sinks and kind == "mimo_v2_flash":
        yield "sinks in only the layers with a window"
    if model.hybrid is not None:
        yield "hyper-connections"
    if "hash_moe" in fields.items_of("mlp_layer_types", str):
        yield "routing by hashes in the first layers"
    if kind == "kimi_linear":
        yield "latent attention without rotary positions"
    if fields.get("dual_chunk_attention_config"):
        yield "dual chunk attention, which changes positions only in inference"
    if kind.startswith("minimax") and model.mixers:
        yield "scaled residuals"
    if structure.expert_bias and _score_function(fields, kind) == "softmax":
        yield "a bias per expert with softmax scores"
    if kind.startswith("llama4"):
        yield "expert inputs that the router scales"


# --- norms and positions ---------------------------------------------------------------------

# Constants of Megatron-LM for Llama 3's rope scaling, and for YaRN in latent attention.
LENGTH = "original_max_position_embeddings"
LLAMA3 = {LENGTH: 8192.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {LENGTH: 4096.0, "beta_fast": 32.0, "beta_slow": 1.0}
BASES, SHARES = ("rope_theta", "rotary_emb_base"), ("partial_rotary_factor", "rotary_pct")
EPSILONS = "rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps"


def _numerics(fields: Fields, head_dim: int) -> tuple[str, list[str]]:
    """Return flags for the epsilon of norms and for rotary positions.

    Returns:
        The flags, and descriptions of properties that no flag sets.
    """
    flags = [f"--norm-epsilon {fields.number(key):g}" for key in EPSILONS if key in fields][:1]
    rope = fields.object_of("rope_parameters")
    hybrid = set(rope) == {"main", "compress"}  # DeepSeek-V4
    if hybrid:  # "compress" is csa_compress_rotary_base
        rope = rope.object_of("main")
    rope = rope if len(rope) else fields.object_of("rope_scaling")
    kinds = [value for value in rope.values() if isinstance(value, dict)]
    bases = set(fields.get("layer_rope_theta", ()))
    several = any(value != kinds[0] for value in kinds[1:]) or len(bases) > 1
    if several or "rope_local_base_freq" in fields:
        return " ".join(flags), ["different rotary positions in some layers"]
    if kinds:
        rope = Fields(kinds[0], rope.name)
    lacking = []
    rotary_base, share = (
        next((of.number(key) for of in (fields, rope) for key in keys if key in of), None)
        for keys in (BASES, SHARES)
    )
    if rotary_base is not None and rotary_base == int(rotary_base):
        flags.append(f"--rotary-base {int(rotary_base)}")
    elif rotary_base is not None:
        lacking.append(f"a rotary base of {rotary_base}, which is not an integer")
    if "rotary_dim" in fields and share is None:
        share = fields.size("rotary_dim") / head_dim
    if share is not None and share != 1 and not hybrid:  # hybrid: qk_pos_emb_head_dim
        flags.append(f"--rotary-percent {share:g}")
    kind = rope.text("rope_type") or rope.text("type") or "default"
    if kind != "default":
        scaled = _scaled(kind, rope, bool(fields.size("kv_lora_rank")))
        flags += [scaled] if scaled else []
        lacking += [] if scaled else [f"the rope scaling of {fields.name} ({kind})"]
    return " ".join(flags), lacking


def _scaled(kind: str, rope: Fields, latent: bool) -> str:
    """Return Megatron-LM's flags for a rope scaling; "" if Megatron-LM does not support it."""
    factor = rope.number("factor") if "factor" in rope else 0.0
    if kind == "linear" and not latent and 0 < factor == int(factor):
        return f"--rotary-seq-len-interpolation-factor {int(factor)}"
    fixed = {"llama3": LLAMA3, "yarn": YARN}.get(kind, {})
    constants = {key: rope.number(key) if key in rope else value for key, value in fixed.items()}
    if not factor or LENGTH not in rope or "attention_factor" in rope:
        return ""
    if kind == "llama3" and not latent and constants == fixed:
        return f"--use-rope-scaling --rope-scaling-factor {factor:g}"
    if kind != "yarn" or (latent and constants != fixed):
        return ""
    flags = f"--rotary-scaling-factor {factor:g}"
    for key, flag in (("mscale", "--mscale"), ("mscale_all_dim", "--mscale-all-dim")):
        flags += f" {flag} {rope.number(key):g}" if key in rope else ""
    if latent:
        return f"--rope-type yarn {flags}"
    length, fast, slow = constants.values()
    negation = "" if rope.flag("truncate", True) else "no-"
    return (
        f"--position-embedding-type yarn {flags} --yarn-original-max-position-embeddings "
        f"{length:.0f} --yarn-beta-fast {fast:g} --yarn-beta-slow {slow:g} "
        f"--{negation}yarn-correction-range-round-to-int"
    )
