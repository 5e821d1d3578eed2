# SPDX-License-Identifier: Apache-2.0
"""Content of pictures of state scans: chains of pieces, and the hops of every round.

A state scan computes the state of linear attention at the start of every piece of a document. (A
piece is a run of consecutive positions of a document on one rank.) This module also defines the
flags of `show scan`. The hops are the same as in training (`schedule.scans`).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ....layout.pieces import Chains, chains
from ....schedule.scans import SCANS
from ....schedule.scans.hops import ALL_BLOCKS, MAP, Hops, Task
from ....schedule.tables import Grid
from ....schedule.topology import Topology
from ..call_flags import check_positive
from . import inputs

PIECES = 128  # maximum number of pieces of a chain


@dataclass(frozen=True)
class ScanScene:
    """Content of a picture of a state scan, in forward or backward.

    Attributes:
        algorithm: Algorithm of the scan.
        layout_text: Description of the layout.
        seq_len: Number of positions.
        grid: Number of nodes and of ranks per node.
        chains: Pieces (runs of consecutive positions of a document on one rank) of all documents,
            in order. In backward the order is reversed: piece 0 is the last piece of the sequence.
        hops: Transfers between ranks, by round.
        blocks: Number of parts into which a state is cut.
        backward: True if the picture shows backward.
    """

    algorithm: str
    layout_text: str
    seq_len: int
    grid: Grid
    chains: Chains
    hops: Hops
    blocks: int
    backward: bool

    @property
    def rounds(self) -> int:
        return int(self.hops.round[-1]) + 1 if len(self.hops) else 0

    @cached_property
    def between(self) -> np.ndarray:
        """True for each transfer to another node, bool [hops]."""
        return self.hops.source // self.grid.intra != self.hops.destination // self.grid.intra

    @property
    def pieces(self) -> list[int]:
        """Indices of the pieces, in the order of positions."""
        numbers = list(range(len(self.chains)))
        return numbers[::-1] if self.backward else numbers

    def name(self, hop: int) -> str:
        """Return the label of a transfer, which names its content.

        s3 is the state at the start of piece 3, s3.1 is part 1 of this state, and m3-4 is the map
        (function) from the state before piece 3 to the state after piece 4.
        """
        first, last = int(self.hops.first[hop]), int(self.hops.last[hop])
        if self.hops.kind[hop] == MAP:
            label = f"m{first}" + (f"-{last}" if last > first else "")
        else:
            label = f"s{first}"
        block = int(self.hops.block[hop])
        return f"{label}.{block}" if block != ALL_BLOCKS and self.blocks > 1 else label

    def counts(self) -> list[str]:
        """Return caption lines with the numbers of sent states and maps, one per link class."""
        lines = []
        for link, chosen in (("intra", ~self.between), ("inter", self.between)):
            parts = []
            for is_map, content in ((False, "states"), (True, "maps")):
                selected = chosen & ((self.hops.kind == MAP) == is_map)
                share = np.where(
                    self.hops.block[selected] == ALL_BLOCKS, 1.0, 1 / self.blocks
                ).sum()
                if selected.any():
                    parts.append(f"{int(selected.sum())} hops of {content} ({share:g} whole)")
            if parts:
                lines.append(f"{link}: {', '.join(parts)}")
        return lines


def add_flags(sub: argparse.ArgumentParser) -> None:
    """Add the flags of `show scan`."""
    sub.add_argument("--algorithm", default="scan", choices=SCANS, help="default: scan")
    sub.add_argument(
        "--blocks", type=int, metavar="N",
        help="number of parts of a state (default: 4 for scan, the ranks of a node for two_level, "
        "otherwise 1)",
    )  # fmt: skip
    sub.add_argument("--backward", action="store_true", help="draw backward instead of forward")


def scan_scene(arguments: argparse.Namespace, grid: Grid, seq_len: int) -> ScanScene:
    """Return the scene that the flags describe.

    Raises:
        ValueError: Flags are inconsistent.
    """
    check_positive(arguments, ["blocks"])
    algorithm = arguments.algorithm
    default = {"scan": 4, "two_level": grid.intra}.get(algorithm, 1)
    if arguments.blocks and algorithm not in ("scan", "two_level"):
        raise ValueError(
            f"--blocks: {algorithm} sends whole states; remove --blocks, or use --algorithm scan "
            "or two_level"
        )
    bounds = inputs.bounds_of(arguments.lengths, seq_len)
    layout, text = inputs.layout_of(arguments, arguments.layout, grid, bounds)
    layout.check(seq_len)
    chain = chains(layout, seq_len, bounds)
    if len(chain) > PIECES:
        raise ValueError(
            f"a picture shows at most {PIECES} pieces (runs of positions of a document on one "
            f"rank), got {len(chain)}; use fewer ranks or documents"
        )
    blocks = arguments.blocks or default
    turned = chain.backward() if arguments.backward else chain
    hops = SCANS[algorithm](Task(turned, Topology(grid.size, grid.intra), blocks))
    return ScanScene(algorithm, text, seq_len, grid, turned, hops, blocks, arguments.backward)
