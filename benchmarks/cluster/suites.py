"""Suites; each has settings, rivals and a base for one question.

Every setting runs all rivals of a suite in turn, several times, in the order of the suite; ratios
are of consecutive runs. `bench` runs `EVERY`, `compare` the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from types import MappingProxyType
from typing import NamedTuple

from . import whole
from .cells import CHOSEN, HEADS, REGIMES, RIVALS, WIRES, Cell, Rival
from .network import WIRINGS, Rates
from .problems import DOCUMENTS

Targets = Mapping[tuple[str, str], tuple[float, float]]


class Suite(NamedTuple):
    """Settings and rivals of one question.

    Text fields are lists with commas, as on the command line.

    Attributes:
        base: Names of rivals; the others are compared with the fastest of these. Empty for all.
        best: After a first round, keep only the fastest rival of each algorithm (its head chunks).
        masks: Names without seed for batches, one batch per seed.
        ours: Rival whose time the summary divides by the times of all others. Otherwise each time
            is divided by the base.
        targets: Targets of the time of `ours` relative to the base and to its limit, by documents
            and regime.
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
    dtype: str = "fp32"
    ours: str = ""
    targets: Targets = MappingProxyType({})


def _chunked(
    name: str, algorithm: str, counts: Sequence[int], layout: str = "zigzag"
) -> tuple[Rival, ...]:
    return tuple(
        Rival(f"{name}, {n} head chunks" if n > 1 else name, algorithm, "auto", head_chunks=n,
              layout=layout)
        for n in counts
    )  # fmt: skip


WHOLE = "burst, whole chunks"
EVERY = Suite("every algorithm", RIVALS, (), "2x2", "100M/400M", "MHA", 512,
              regimes="communication,balanced,compute")  # fmt: skip
FULL = EVERY._replace(
    grids="2x2,2x4,4x2", rates="200M/800M,1G/4G", heads="MHA,GQA 4:1", tokens=1024,
    regimes="communication,balanced,compute,hidden,real",
)  # fmt: skip


def _megatron(layout: str) -> tuple[Rival, ...]:
    """Return Megatron's kinds except all_gather."""
    return (
        Rival("Megatron p2p", whole.RING, layout=layout),
        Rival("Megatron a2a", "ulysses", ulysses="all", layout=layout),
        Rival("Megatron a2a+p2p", whole.RING, ulysses="node", layout=layout),
    )


OURS, MIXED = "ours", "balanced"
EACH = "zigzag per document, whole chunks"
# Fractions of the time of zigzag per document, and of the limit.
TARGETS = {
    (documents, regime): (share, over)
    for documents, shares in (
        ("500", (0.25, 0.45, 1.0)), ("1K", (0.38, 0.6, 1.0)), ("tail", (0.65, 0.8, 1.0))
    )
    for regime, share, over in zip(
        ("communication", "balanced", "compute"), shares, (1.1, 1.1, 1.03), strict=True
    )
}  # fmt: skip
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
         Rival(f"{MIXED}, multicast", "multicast", "auto", layout="balanced", head_chunks=4),
         Rival(f"{MIXED}, auto", "auto", "auto", layout="balanced")),
        ("Megatron p2p", "Megatron a2a", "Megatron a2a+p2p"), "2x4", "100M/400M", "MHA 8", 2048,
        ("documents 500", "documents 1K"), regimes="communication,compute", width=16,
    ),
    "documents": Suite(
        "packed documents: rows only where they are seen",
        (*_chunked(WHOLE, whole.NAME, (1,)), *_chunked("burst", "burst", (1,)),
         *_chunked("multicast", "multicast", (1,))),
        (WHOLE,), "2x4,4x2", "50M/200M", "MHA 1", 4096, ("documents 500", "documents 1K"),
    ),
    "packed": Suite(
        "packed documents: the layout and algorithm that `auto` takes, beside every rival",
        (*_megatron("documents"),
         *_chunked(EACH, whole.NAME, (4,), "documents"),
         Rival("all-gather, whole chunks", whole.GATHER, layout="documents"),
         Rival("groups by Megatron's rule", whole.RING, layout="dynamic"),
         Rival(OURS, "auto", "auto", layout=CHOSEN)),
        ("Megatron p2p", f"{EACH}, 4 head chunks"), "2x4,4x2,2x2", "50M/200M", "MHA 8", 4096,
        tuple(f"documents {name}" for name in DOCUMENTS), wires=("bf16",),
        regimes="communication,balanced,compute", width=16, dtype="bf16", ours=OURS,
        targets=TARGETS,
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
    """Return the settings of a suite, grouped by network and then by problem, one batch each.

    Raises:
        ValueError: A name is unknown.
    """
    for flag, names, valid_names in (
        ("--heads", _words(suite.heads), HEADS), ("--wirings", suite.wirings, WIRINGS),
        ("--wires", suite.wires, WIRES), ("--regimes", _words(suite.regimes), (*REGIMES, "real")),
    ):  # fmt: skip
        if unknown_names := [name for name in names if name not in valid_names]:
            raise ValueError(f"{flag}: there is {', '.join(valid_names)}, got {unknown_names[0]!r}")
    masks = [mask for name in suite.masks for mask in _batches(name, seeds)]
    combinations = product(map(_grid, _words(suite.grids)), map(Rates.parse, _words(suite.rates)),
                           suite.wirings, _words(suite.heads), masks, suite.wires,
                           _words(suite.regimes))  # fmt: skip
    return [
        Cell(*grid, rates, heads, regime, suite.tokens, wiring, mask, wire, suite.width,
             suite.dtype)
        for grid, rates, wiring, heads, mask, wire, regime in combinations
        if (grid[0], wiring) != (1, "mesh")  # the same links as "node"
    ]  # fmt: skip


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
