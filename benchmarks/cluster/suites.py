"""Suites, each of one question: which settings, which ways to run them, and against what.

Every setting runs all of a suite's rivals in turn, again and again, in the order of the suite; the
ratios are of runs that followed one another. `bench` runs `EVERY`, `compare` the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from . import whole
from .cells import HEADS, REGIMES, RIVALS, WIRES, Cell, Rival
from .network import WIRINGS, Rates
from .problems import DOCUMENTS


class Suite(NamedTuple):
    """base: names of the rivals, the fastest of which the others are compared with; none: of all.

    best: are rivals of one algorithm (its head chunks) dropped after a first round but for the
    fastest? masks: a name without its seed where there is a batch per seed. Where a field is a
    text, it is a list with commas, as on the command line.
    """

    what: str
    rivals: tuple[Rival, ...]
    base: tuple[str, ...]
    grids: str
    rates: str
    heads: str
    tokens: int
    masks: tuple[str, ...] = ("causal",)
    wirings: tuple[str, ...] = ("nic",)
    wires: tuple[str, ...] = ("fp32",)
    regimes: str = "communication"
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
EVERY = Suite("every algorithm", RIVALS, (), "2x2", "100M/400M", "MHA", 512,
              regimes="communication,balanced,compute")  # fmt: skip
FULL = EVERY._replace(
    grids="2x2,2x4,4x2", rates="200M/800M,1G/4G", heads="MHA,GQA 4:1", tokens=1024,
    regimes="communication,balanced,compute,hidden,real",
)  # fmt: skip


def _megatron(layout: str) -> tuple[Rival, ...]:
    """Megatron's kinds but all_gather, whose rings in NCCL send what p2p sends."""
    return (
        Rival("Megatron p2p", whole.RING, layout=layout),
        Rival("Megatron a2a", "ulysses", ulysses="all", layout=layout),
        Rival("Megatron a2a+p2p", whole.RING, ulysses="node", layout=layout),
    )


PACK, EACH, MIXED = "zigzag of the pack", "zigzag per document", "balanced"
SUITES = {
    "megatron": Suite(
        "Megatron's own kinds, one sequence",
        (*_megatron("zigzag"), *_chunked("burst", "burst", (1,)),
         Rival("auto", "auto", "auto", ulysses="chosen")),
        ("Megatron p2p", "Megatron a2a", "Megatron a2a+p2p"), "1x8,2x4", "100M/400M", "MHA 8", 512,
        regimes="communication,compute",
    ),
    "megatron_documents": Suite(
        "Megatron's own kinds, packed documents",
        (*_megatron("documents"),
         *_laid_out("balanced", MIXED, ROWS[1]),
         Rival(f"{MIXED}, auto", "auto", "auto", layout="balanced")),
        ("Megatron p2p", "Megatron a2a", "Megatron a2a+p2p"), "2x4", "100M/400M", "MHA 8", 2048,
        tuple(f"documents {name}" for name in DOCUMENTS), regimes="communication,compute",
        width=16,
    ),
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
        tuple(f"documents {name}" for name in DOCUMENTS), regimes="communication,compute",
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


def cells(suite: Suite, seeds: Sequence[int] = ()) -> list[Cell]:
    """The settings of a suite, those on one network, and then of one problem, in a row; every batch
    of documents is one. ValueError for a name that there is not."""
    for flag, names, known in (
        ("--heads", _words(suite.heads), HEADS), ("--wirings", suite.wirings, WIRINGS),
        ("--wires", suite.wires, WIRES), ("--regimes", _words(suite.regimes), (*REGIMES, "real")),
    ):  # fmt: skip
        if unknown := [name for name in names if name not in known]:
            raise ValueError(f"{flag}: there is {', '.join(known)}, got {unknown[0]!r}")
    masks = [mask for name in suite.masks for mask in _batches(name, seeds)]
    every = product(map(_grid, _words(suite.grids)), map(Rates.parse, _words(suite.rates)),
                    suite.wirings, _words(suite.heads), masks, suite.wires,
                    _words(suite.regimes))  # fmt: skip
    return [
        Cell(*grid, rates, heads, regime, suite.tokens, wiring, mask, wire, suite.width)
        for grid, rates, wiring, heads, mask, wire, regime in every
        if (grid[0], wiring) != (1, "mesh")  # the same links as "node"
    ]


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


def _grid(text: str) -> tuple[int, int]:
    nodes, _, per_node = text.partition("x")
    if not (nodes.isdigit() and per_node.isdigit() and 1 < int(nodes) * int(per_node) <= 64):
        raise ValueError(f"--grids must look like 2x4 and hold 2 to 64 ranks, got {text!r}")
    return int(nodes), int(per_node)


def _batches(mask: str, seeds: Sequence[int]) -> list[str]:
    if not mask.startswith("documents"):
        return [mask]
    return [f"{mask} seed {seed}" for seed in seeds]
