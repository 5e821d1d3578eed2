# SPDX-License-Identifier: Apache-2.0
"""Layers of sparse attention (Megatron's DSA) among the settings, and what they exclude.

They are recognized here. The plugin `sparse` runs them. Where it does, Megatron's `cp_comm_type` is
not read, and need not be given. Where Megatron's own all-gather runs (`--burst-sparse megatron`),
it must be what Megatron asserts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ... import registry
from ...config import OFF, BurstConfig
from ..patching import log
from .problem import ConfigView, Problem, plugin_problems
from .splitting import DSA, PATTERNS, splits

FLAG = "--burst-sparse"
COEFFICIENT = "--dsa-indexer-loss-coeff"
_SYMBOL = "D"  # of such a layer in --hybrid-layer-pattern
_GATHER = "--cp-comm-type allgather"


def sparse_layers(config: Any) -> str | None:
    """What of the settings asks for such layers; None if the model has none."""
    if getattr(config, "experimental_attention_variant", None) == DSA:
        return f"--experimental-attention-variant {DSA}"
    for name in PATTERNS:
        pattern = getattr(config, name, None)
        if pattern and _SYMBOL in pattern:
            return f"--{name.replace('_', '-')} {pattern}"
    return None


def gathers(config: Any) -> bool:
    """Whether Megatron's exchange of keys and values is the only one that its own DSA takes."""
    kinds = getattr(config, "cp_comm_type", None)
    kinds = kinds if isinstance(kinds, (list, tuple)) else [kinds]
    return all(kind is not None and kind.replace("_", "").lower() == "allgather" for kind in kinds)


def sparse_problems(config: Any, burst: BurstConfig) -> Iterator[Problem]:
    """Unless sparse attention of a model that is split over ranks can run as `burst` asks for.

    config: a `TransformerConfig`, or any object with attributes of the same names.
    """
    what = sparse_layers(config)
    if what is None or not splits(config):
        return
    given: Any = ConfigView(config)
    if OFF in (burst.algorithm, burst.sparse):
        if burst.layout != "zigzag" and burst.algorithm != OFF:
            yield Problem(
                f"{what} with {FLAG} {OFF} and --burst-layout {burst.layout}: Megatron's "
                "all-gather takes the tokens for zigzag ones",
                add=("--burst-layout zigzag",),
            )
        overlaps, trains = given.overlap_grad_reduce, given.dsa_indexer_loss_coeff
        if burst.algorithm != OFF and overlaps and not trains:
            yield Problem(
                f"{what} with {FLAG} {OFF}, --overlap-grad-reduce and {COEFFICIENT} {trains}: "
                "Megatron's data parallelism waits for gradients of the indexers, which have none",
                add=(f"{COEFFICIENT} 0.001",),
                remove=("--overlap-grad-reduce",),
            )
        # With ours installed the configuration was made without Megatron's assertion.
        if burst.algorithm == OFF and given.has("cp_comm_type") and not gathers(config):
            yield Problem(
                f"{what} with --context-parallel-algo {OFF}: Megatron's own exchange must be an "
                f"all-gather, not {config.cp_comm_type}",
                add=(_GATHER,),
            )
        return
    yield from plugin_problems("sparse_problems", what, add=(f"--context-parallel-algo {OFF}",))
    problems = registry.optional("sparse_problems")
    if problems is not None:
        yield from problems(config, burst, what)


def gathered(config: Any, burst: BurstConfig) -> None:
    """Give a configuration whose sparse attention stays Megatron's the exchange that this needs."""
    theirs = burst.sparse == OFF and burst.algorithm != OFF and splits(config)
    if not theirs or sparse_layers(config) is None or gathers(config):
        return
    log(f"cp_comm_type {config.cp_comm_type} is now allgather, for {FLAG} {OFF}")
    config.cp_comm_type = "allgather"
