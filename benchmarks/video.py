"""Attention of Wan's shapes on H100, simulated: ours, Ulysses, an all-gather and TE's ring.

    make bench-video

One call of attention without a mask, forward and backward, with bf16 tensors and fp32 gradients on
the wire. Ulysses shares heads over as many ranks of a node as divide the heads; a ring connects
these groups.
"""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.report import markdown
from megatron_burst.autotune.candidates import FixedSettings, Workload, grids
from megatron_burst.autotune.clusters import Cluster, gpu
from megatron_burst.autotune.select import Choice, best
from megatron_burst.layout import make
from megatron_burst.masks import Full
from megatron_burst.schedule.sizes import Sizes
from megatron_burst.schedule.topology import Topology

PER_NODE = 8


class Clip(NamedTuple):
    """One clip of a model.

    Attributes:
        tokens: Tokens of the clip, padded to a multiple of 2 x `ranks`.
        heads: Heads of width 128.
        ranks: Context-parallel ranks.
    """

    name: str
    tokens: int
    heads: int
    ranks: int


CLIPS = (
    Clip("Wan 1.3B, 480p, 33K tokens", 32768, 12, 8),
    Clip("Wan 1.3B, 720p, 75K tokens", 75776, 12, 8),
    Clip("Wan 14B, 720p, 75K tokens", 75776, 40, 8),
    Clip("Wan 14B, 720p, 75K tokens", 75776, 40, 64),
)


def times(clip: Clip) -> list[Choice]:
    """Return the predicted calls of TE's ring, the all-gather, Ulysses and `auto`."""
    sizes = Sizes(
        clip.tokens // clip.ranks, 1, clip.heads, clip.heads, 128, 128, 2, 4, 4, (True, True, True)
    )
    work = Workload(sizes, Full(), make("zigzag", cp_size=clip.ranks))
    rates = Cluster(gpu("h100"), clip.ranks).rank_rates()
    shared = max(n for n in (1, 2, 4, 8) if clip.heads % n == 0)
    flat, ulysses = Topology(clip.ranks, PER_NODE), Topology(clip.ranks, PER_NODE, shared)
    return [
        best(work, [flat], rates, FixedSettings("ring", "kv", 1)),
        best(work, [flat], rates, FixedSettings("all_gather", "kv", 1)),
        best(work, [ulysses], rates, FixedSettings("ring", "kv", 1)),
        best(work, grids(clip.ranks, PER_NODE, sizes), rates),
    ]


def main() -> None:
    rows = []
    for clip in CLIPS:
        choices = times(clip)
        milliseconds = [f"{choice.seconds * 1e3:.1f} ms" for choice in choices]
        rows.append(
            [f"{clip.name}, CP {clip.ranks}", *milliseconds, str(choices[-1].taken.algorithm)]
        )
    columns = ["clip", "TE's ring", "all-gather", "Ulysses, ring", "`auto`", "taken"]
    print(markdown(columns, rows))


if __name__ == "__main__":
    main()
