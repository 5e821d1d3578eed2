# SPDX-License-Identifier: Apache-2.0
"""Problems of algorithms per layer (`--burst-per-layer`), of lists that say which layers have a
window or linear attention, and of Megatron's own list of exchanges per layer, which BurstAttention
replaces.

Every part of the flag must name a layer that has attention, where the settings tell: a part that
names none is a mistake, such as a kind of layers that the model lacks.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from ...config import OFF, BurstConfig
from ...schedule.per_layer import FULL, WINDOW, LayerChoice, layer_choices, numbers_layers
from ..windows import in_own_words, layer_window
from .problem import Problem, Rule, broken
from .splitting import DELTA_NETS, PATTERNS, SOFTMAX, kimi_layers, needs_ranks, splits

FLAG = "--burst-per-layer"
# A frequency, or a list with an entry for each layer, and the setting without which it is not read.
_FREQUENCIES = {
    "window_attn_skip_freq": "window_size",
    "linear_attention_freq": "experimental_attention_variant",
}


_RULES = (
    Rule(lambda c, b: b.algorithm == "ulysses",
         "{flag}: with --context-parallel-algo ulysses all ranks share heads, and there is no ring "
         "whose algorithm could be chosen", add=("--context-parallel-algo burst",)),
    Rule(lambda c, b: b.algorithm != "ulysses" and b.ulysses_size == c.context_parallel_size,
         "{flag}: all ranks share heads by --burst-ulysses-size, and there is no ring whose "
         "algorithm could be chosen", remove=("--burst-ulysses-size",)),
    Rule(lambda c, b: c.mtp_num_layers and numbers_layers(b.per_layer or ""),
         "{flag} with --mtp-num-layers, whose layers count from 1 again: name kinds of layers, "
         f"{WINDOW} and {FULL}"),
)  # fmt: skip


def per_layer_problems(config: Any, burst: BurstConfig) -> Iterator[Problem]:
    """Unless every layer that `--burst-per-layer` names can have its algorithm.

    config: a `TransformerConfig`, or parsed arguments under the same names.
    """
    if burst.per_layer is None:
        return
    flag = f"{FLAG} {burst.per_layer}"
    if burst.algorithm == OFF or not splits(config):
        yield needs_ranks(flag, config, burst, (FLAG,))
        return
    yield from broken(_RULES, config, burst, flag)
    parts = layer_choices(burst.per_layer).parts
    known = _attention_layers(config)
    if known is None:
        return
    count, layers = known
    for part in parts:
        if part.kind is None and part.last > count:
            yield Problem(f"{flag}: {part.text}, and the model has {count} layers")
        elif not any(_is_of(part, number, config) for number in layers):
            yield Problem(f"{flag}: {part.text} is of no layer with attention: leave it out")


def _is_of(part: LayerChoice, number: int, config: Any) -> bool:
    if part.kind is None:
        return part.first <= number <= part.last
    return part.kind == (FULL if layer_window(config, number) is None else WINDOW)


def _attention_layers(config: Any) -> tuple[int, list[int]] | None:
    """How many layers a model has, further heads aside, and which of them have attention; None
    where the settings do not tell."""
    size = getattr(config, "window_size", None)
    odd = size is not None and (isinstance(size, int) or len(size) != 2)
    odd = odd and in_own_words(config) is None
    if odd or any(frequency_problems(config)):
        return None  # a problem of its own
    if size and find_spec("megatron") is None:
        return None  # which layers have the window, Megatron says
    symbols, count = _pattern(config), _count(config)
    if symbols:
        return count, [i for i, symbol in enumerate(symbols, 1) if symbol in SOFTMAX]
    if not count:
        return None
    layers = range(1, count + 1)
    if getattr(config, "experimental_attention_variant", None) in DELTA_NETS:
        often = getattr(config, "linear_attention_freq", None)
        if isinstance(often, int):
            return count, [number for number in layers if number % often == 0]
        if often:
            return count, [number for number in layers if not often[number - 1]]
    kimi = kimi_layers(config)
    return count, [number for number in layers if number not in kimi]


def _pattern(config: Any) -> str:
    """The symbols of a hybrid model's layers, further heads aside; "" of other models."""
    pattern = next(filter(None, (getattr(config, name, None) for name in PATTERNS)), "")
    return pattern.split("/")[0].replace("|", "")


def _count(config: Any) -> int:
    """How many layers a model has, further heads aside; 0 where the settings do not tell."""
    return len(_pattern(config)) or getattr(config, "num_layers", None) or 0


def frequency_problems(config: Any) -> Iterator[Problem]:
    """Unless lists that say of every layer whether it has a window have an entry for each."""
    count = _count(config)
    for name, needs in _FREQUENCIES.items():
        marks: Any = getattr(config, name, None)
        if getattr(config, needs, None) and isinstance(marks, list) and len(marks) < count:
            flag = f"--{name.replace('_', '-')}"
            yield Problem(
                f"{flag} {marks} is of {len(marks)} layers, and the model has {count}: give an "
                "entry for each, or a number"
            )


def exchange_problems(config: Any) -> Iterator[Problem]:
    """Unless `cp_comm_type` is one exchange: that which nobody asked for is not read, but a choice
    for each layer must not be dropped silently."""
    kinds: Any = getattr(config, "cp_comm_type", None)
    if mixed(kinds):
        yield Problem(
            f"--cp-comm-type {' '.join(map(str, kinds))} chooses an exchange of Megatron's own "
            f"attention for each layer, and BurstAttention replaces them all: {FLAG} chooses an "
            "algorithm of BurstAttention for each layer",
            remove=("--cp-comm-type",),
        )


def mixed(kinds: Any) -> bool:
    """Are these exchanges a list of several kinds?"""
    return isinstance(kinds, (list, tuple)) and len(set(kinds)) > 1
