# SPDX-License-Identifier: Apache-2.0
"""What a token sees in each attention layer of a model: sliding windows, and which layers have one.

Megatron says it by `window_size` (left, right) and `window_attn_skip_freq`. Providers of
Megatron-Bridge for Gemma 3 and MiMo-V2-Flash say it in their own words: `window_size` is how many
tokens are seen, the own one included, and another setting names the layers. Their core attentions
turn that into Megatron's words for a single layer (`attention.derived`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

from ..layout.balanced import CAUSAL, Window

# Setting -> whether layer `number` has the window.
_OWN_WORDS: dict[str, Callable[[Any, int], bool]] = {
    "interleaved_attn_pattern": lambda pattern, number: number % sum(pattern) != 0,
    # Of further heads the pattern has fewer layers than the model.
    "hybrid_attention_pattern": lambda pattern, number: list(pattern[number - 1 : number]) == [1],
}


def in_own_words(config: Any) -> str | None:
    """The setting that names the layers with a window, where a provider has one of its own; None
    where Megatron's words count."""
    if not isinstance(getattr(config, "window_size", None), int):
        return None
    return next((name for name in _OWN_WORDS if _is_known(name, getattr(config, name, None))), None)


def _is_known(name: str, pattern: Any) -> bool:
    """Whether a pattern is of the kind whose meaning was read: layers without a window come one at
    a time, or each layer has a number."""
    whole = isinstance(pattern, (tuple, list)) and all(isinstance(each, int) for each in pattern)
    if not whole or not pattern:
        return False
    return name != "interleaved_attn_pattern" or (len(pattern) == 2 and pattern[1] == 1)


def layer_window(config: Any, layer_number: int) -> Window | None:
    """(left, right) of a layer with a sliding window, None for no limit; None without a window.

    A query at p sees the keys from p - left to p + right; `layer_number` counts from 1.
    """
    size, own = getattr(config, "window_size", None), in_own_words(config)
    if own is not None:
        has = _OWN_WORDS[own](getattr(config, own), layer_number)
        return (size - 1, 0) if has else None  # pyright: ignore[reportOptionalOperand]
    if not size:
        return None
    # Late: configurations are checked where there may be no Megatron-Core.
    from megatron.core.transformer.utils import is_layer_window_attention

    skip: Any = getattr(config, "window_attn_skip_freq", None)
    if not is_layer_window_attention(size, skip, layer_number):
        return None
    left, right = (None if limit == -1 else limit for limit in size)
    return left, right


def causal_window(config: Any, layer_number: int) -> Window:
    """What a token sees in a layer that counts as causal."""
    left, _ = layer_window(config, layer_number) or CAUSAL
    return left, 0


def layer_windows(config: Any) -> tuple[Window, ...]:
    """What a token sees in the kinds of layers of a model, in the smallest whole numbers of each.

    One windowed layer in three is ((None, 0), (None, 0), (left, 0)).
    """
    layers = range(1, getattr(config, "num_layers", 1) + 1)
    count = Counter(causal_window(config, layer) for layer in layers)
    common = math.gcd(*count.values())
    return tuple(window for window, n in count.items() for _ in range(n // common))
