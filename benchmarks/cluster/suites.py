"""Comparisons, each of one question: which settings, which ways to run them, and against what.

Every setting runs all of a suite's rivals in turn, again and again, in the order of the suite; the
ratios are of runs that followed one another. `python -m benchmarks.cluster compare NAME`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from . import whole
from .cells import Cell, Rival
from .network import Rates
from .problems import DOCUMENTS


class Suite(NamedTuple):
    """base: names of the rivals, the fastest of which the others are compared with.

    best: are rivals of one algorithm (its head chunks) dropped after a first round but for the
    fastest? masks: a name without its seed where there is a batch per seed.
    """

    what: str
    rivals: tuple[Rival, ...]
    base: tuple[str, ...]
    grids: str
    rates: str
    heads: str
    tokens: int
    masks: tuple[str, ...]
    wirings: tuple[str, ...] = ("nic",)
    wires: tuple[str, ...] = ("fp32",)
    regimes: tuple[str, ...] = ("communication",)
    best: bool = False
    width: int = 64


def _chunked(name: str, algorithm: str, counts: Sequence[int]) -> tuple[Rival, ...]:
    return tuple(
        Rival(f"{name}, {n} head chunks" if n > 1 else name, algorithm, "auto", head_chunks=n)
        for n in counts
    )


def _laid_out(layout: str, words: str, *algorithms: tuple[str, str]) -> tuple[Rival, ...]:
    """(name, algorithm) after (name, algorithm), in one layout; in head chunks that hide hops, but
    for all_gather: the ends of one chunk would wait for other ranks amid the next."""
    return tuple(
        Rival(f"{words}, {name}", algorithm, "auto", layout=layout,
              head_chunks=1 if algorithm == "all_gather" else 4)
        for name, algorithm in algorithms
    )  # fmt: skip


WHOLE = "burst, whole chunks"
ROWS = ("burst", "burst"), ("multicast", "multicast")
PACK, EACH, MIXED = "zigzag of the pack", "zigzag per document", "balanced"
SUITES = {
    "documents": Suite(
        "packed documents: rows only where they are seen",
        (*_chunked(WHOLE, whole.NAME, (1,)), *_chunked("burst", "burst", (1,)),
         *_chunked("multicast", "multicast", (1,))),
        (WHOLE,), "2x4,4x2", "50M/200M", "MHA 1", 4096,
        tuple(f"documents {name}" for name in DOCUMENTS),
    ),
    "balanced": Suite(
        "layouts of packed documents: equal tokens and equal pairs on all ranks, beside zigzag",
        (*_laid_out("documents", EACH, ("whole chunks", whole.NAME), ROWS[0]),
         *_laid_out("zigzag", PACK, *ROWS),
         *_laid_out("balanced", MIXED, *ROWS, ("all_gather", "all_gather"))),
        (f"{EACH}, whole chunks",), "2x4,4x2", "50M/200M", "MHA 4", 4096,
        tuple(f"documents {name}" for name in DOCUMENTS), regimes=("communication", "compute"),
        width=16,
    ),
    "multicast": Suite(
        "rows that several ranks of a node want cross to it once",
        (*_chunked(WHOLE, whole.NAME, (1,)), *_chunked("burst", "burst", (1,)),
         *_chunked("multicast", "multicast", (1,))),
        (WHOLE,), "2x4,4x2", "50M/200M", "MHA 1", 4096,
        ("causal", "window 4096", "blocks 512"),
    ),
    "tiles": Suite(
        "tiles beside burst, each with its best head chunks",
        (*_chunked("burst", "burst", (1, 2, 4)), *_chunked("tile", "tile", (1, 2, 4))),
        ("burst", "burst, 2 head chunks", "burst, 4 head chunks"), "4x2,4x4", "50M/200M", "MHA 8",
        512, ("full", "causal"), wires=("fp32", "bf16"), best=True,
    ),
    "two_ways": Suite(
        "both ways round a ring, on direct links and on one NIC",
        (*_chunked("ring", "ring", (1,)), *_chunked("burst", "burst", (1,)),
         *_chunked("two_way", "two_way", (1,)), *_chunked("token_ring", "token_ring", (1,))),
        ("ring", "burst"), "1x4,2x4", "50M/200M", "MHA 8", 512,
        ("full", "causal"), wirings=("nic", "node", "mesh"),
    ),
}  # fmt: skip


def cells(
    suite: Suite, grids: Sequence[tuple[int, int]], rates: Sequence[Rates], seeds: Sequence[int]
) -> list[Cell]:
    """The settings of a suite, those on one network in a row; every batch of documents is one."""
    found = []
    for nodes, per_node in grids:
        for rate in rates:
            for wiring in suite.wirings:
                if wiring == "mesh" and nodes == 1:  # the same links as "node"
                    continue
                for mask in (m for name in suite.masks for m in _batches(name, seeds)):
                    found += [
                        Cell(nodes, per_node, rate, suite.heads, regime, suite.tokens, wiring, mask,
                             wire, suite.width)
                        for wire in suite.wires
                        for regime in suite.regimes
                    ]  # fmt: skip
    return found


def _batches(mask: str, seeds: Sequence[int]) -> list[str]:
    if not mask.startswith("documents"):
        return [mask]
    return [f"{mask} seed {seed}" for seed in seeds]
