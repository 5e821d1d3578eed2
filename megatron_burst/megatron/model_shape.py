# SPDX-License-Identifier: Apache-2.0
"""Layers of a model: the kind of attention and the sliding window of each layer.

`ModelShape.of` reads a `TransformerConfig`, a provider of Megatron-Bridge, or parsed arguments with
the same names. A configuration specifies its layers in one of these ways:

- A pattern of a hybrid model (`hybrid_layer_pattern`), with one symbol per layer. A
`TransformerConfig` states only that a model is hybrid.
- An attention variant (`experimental_attention_variant`) and a frequency or list of its layers.
- The numbers of Kimi K3's layers with Kimi delta attention (`kimi_kda_layers`).
- A window: Megatron has `window_size` (left, right) and `window_attn_skip_freq`. Providers of
Megatron-Bridge for Gemma 3 and MiMo-V2-Flash have other settings: `window_size` is the number of
tokens that a token sees, itself included, and another setting names the layers. The core attentions
of these models convert the settings for each layer (`attention.derived`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from ..layout.balanced import CAUSAL, Window

Attention = Literal["softmax", "sparse", "delta_net", "mamba", "kda", "none"]

# The first two name one variant, before and after 0.19; "gdn2" has a gate per channel.
DELTA_NETS = ("gated_delta_net", "gdn", "gdn2")
DSA = "dsa"  # the variant with attention over selected keys
KIMI = "Kimi K3"  # a model of Megatron-Bridge; some of its layers are KDA
PATTERNS = ("hybrid_layer_pattern", "hybrid_override_pattern")  # the second until 0.17
# Symbols of a pattern: attention, latent attention, DSA, gated delta net, Mamba mixer, MLP,
# experts.
_SYMBOLS: dict[str, Attention] = {
    "*": "softmax", "+": "softmax", "D": "sparse", "G": "delta_net", "M": "mamba",
    "-": "none", "E": "none",
}  # fmt: skip
_BOUNDS = "|/"  # between pipeline stages; before the layers of an MTP head

# Setting of a provider -> function that returns whether layer `number` has the window.
_PROVIDER_WINDOWS: dict[str, Callable[[Any, int], bool]] = {
    "interleaved_attn_pattern": lambda pattern, number: number % sum(pattern) != 0,
    # The pattern has no entries for layers of MTP heads, which have no window.
    "hybrid_attention_pattern": lambda pattern, number: list(pattern[number - 1 : number]) == [1],
}


@dataclass(frozen=True)
class ModelShape:
    """The kind of attention of each layer, and the settings that select special layers.

    Attributes:
        attention: The kind of each layer, with the layers of MTP heads if a pattern contains them.
            None if the configuration of a hybrid model does not contain its pattern.
        linear_setting: The setting that selects layers of linear attention or Mamba mixers, for
            messages; None if the model has no such layers. A hybrid model without a pattern, or
            with an unknown symbol, counts as a model with such layers.
        sparse_setting: The setting that selects sparse attention (DSA); None if the model has none.
    """

    attention: tuple[Attention, ...] | None
    linear_setting: str | None
    sparse_setting: str | None

    @classmethod
    def of(cls, config: Any) -> ModelShape:
        """Return the layers of a model, read from its configuration.

        Args:
            config: a `TransformerConfig`, a provider of Megatron-Bridge, or parsed arguments.
        """
        name, pattern = _pattern(config)
        variant = getattr(config, "experimental_attention_variant", None)
        setting = f"--experimental-attention-variant {variant}"
        sparse = setting if variant == DSA else None
        if pattern:
            return _of_pattern(f"--{name.replace('_', '-')} {pattern}", pattern, sparse)
        if getattr(config, "is_hybrid_model", False):
            return cls(None, "a hybrid model", sparse)
        if kda := tuple(getattr(config, "kimi_kda_layers", None) or ()):
            linear, linear_setting = dict.fromkeys(kda, "kda"), KIMI
        elif variant in DELTA_NETS:
            numbers = _delta_net_layers(config)
            linear, linear_setting = dict.fromkeys(numbers, "delta_net"), setting
        else:
            linear, linear_setting = {}, None
        default_kind = "softmax" if sparse is None else "sparse"
        layers: Any = (
            linear.get(number, default_kind) for number in range(1, _num_layers(config) + 1)
        )
        return cls(tuple(layers), linear_setting, sparse)

    def count(self, *kinds: Attention) -> int:
        """Return the number of layers of the given kinds; 0 if the layers are unknown."""
        return sum(kind in kinds for kind in self.attention or ())


def _pattern(config: Any) -> tuple[str, str]:
    """Return (name of the setting, pattern) of a hybrid model; ("", "") for other models."""
    patterns = ((name, getattr(config, name, None)) for name in PATTERNS)
    return next(((name, pattern) for name, pattern in patterns if pattern), ("", ""))


def _of_pattern(setting: str, pattern: str, sparse: str | None) -> ModelShape:
    symbols = [symbol for symbol in pattern if symbol not in _BOUNDS]
    linear = any(_SYMBOLS.get(symbol) in ("delta_net", "mamba", None) for symbol in symbols)
    return ModelShape(
        tuple(_SYMBOLS.get(symbol, "none") for symbol in symbols),
        setting if linear else None,
        setting if sparse is None and "D" in symbols else sparse,
    )


def _num_layers(config: Any) -> int:
    return getattr(config, "num_layers", None) or 0


def _delta_net_layers(config: Any) -> Iterator[int]:
    """Yield the numbers (from 1) of a GPT's layers of linear attention.

    An integer frequency n excludes every n-th layer; a list has one flag per layer.
    """
    frequency = getattr(config, "linear_attention_freq", None)
    for number in range(1, _num_layers(config) + 1):
        if isinstance(frequency, int):
            linear = number % frequency != 0
        else:
            linear = any(frequency[number - 1 : number]) if frequency else False
        if linear:
            yield number


def layers_without_further_heads(config: Any) -> int:
    """Return the number of layers of a model without the layers of MTP heads; 0 if unknown."""
    _, pattern = _pattern(config)
    return len(pattern.split("/")[0].replace("|", "")) or _num_layers(config)


# --- sliding windows ---------------------------------------------------------------------------


def provider_window(config: Any) -> str | None:
    """Return a provider's own setting that names the layers with a window.

    Returns:
        The name of the setting; None if Megatron's settings apply.
    """
    if not isinstance(getattr(config, "window_size", None), int):
        return None
    return next(
        (name for name in _PROVIDER_WINDOWS if _is_known(name, getattr(config, name, None))), None
    )


def _is_known(name: str, pattern: Any) -> bool:
    """Return whether a provider's pattern has a supported form.

    `interleaved_attn_pattern` must be (n, 1): n layers with a window, then one without. Any other
    pattern must have one integer per layer.
    """
    if not pattern or not isinstance(pattern, (tuple, list)):
        return False
    if not all(isinstance(entry, int) for entry in pattern):
        return False
    return name != "interleaved_attn_pattern" or (len(pattern) == 2 and pattern[1] == 1)


def layer_window(config: Any, number: int) -> Window | None:
    """Return the sliding window of a layer.

    A query at p sees the keys from p - left to p + right.

    Args:
        config: same as in `ModelShape.of`.
        number: layer number, from 1.

    Returns:
        (left, right) in tokens, or None if the layer has no window. A side without a limit is None.
    """
    size, setting = getattr(config, "window_size", None), provider_window(config)
    if setting is not None:
        has = _PROVIDER_WINDOWS[setting](getattr(config, setting), number)
        return (size - 1, 0) if has else None  # pyright: ignore[reportOptionalOperand]
    if not size:
        return None
    # Imported here: tools check configurations without Megatron-Core.
    from megatron.core.transformer.utils import is_layer_window_attention

    skip: Any = getattr(config, "window_attn_skip_freq", None)
    if not is_layer_window_attention(size, skip, number):
        return None
    left, right = (None if limit == -1 else limit for limit in size)
    return left, right


def causal_window(config: Any, number: int) -> Window:
    """Return the window (left, 0) of a layer, as if its attention were causal."""
    left, _ = layer_window(config, number) or CAUSAL
    return left, 0


def layer_windows(config: Any) -> tuple[Window, ...]:
    """Return the windows of all layers, reduced to the shortest tuple with their proportions.

    For example, if one layer in three has a window: ((None, 0), (None, 0), (left, 0)).
    """
    layers = range(1, getattr(config, "num_layers", 1) + 1)
    count = Counter(causal_window(config, layer) for layer in layers)
    common = math.gcd(*count.values())
    return tuple(window for window, n in count.items() for _ in range(n // common))
