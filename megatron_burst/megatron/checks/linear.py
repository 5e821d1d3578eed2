"""Problems of layers that carry a state along the sequence: gated delta nets and Mamba mixers.

Decides which models have such layers, and which settings let them run over context-parallel ranks:
by passing states (``--burst-linear``), or by Megatron's own all-to-all of heads ("megatron"), which
knows only zigzag and needs heads for every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_burst.config import BurstConfig
from megatron_burst.megatron.checks.cuda_graphs import captured, graphs_asked
from megatron_burst.megatron.checks.hybrid import asked as changing
from megatron_burst.megatron.checks.problem import Problem
from megatron_burst.megatron.patching.compatibility import core_version

OLDEST = (0, 19)  # of Megatron-Core, with states passed from rank to rank
DELTA_NETS = ("gated_delta_net", "gdn")  # one layer, under its name until 0.19 and since
FLAG = "--burst-linear"
LAYOUTS = ("zigzag", "contiguous", "balanced")  # a row's predecessor is mostly on its rank
# Symbols of a pattern that stand for no such layer: attention, MLP, experts, bounds.
_OTHERS = frozenset("*+D-E|/")
PATTERNS = ("hybrid_layer_pattern", "hybrid_override_pattern")  # the second until 0.17
_NOT_PASSED = ("gdn2",)  # further variants of the delta net
_HEADS = ("linear_num_key_heads", "linear_num_value_heads")


def linear_layers(config: Any) -> str | None:
    """What of the settings asks for such layers; None if the model has none.

    A ``TransformerConfig`` only knows that a model is hybrid, which then counts as one.
    """
    for name in PATTERNS:
        pattern = getattr(config, name, None)
        if pattern:
            flag = f"--{name.replace('_', '-')} {pattern}"
            return flag if set(pattern) - _OTHERS else None
    if getattr(config, "is_hybrid_model", False):
        return "a hybrid model"
    variant = getattr(config, "experimental_attention_variant", None)
    known = (*DELTA_NETS, *_NOT_PASSED)
    return f"--experimental-attention-variant {variant}" if variant in known else None


def linear_problems(config: Any, burst: BurstConfig) -> Iterator[Problem]:
    """Unless these layers can run as ``burst``, an algorithm of ours, asks for.

    config: a ``TransformerConfig`` split over ranks, or any object with attributes of the same
    names.
    """
    asked = linear_layers(config)
    if asked is None or changing(config):  # `hybrid_problems` names what changes groups
        return
    if burst.linear == "megatron":
        yield from _heads_problems(config, burst, asked)
        return
    if core_version() < OLDEST:
        found, oldest = (".".join(map(str, one)) for one in (core_version(), OLDEST))
        yield Problem(
            f"{asked} at --context-parallel-size {config.context_parallel_size}: passing the state "
            f"of these layers from rank to rank needs Megatron-Core {oldest} or newer, and this is "
            f"{found}, whose own all-to-all of heads can run instead",
            add=(f"{FLAG} megatron",),
        )
        return
    variant = getattr(config, "experimental_attention_variant", None)
    if variant in _NOT_PASSED:  # also of a hybrid model
        yield Problem(
            f"--experimental-attention-variant {variant}: its state is not passed from rank to "
            f"rank, only that of {DELTA_NETS[-1]} is",
            add=(f"{FLAG} megatron",),
        )
    if burst.layout not in (*LAYOUTS, "auto"):
        yield Problem(
            f"{asked} with --burst-layout {burst.layout}: every row's predecessor is on another "
            "rank, and a state would travel between any two rows",
            add=("--burst-layout zigzag",),
        )
    flag, impl = graphs_asked(config)
    if impl != "none" and "mamba" in captured(config):
        yield Problem(
            f"{flag} captures Mamba layers, whose state passes from rank to rank outside of graphs",
            add=(f"{FLAG} megatron",),
        )
    tensor = getattr(config, "tensor_model_parallel_size", 1)
    yield from _indivisible(config, tensor, f"--tensor-model-parallel-size {tensor}")


def _heads_problems(config: Any, burst: BurstConfig, asked: str) -> Iterator[Problem]:
    """Unless Megatron's own all-to-all of heads can run."""
    if burst.layout not in ("zigzag", "auto"):
        yield Problem(
            f"{FLAG} megatron with --burst-layout {burst.layout}: Megatron's own all-to-all of "
            f"heads takes the tokens for zigzag ones; {FLAG} auto takes contiguous ones too",
            add=("--burst-layout zigzag",),
        )
    tensor, ranks = config.tensor_model_parallel_size, config.context_parallel_size
    sizes = f"--tensor-model-parallel-size {tensor} x --context-parallel-size {ranks}"
    more = () if core_version() < OLDEST else (f"{FLAG} auto",)
    yield from _indivisible(config, tensor * ranks, f"{sizes}, with {FLAG} megatron", more)


def _indivisible(
    config: Any, ranks: int, sizes: str, add: tuple[str, ...] = ()
) -> Iterator[Problem]:
    """Unless the heads of gated delta nets divide by so many ranks."""
    if getattr(config, "experimental_attention_variant", None) not in DELTA_NETS:
        return
    for name in _HEADS:
        heads = getattr(config, name, None)
        if heads and heads % ranks:
            flag = f"--{name.replace('_', '-')}"
            yield Problem(f"{flag} {heads} is not divisible by {sizes}", add=add)
