"""Problems of a run's two layouts: that of its tokens, and that of softmax attention.

Megatron has settings for both (``linear_cp_layout`` and ``attention_cp_layout`` of main,
``cp_partition_mode`` of dev), which are read here where a configuration has them: what they ask for
is what our flags say, or a problem. Fields as Megatron-LM declares them at commit
010994d536a31a389479f995577f7b05a01f7053.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from megatron_burst.config import OFF, BurstConfig
from megatron_burst.megatron.checks.hybrid import asked, splits
from megatron_burst.megatron.checks.problem import Problem

LINEAR, ATTENTION, PARTITION = "linear_cp_layout", "attention_cp_layout", "cp_partition_mode"
STREAMS = ("contiguous", "zigzag")  # of tokens whose attention may have another layout


class Layouts(NamedTuple):
    """Of the stream of tokens, and of softmax attention."""

    stream: str
    attention: str

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags that ask for them."""
        apart = (f"--burst-attention-layout {self.attention}",) * (self.attention != self.stream)
        return (f"--burst-layout {self.stream}", *apart)


def layouts_of(burst: BurstConfig) -> Layouts:
    """Those that our choices state."""
    return Layouts(burst.layout, burst.attention_layout or burst.layout)


def megatrons_layouts(config: Any) -> Layouts | None:
    """Those that Megatron's own settings ask for; None if it has none or they have their default.

    Megatron cuts batches as layers of linear attention want them.
    """
    found = Layouts(*(getattr(config, name, None) or "zigzag" for name in (LINEAR, ATTENTION)))
    return None if found == ("zigzag", "zigzag") else found


def adopted(burst: BurstConfig, config: Any) -> BurstConfig:
    """Choices that name no layout, with those that Megatron's own settings ask for, if any."""
    wanted = megatrons_layouts(config)
    if wanted is None or burst.algorithm == OFF or not splits(config):
        return burst
    attention: Any = None if wanted.attention == wanted.stream else wanted.attention
    stream: Any = wanted.stream
    return dataclasses.replace(burst, layout=stream, attention_layout=attention)


def two_layout_problems(config: Any, burst: BurstConfig) -> Iterator[Problem]:
    """Settings of a ``TransformerConfig`` that exclude the layouts of a run, or contradict them."""
    if not splits(config) or burst.algorithm == OFF:
        if burst.attention_layout not in (None, burst.layout):
            yield Problem(
                f"--burst-attention-layout {burst.attention_layout} is of BurstAttention over "
                f"context-parallel ranks: it needs --context-parallel-algo burst and "
                f"--context-parallel-size above 1, got {burst.algorithm} and "
                f"{config.context_parallel_size}",
                remove=("--burst-attention-layout",),
            )
        return
    if getattr(config, "burst", None) != burst:  # `configure` has not read them yet
        yield from _contradictions(config, burst)
    if burst.attention_layout not in (None, burst.layout):
        yield from _apart_problems(config, burst)


def _contradictions(config: Any, burst: BurstConfig) -> Iterator[Problem]:
    mode = getattr(config, PARTITION, None)
    if mode not in (None, "zigzag"):
        yield Problem(
            f"--cp-partition-mode {mode}: Megatron then exchanges rows around attention itself, "
            "and BurstAttention would get those of others",
            add=Layouts("contiguous", "zigzag").flags,
            remove=("--cp-partition-mode",),
        )
    wanted, ours = megatrons_layouts(config), layouts_of(burst)
    if wanted is not None and wanted != ours:
        yield Problem(
            f"--linear-cp-layout {wanted.stream} and --attention-cp-layout {wanted.attention} "
            f"contradict {' '.join(ours.flags)}: take the same, or leave Megatron's settings out",
            add=wanted.flags,
        )


def _apart_problems(config: Any, burst: BurstConfig) -> Iterator[Problem]:
    """What was not tested with attention in a layout of its own."""
    flag = f"--burst-attention-layout {burst.attention_layout}"
    if burst.layout not in STREAMS:
        yield Problem(
            f"{flag} with --burst-layout {burst.layout}: tokens that attention exchanges lie "
            f"{' or '.join(STREAMS)}",
            add=("--burst-layout contiguous",),
        )
    if burst.sequence_chunks != 1:
        yield Problem(
            f"{flag} with --burst-sequence-chunks {burst.sequence_chunks}, which was not tested: "
            "chunks of rows of the stream would be other rows of attention's",
            remove=("--burst-sequence-chunks",),
        )
    if burst.offload:
        yield Problem(
            f"{flag} with --burst-offload {burst.offload}, which was not tested",
            remove=("--burst-offload",),
        )
    if getattr(config, "mtp_num_layers", None):
        yield Problem(
            f"{flag} with --mtp-num-layers, which was not tested",
            remove=("--burst-attention-layout",),
        )
    changing = asked(config)
    if changing is not None:
        yield Problem(
            f"{flag} with {changing}, whose groups change with the micro-batch: not tested",
            remove=("--burst-attention-layout",),
        )
