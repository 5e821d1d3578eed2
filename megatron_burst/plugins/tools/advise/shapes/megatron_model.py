# SPDX-License-Identifier: Apache-2.0
"""Shape of a model from Megatron's arguments or from a TransformerConfig.

Arguments and TransformerConfig use the same names (`num_layers`, `window_size`, `kv_lora_rank`,
...). The caller passes a function that returns a value by name, or None if there is no value.
`megatron.model_shape` determines the kinds of layers.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any

from .layer_kinds import (
    CSA_RATIO,
    DELTA_NET,
    Hybrid,
    Indexer,
    Latent,
    Mixer,
    gated_delta_net,
    mamba2,
)
from .model import Model

DSA = 64, 128, 2048  # DeepSeek-V3.2: index heads, their width, selected keys
V4_INDEX = 64, 128, 512  # the same sizes of DeepSeek-V4-Flash
Get = Callable[[str], Any]
NEEDED = ("num_layers", "hidden_size", "num_attention_heads")
# Supported symbols of a hybrid pattern: M is Mamba-2, G a gated delta net, + latent attention, E an
# MLP with experts.
SYMBOLS = "MG*+-E"
# Kind of layer in `ModelShape` -> letter of `layer_kinds.KINDS`. Layers in ONE_HALF have attention
# or an MLP, layers in BOTH_HALVES have both.
ONE_HALF = {"softmax": "*", "delta_net": "M", "mamba": "M", "none": "-"}
BOTH_HALVES = {"softmax": "F", "sparse": "F", "delta_net": "L"}


class _Values:
    """Object whose attribute `x` is `get("x")`, for `ModelShape.of`, which reads attributes."""

    def __init__(self, get: Get) -> None:
        self._get = get

    def __getattr__(self, name: str) -> Any:
        return self._get(name)


def model_from(
    get: Get, name: str, *, gated: bool, tied: bool, flag: Callable[[str], str]
) -> Model:
    """Return the model that Megatron's arguments describe.

    Args:
        get: Function that returns the value of an argument by name, or None.
        name: Name of the model, for output.
        gated: Whether the MLP is gated (three matrices).
        tied: Whether embedding and LM head share weights.
        flag: Function that returns the user's notation of an argument's name, for messages.

    Raises:
        ValueError: A value is missing or not supported.
    """
    for field in NEEDED:
        if get(field) is None and not (field == "num_layers" and _hybrid(get)):
            raise ValueError(f"{name}: {flag(field)} is missing; add it")
    layers, hidden, heads = (get(field) for field in NEEDED)
    layers = layers or len(_hybrid(get))
    # Imported late, because it imports torch, which takes seconds.
    from .....megatron.model_shape import ModelShape

    kinds = (ModelShape.of(_Values(get)).attention or ())[:layers]  # without multi-token prediction
    pattern, window = _pattern(get, kinds, layers, name, flag)
    also = ("multi-token prediction",) if get("mtp_num_layers") else ()
    fields: dict[str, Any] = {
        "name": name,
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": get("num_query_groups") or heads,
        "vocabulary": get("vocab_size") or 128 * 1024,
        "head_dim": get("kv_channels") or hidden // heads,
        "gated": gated,
        "tied": tied,
        "output_gate": bool(get("attention_output_gate")),
        "sinks": get("softmax_type") == "learnable",
        "pattern": pattern,
        "window": window,
        "mixer": _mixer(get, kinds),
        "also": also,
    }
    latent = _latent(get, heads)
    if get("csa_compress_ratios"):
        latent = _hybrid_attention(get, layers, name, flag)
        pattern = latent["pattern"]
    return Model(**(fields | latent | _mlp(get, pattern or "F" * layers, gated)))


def _hybrid_attention(
    get: Get, layers: int, name: str, flag: Callable[[str], str]
) -> dict[str, Any]:
    """Return the fields of `Model` that describe DeepSeek-V4's hybrid attention."""
    ratios = get("csa_compress_ratios")
    ratios = ast.literal_eval(ratios) if isinstance(ratios, str) else ratios
    ratios = list(ratios)[:layers]
    heavy = sorted({*ratios} - {0, CSA_RATIO})
    if len(ratios) < layers or len(heavy) > 1:
        raise ValueError(
            f"{name}: {flag('csa_compress_ratios')} must be a list with 0, {CSA_RATIO} or one "
            f"other number for each of the {layers} layers, got {ratios!r:.100}"
        )
    sizes = (get(f"dsa_indexer_{key}") for key in ("n_heads", "head_dim", "topk"))
    index = Indexer(*(size or usual for size, usual in zip(sizes, V4_INDEX, strict=True)))
    stated = {
        "window": get("csa_window_size"), "ratio": heavy[0] if heavy else None,
        "q_rank": get("q_lora_rank"), "groups": get("o_groups"), "out_rank": get("o_lora_rank"),
    }  # fmt: skip
    stated = {name: value for name, value in stated.items() if value}
    width = get("v_head_dim") or 512
    return {
        "kv_heads": 1, "head_dim": width, "value_dim": width, "sinks": False,
        "pattern": "".join({0: "V", CSA_RATIO: "S"}.get(ratio, "H") for ratio in ratios),
        "hybrid": Hybrid(None if get("csa_dense_mode") else index, **stated),
    }  # fmt: skip


def _latent(get: Get, heads: int) -> dict[str, Any]:
    if not get("multi_latent_attention") and "+" not in _hybrid(get):
        return {}
    rope, value = get("qk_pos_emb_head_dim") or 64, get("v_head_dim") or 128
    index = None
    if get("experimental_attention_variant") == "dsa":
        sizes = (get(f"dsa_indexer_{key}") for key in ("n_heads", "head_dim", "topk"))
        index = Indexer(*(size or usual for size, usual in zip(sizes, DSA, strict=True)))
    return {
        "indexer": index,
        "kv_heads": heads,
        "head_dim": (get("qk_head_dim") or 128) + rope,
        "value_dim": value,
        "latent": Latent(get("kv_lora_rank") or 512, rope, get("q_lora_rank") or 0),
    }


def _mlp(get: Get, pattern: str, gated: bool) -> dict[str, Any]:
    """Return the fields of `Model` that describe MLPs and experts.

    Megatron's default width of an MLP is 4 x hidden. With a gate it is 8/3 x hidden, rounded down
    to a multiple of 64.
    """
    hidden, experts = get("hidden_size"), get("num_moe_experts") or get("num_experts") or 0
    ffn = get("ffn_hidden_size") or (int(4 * hidden * 2 / 3) // 64 * 64 if gated else 4 * hidden)
    if not experts:
        return {"ffn": ffn}
    with_mlp = sum(letter in "FWLVSH-" for letter in pattern)
    frequency = get("moe_layer_freq") or 1
    hybrid = _hybrid(get)
    sparse = hybrid.count("E") if hybrid else sum(_layers(frequency, with_mlp, every_is=True))
    return {
        "ffn": get("moe_ffn_hidden_size") or ffn,
        "experts": experts,
        "top_k": get("moe_router_topk") or 2,
        "shared": get("moe_shared_expert_intermediate_size") or 0,
        "moe_layers": sparse,
        "dense_ffn": ffn,
    }


def _pattern(
    get: Get, kinds: Sequence[str], layers: int, name: str, flag: Callable[[str], str]
) -> tuple[str, int]:
    """Return `Model.pattern` and `Model.window`.

    The pattern is "" if all layers have full attention and an MLP.
    """
    hybrid = _hybrid(get)
    if set(hybrid) - set(SYMBOLS) or (hybrid and len(hybrid) != layers):
        raise ValueError(
            f"{name}: {flag('hybrid_override_pattern')} {hybrid!r} must have one of "
            f"{', '.join(SYMBOLS)} for each of the {layers} layers"
        )
    if {"mamba", "delta_net"} <= set(kinds):
        raise ValueError(
            f"{name}: {flag('hybrid_layer_pattern')} {hybrid!r} has layers M and G, but "
            "advise supports only one of the two in a model; use a pattern with M or with G"
        )
    if hybrid:
        return "".join(ONE_HALF[kind] for kind in kinds), 0
    if unknown := set(kinds) - set(BOTH_HALVES):
        raise ValueError(
            f"{name}: layers of {unknown.pop()} are not supported; pass the name of a known model "
            "as --model"
        )
    if get("linear_attention_freq"):
        _layers(get("linear_attention_freq"), layers, every_is=False)  # checks its length
    if "delta_net" in kinds:
        return "".join(BOTH_HALVES[kind] for kind in kinds), 0
    window = get("window_size")
    if not window:
        return "", 0
    window = ast.literal_eval(window) if isinstance(window, str) else window
    if isinstance(window, int):
        raise ValueError(
            f"{name}: {flag('window_size')} must be two numbers, the tokens before and after the "
            f"query, got {window}. Use for example [1023, 0], and also set window_attn_skip_freq, "
            "or pass the name of a known model as --model"
        )
    left = window[0]
    skip = get("window_attn_skip_freq")
    windows = _layers(skip, layers, every_is=False) if skip else [True] * layers
    return ("", 0) if left < 0 else ("".join("FW"[w] for w in windows), left + 1)


def _hybrid(get: Get) -> str:
    """Return the layer pattern of a HybridModel, one letter per layer; "" for other models.

    Symbols for pipeline stages and multi-token prediction are removed.
    """
    text = get("hybrid_override_pattern") or get("hybrid_layer_pattern") or ""
    return text.split("/")[0].replace("|", "")


def _layers(frequency: Any, layers: int, *, every_is: bool) -> list[bool]:
    """Expand a Megatron layer frequency (integer or list) to one bool per layer.

    An integer N sets one of N layers to `every_is`, and the other layers to its negation.
    """
    if isinstance(frequency, int):
        # Of N layers, the first has experts, and the last has full attention.
        at = 0 if every_is else frequency - 1
        return [(layer % frequency == at) is every_is for layer in range(layers)]
    if len(frequency) != layers:
        raise ValueError(
            f"a list of layers must have {layers} entries (one per layer), got {frequency}"
        )
    return [bool(value) for value in frequency]


def _mixer(get: Get, kinds: Sequence[str]) -> Mixer | None:
    """Return the mixer of a model (Mamba-2 or gated delta net); None if it has none.

    Arguments that are not set have Megatron's defaults.
    """
    if "delta_net" in kinds:
        return gated_delta_net(*(get(name) or size for name, size in DELTA_NET.items()))
    if "mamba" not in kinds:
        return None
    width = get("mamba_head_dim") or 64
    heads = get("mamba_num_heads") or 2 * get("hidden_size") // width
    return mamba2(heads, get("mamba_num_groups") or 8, get("mamba_state_dim") or 128, width, 4)
