# SPDX-License-Identifier: Apache-2.0
"""Checks of how a run splits its sequences: groups per micro-batch, layouts, and states.

Hybrid and dynamic context parallelism give each micro-batch its own group. Attention, rotary
embedding and data path read that group from `PackedSeqParams`, so both modes work in training loops
that pass `PackedSeqParams` to the model. If a part of Megatron does not support a group per
micro-batch, the error names the part.

Megatron's own settings of layouts must select the same layouts as our flags.

Layers of linear attention either pass states from rank to rank (`--burst-linear`), or Megatron's
own all-to-all distributes heads ("megatron"). The all-to-all supports only zigzag and requires that
the ranks divide the heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...config import BurstConfig
from ..model_shape import DELTA_NETS, KIMI, ModelShape
from ..patching import HYBRID_SINCE, core_version
from ..selection import (
    DYNAMIC,
    HYBRID,
    PARTITION_MODE,
    STREAMS,
    RunLayouts,
    burst_of,
    changing_groups,
    layouts_of,
    megatrons_layouts,
    splits_with_burst,
)
from .cuda_graphs import captured, graphs_asked
from .problem import Problem, Rule, broken, excluded, excluded_options


def needs_ranks(flag: str, config: Any, burst: BurstConfig, remove: tuple[str, ...]) -> Problem:
    """Return the problem of a flag that requires BurstAttention over several ranks."""
    return Problem(
        f"{flag} requires --context-parallel-algo burst and --context-parallel-size > 1, but they "
        f"are {burst.algorithm} and {config.context_parallel_size}",
        remove=remove,
    )


_HYBRID = (
    *excluded(
        "{flag} does not work with {other}: {why}",
        ("{flag}",),
        multi_latent_attention=(
            "Megatron's latent attention does not support groups that change between micro-batches"
        ),
        mtp_num_layers="Megatron shifts tokens in the group with which the model was built",
    ),
    Rule("is_hybrid_model", "{flag} does not work with Mamba layers: they split the sequence "
         "over the group with which the model was built", remove=("{flag}",)),
    *excluded(
        "{flag} does not work with {other}: {why}",
        ("{flag}",),
        experimental_attention_variant=(
            "it splits the sequence over the group with which the model was built"
        ),
    ),
    Rule(lambda c, b: c.hybrid_context_parallel and (c.pipeline_model_parallel_size or 1) > 1,
         "{flag} does not work with --pipeline-model-parallel-size "
         "{c.pipeline_model_parallel_size}: Megatron's schedule for {flag} supports no pipelines",
         remove=("{flag}",)),
    Rule(lambda c, b: c.has("calculate_per_token_loss") and not c.calculate_per_token_loss,
         "{flag} requires --calculate-per-token-loss: without it micro-batches with unequal "
         "numbers of tokens have equal weights in the loss",
         add=("--calculate-per-token-loss",)),
)  # fmt: skip


def hybrid_problems(config: Any) -> Iterator[Problem]:
    """Yield the settings of a `TransformerConfig` that do not work with groups per micro-batch."""
    flag = changing_groups(config)
    if flag is not None:
        yield from broken(_HYBRID, config, flag=flag)


# Bugs of Megatron-LM's own training loop (present up to 0.20.0).
SCRIPT = (
    Rule(lambda c, b: changing_groups(c) == HYBRID,
         f"{HYBRID}: Megatron-LM's training loop does not work with it: its rerun state machine "
         "refuses the data iterator (not wrapped with RerunDataIterator), its scripts fail in "
         "get_batch_on_this_tp_rank (documents of its data loader have one dimension, and neither "
         "cu_seqlens nor max_seqlen), and validation gets batches that were not scheduled; use "
         "your own loop on Megatron-Core",
         remove=(HYBRID,)),
    Rule(lambda c, b: changing_groups(c) == DYNAMIC,
         f"{DYNAMIC}: Megatron-LM's branch dev cuts batches with Transformer Engine, which was not "
         "tested; use your own loop on Megatron-Core, in which attention accepts these groups",
         remove=(DYNAMIC,)),
)  # fmt: skip


def two_layout_problems(config: Any, burst: BurstConfig) -> Iterator[Problem]:
    """Yield the settings that contradict the layouts of a run or do not work with them."""
    if not splits_with_burst(config, burst):
        if burst.attention_layout not in (None, burst.layout):
            flag = f"--burst-attention-layout {burst.attention_layout}"
            yield needs_ranks(flag, config, burst, ("--burst-attention-layout",))
        return
    yield from _partition_problems(config)
    # After `configure`, `run_options.one_layout` has replaced the two layouts of Megatron.
    if burst_of(config) != burst or burst.layout not in STREAMS:
        yield from _contradictions(config, burst)
    if burst.attention_layout not in (None, burst.layout):
        flag = f"--burst-attention-layout {burst.attention_layout}"
        yield from broken(_TWO_LAYOUTS, config, burst, flag)
        yield from excluded_options("attention_layout", flag, burst)


def _partition_problems(config: Any) -> Iterator[Problem]:
    mode = getattr(config, PARTITION_MODE, None)
    if mode not in (None, "zigzag"):
        yield Problem(
            f"--cp-partition-mode {mode}: Megatron then exchanges rows around attention itself, "
            "and BurstAttention would receive rows of other ranks",
            add=RunLayouts("contiguous", "zigzag").flags,
            remove=("--cp-partition-mode",),
        )


def _contradictions(config: Any, burst: BurstConfig) -> Iterator[Problem]:
    selected, layouts = megatrons_layouts(config), layouts_of(burst)
    if selected is not None and selected != layouts:
        yield Problem(
            f"--linear-cp-layout {selected.stream} and --attention-cp-layout {selected.attention} "
            f"contradict {' '.join(layouts.flags)}: select the same layouts with both, or remove "
            "--linear-cp-layout and --attention-cp-layout",
            add=selected.flags,
        )


# Settings that were not tested with a separate layout of attention.
_TWO_LAYOUTS = (
    Rule(lambda c, b: b.layout not in STREAMS,
         "{flag} does not work with --burst-layout {b.layout}: a separate layout of attention "
         f"requires --burst-layout {' or '.join(STREAMS)}", add=("--burst-layout contiguous",)),
    Rule("mtp_num_layers", "{flag} was not tested with --mtp-num-layers",
         remove=("--burst-attention-layout",)),
    Rule(lambda c, b: changing_groups(c),
         "{flag} was not tested with {value}, which changes groups between micro-batches",
         remove=("--burst-attention-layout",)),
)  # fmt: skip


LINEAR_FLAG = "--burst-linear"
# In these layouts most rows have their predecessor on the same rank.
LAYOUTS = ("zigzag", "contiguous", "balanced")
_SPLIT_DELTA_NETS = (0, 18)  # the first Megatron-Core that splits delta nets, by heads
_HEADS = ("linear_num_key_heads", "linear_num_value_heads")


def linear_problems(config: Any, burst: BurstConfig) -> Iterator[Problem]:
    """Yield the problems of layers of linear attention and Mamba layers, which carry a state.

    Args:
        config: the `TransformerConfig` of a model with several context-parallel ranks, or any
            object with attributes of the same names.
        burst: the options of the run.

    Yields:
        The problems.
    """
    setting = ModelShape.of(config).linear_setting
    if setting is None or changing_groups(config):  # `hybrid_problems` checks these groups
        return
    if burst.linear == "megatron":
        yield from _heads_problems(config, burst, setting)
        return
    if core_version() < HYBRID_SINCE:
        present, oldest = (
            ".".join(map(str, version)) for version in (core_version(), HYBRID_SINCE)
        )
        delta = getattr(config, "experimental_attention_variant", None) in DELTA_NETS
        unsplit = delta and core_version() < _SPLIT_DELTA_NETS
        alternative = (
            "which cannot split these layers: install a newer one"
            if unsplit
            else "whose own all-to-all of heads can split these layers"
        )
        yield Problem(
            f"{setting} at --context-parallel-size {config.context_parallel_size}: passing states "
            f"from rank to rank requires Megatron-Core {oldest} or newer, and this is {present}, "
            f"{alternative}",
            add=() if unsplit else (f"{LINEAR_FLAG} megatron",),
        )
        return
    if burst.layout not in (*LAYOUTS, "auto"):
        yield Problem(
            f"{setting} with --burst-layout {burst.layout}: every row's predecessor is on another "
            "rank, so a state would be sent after every row",
            add=("--burst-layout zigzag",),
        )
    flag, impl = graphs_asked(config)
    if impl != "none" and "mamba" in captured(config):
        yield Problem(
            f"{flag} captures Mamba layers, whose states pass from rank to rank outside of graphs",
            add=(f"{LINEAR_FLAG} megatron",),
        )
    tensor = getattr(config, "tensor_model_parallel_size", 1)
    yield from _indivisible(config, tensor, f"--tensor-model-parallel-size {tensor}")


def _heads_problems(config: Any, burst: BurstConfig, setting: str) -> Iterator[Problem]:
    """Yield the settings with which Megatron cannot distribute heads by all-to-all."""
    if setting == KIMI:
        yield Problem(
            f"{LINEAR_FLAG} megatron: Megatron's own layers of {KIMI} support only one "
            "context-parallel rank",
            add=(f"{LINEAR_FLAG} auto",),
        )
        return
    if burst.layout not in ("zigzag", "auto"):
        yield Problem(
            f"{LINEAR_FLAG} megatron with --burst-layout {burst.layout}: Megatron's own all-to-all "
            f"of heads requires zigzag; {LINEAR_FLAG} auto supports {', '.join(LAYOUTS)}",
            add=("--burst-layout zigzag",),
        )
    tensor, ranks = config.tensor_model_parallel_size, config.context_parallel_size
    sizes = f"--tensor-model-parallel-size {tensor} x --context-parallel-size {ranks}"
    alternative = () if core_version() < HYBRID_SINCE else (f"{LINEAR_FLAG} auto",)
    yield from _indivisible(
        config, tensor * ranks, f"{sizes}, with {LINEAR_FLAG} megatron", alternative
    )


def _indivisible(
    config: Any, ranks: int, sizes: str, add: tuple[str, ...] = ()
) -> Iterator[Problem]:
    """Yield a problem if `ranks` does not divide the heads of gated delta nets."""
    if getattr(config, "experimental_attention_variant", None) not in DELTA_NETS:
        return
    for name in _HEADS:
        heads = getattr(config, name, None)
        if heads and heads % ranks:
            flag = f"--{name.replace('_', '-')}"
            yield Problem(f"{flag} {heads} is not divisible by {sizes}", add=add)
