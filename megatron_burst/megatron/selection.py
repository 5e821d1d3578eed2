# SPDX-License-Identifier: Apache-2.0
"""The attention and the layouts that a configuration selects.

The functions read a `TransformerConfig`, or parsed arguments with the same names.

Megatron has its own settings for the layouts of tokens and of softmax attention: `linear_cp_layout`
and `attention_cp_layout` of branch main, `cp_partition_mode` of branch dev. The names are from
Megatron-LM at commit 010994d536a31a389479f995577f7b05a01f7053.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..config import OFF, BurstConfig

HYBRID, DYNAMIC = "--hybrid-context-parallel", "--dynamic-context-parallel"
_FIELDS = (("hybrid_context_parallel", HYBRID), ("dynamic_context_parallel", DYNAMIC))


def burst_of(config: Any) -> Any:
    """Return the `BurstConfig` that `configure_model` stored in a `TransformerConfig`, or None.

    Plugins annotate the result with their own option class.
    """
    return getattr(config, "burst", None)


def changing_groups(settings: Any) -> str | None:
    """Return the flag that gives each micro-batch its own group; None if it is not set."""
    return next((flag for name, flag in _FIELDS if getattr(settings, name, False)), None)


def splits(settings: Any) -> bool:
    """Return whether the run splits any micro-batch over context-parallel ranks."""
    return settings.context_parallel_size != 1 or changing_groups(settings) is not None


def splits_with_burst(settings: Any, burst: BurstConfig | None) -> bool:
    """Return whether the run splits micro-batches over ranks with BurstAttention."""
    return burst is not None and burst.algorithm != OFF and splits(settings)


def uses_burst(settings: Any, burst: BurstConfig | None) -> bool:
    """Return whether BurstAttention computes attention in the models of a run.

    This is so if BurstAttention splits micro-batches over ranks, or if micro-batches are prefix
    trees, which Megatron's own attention does not support.
    """
    if burst is None or burst.algorithm == OFF:
        return False
    return burst.pack == "trees" or splits(settings)


LINEAR_LAYOUT, ATTENTION_LAYOUT = "linear_cp_layout", "attention_cp_layout"
PARTITION_MODE = "cp_partition_mode"
STREAMS = ("contiguous", "zigzag")  # layouts of tokens for which attention may have another layout


class RunLayouts(NamedTuple):
    """The layout of tokens between layers (`stream`), and of softmax attention (`attention`)."""

    stream: str
    attention: str

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags that select these layouts."""
        differing = self.attention != self.stream
        attention = (f"--burst-attention-layout {self.attention}",) * differing
        return (f"--burst-layout {self.stream}", *attention)


def layouts_of(burst: BurstConfig) -> RunLayouts:
    """Return the layouts that the options of a run select."""
    return RunLayouts(burst.layout, burst.attention_layout or burst.layout)


def megatrons_layouts(config: Any) -> RunLayouts | None:
    """Return the layouts that Megatron's own settings select; None for its defaults.

    In Megatron, `linear_cp_layout` is also the layout in which batches are cut.
    """
    layouts = RunLayouts(
        *(getattr(config, name, None) or "zigzag" for name in (LINEAR_LAYOUT, ATTENTION_LAYOUT))
    )
    return None if layouts == ("zigzag", "zigzag") else layouts
