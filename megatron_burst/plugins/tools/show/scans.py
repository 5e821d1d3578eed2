# SPDX-License-Identifier: Apache-2.0
"""A scan of states as a scene: the chain of pieces, and what every rank sends in every round.

This module holds its flags. The tables are those that run (`schedule.scans`).
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

PIECES = 128  # of a chain, at most


@dataclass(frozen=True)
class ScanScene:
    """One pass over the chains of a sequence. Backward is the same on the chains turned around, so
    that piece 0 is then the last one.
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
        """Bool [hops]: does it go to another node?"""
        return self.hops.source // self.grid.intra != self.hops.destination // self.grid.intra

    @property
    def pieces(self) -> list[int]:
        """The numbers of the pieces, in the order of positions."""
        every = list(range(len(self.chains)))
        return every[::-1] if self.backward else every

    def name(self, hop: int) -> str:
        """What one hop carries: s3, the state that enters piece 3; m3-4, the map of these pieces;
        s3.1, part 1 of it.
        """
        first, last = int(self.hops.first[hop]), int(self.hops.last[hop])
        if self.hops.kind[hop] == MAP:
            said = f"m{first}" + (f"-{last}" if last > first else "")
        else:
            said = f"s{first}"
        block = int(self.hops.block[hop])
        return f"{said}.{block}" if block != ALL_BLOCKS and self.blocks > 1 else said

    def counts(self) -> list[str]:
        """How many hops there are, within nodes and between them, of states and of maps."""
        lines = []
        for link, chosen in (("intra", ~self.between), ("inter", self.between)):
            parts = []
            for kind, what in ((False, "states"), (True, "maps")):
                found = chosen & ((self.hops.kind == MAP) == kind)
                share = np.where(self.hops.block[found] == ALL_BLOCKS, 1.0, 1 / self.blocks).sum()
                if found.any():
                    parts.append(f"{int(found.sum())} hops of {what} ({share:g} whole)")
            if parts:
                lines.append(f"{link}: {', '.join(parts)}")
        return lines


def add_flags(sub: argparse.ArgumentParser) -> None:
    """Those that only a scan has."""
    sub.add_argument("--algorithm", default="scan", choices=SCANS, help="default: scan")
    sub.add_argument(
        "--blocks", type=int, metavar="N",
        help="into how many parts a state is cut (default: 4 with scan, with two_level the ranks "
        "of a node, else 1)",
    )  # fmt: skip
    sub.add_argument("--backward", action="store_true", help="draw backward instead of forward")


def scan_scene(arguments: argparse.Namespace, grid: Grid, seq_len: int) -> ScanScene:
    """The scene of these flags. Raises ValueError for flags that do not fit together."""
    check_positive(arguments, ["blocks"])
    algorithm = arguments.algorithm
    own = {"scan": 4, "two_level": grid.intra}.get(algorithm, 1)  # where nobody says
    if arguments.blocks and algorithm not in ("scan", "two_level"):
        raise ValueError(
            f"--blocks: {algorithm} sends states whole; leave it out, or take --algorithm scan or "
            "two_level"
        )
    bounds = inputs.bounds_of(arguments.lengths, seq_len)
    layout, text = inputs.layout_of(arguments, arguments.layout, grid, bounds)
    layout.check(seq_len)
    chain = chains(layout, seq_len, bounds)
    if len(chain) > PIECES:
        raise ValueError(
            f"a picture shows at most {PIECES} pieces, these documents have {len(chain)}: take "
            "fewer ranks or documents"
        )
    blocks = arguments.blocks or own
    turned = chain.backward() if arguments.backward else chain
    hops = SCANS[algorithm](Task(turned, Topology(grid.size, grid.intra), blocks))
    return ScanScene(algorithm, text, seq_len, grid, turned, hops, blocks, arguments.backward)
