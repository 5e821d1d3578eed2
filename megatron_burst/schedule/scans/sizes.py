# SPDX-License-Identifier: Apache-2.0
"""Bytes of a scan: sizes of states, maps and hops, and the bytes that each rank sends.

Sizes are plain numbers, so no torch is needed. A block of a map has the bytes of a block of the
state, plus the part of the transition that the block needs.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from ..topology import Topology
from .blocks import StateBlocks, able, cut
from .hops import ALL_BLOCKS, MAP, Hops

Form = Literal["none", "scalar", "vector", "matrix"]


class ScanSizes(NamedTuple):
    """Sizes of the states of a scan, [batch, heads, rows, columns].

    Attributes:
        batch: Batch size.
        heads: Number of heads.
        rows: Number of rows of a state: the key width.
        columns: Number of columns of a state: the value width.
        form: Form of the transitions: "none" (a state is unchanged), "scalar" (a factor per head),
            "vector" (a factor per row) or "matrix" (rows x rows, which mixes rows).
        itemsize: Bytes per element.
    """

    batch: int
    heads: int
    rows: int
    columns: int
    form: Form = "none"
    itemsize: int = 4

    @property
    def state(self) -> int:
        """Bytes of a state."""
        return self.batch * self.heads * self.rows * self.columns * self.itemsize

    @property
    def transition(self) -> int:
        """Bytes of a transition, the factor A by which a piece multiplies a state."""
        return self._transition(self.heads, self.rows)

    @property
    def map(self) -> int:
        """Bytes of a map: a transition and a summand with the size of a state."""
        return self.state + self.transition

    def _transition(self, heads: int, rows: int) -> int:
        elements = {"none": 0, "scalar": 1, "vector": rows, "matrix": self.rows * self.rows}[
            self.form
        ]
        return self.batch * heads * elements * self.itemsize

    def cut(self, blocks: int) -> StateBlocks:
        """Return the division of a state into `blocks` equal blocks, or raise ValueError."""
        return cut(blocks, self.heads, self.rows, self.columns, self.form == "matrix")

    def numbers(self, most: int) -> list[int]:
        """Return all numbers of blocks up to `most` into which a state can be cut."""
        return able(most, self.heads, self.rows, self.columns, self.form == "matrix")

    def of(self, hops: Hops, blocks: int) -> np.ndarray:
        """Return the bytes of each hop, int64 [hops]; a state has `blocks` blocks."""
        heads, rows, _ = self.cut(blocks).shape
        all_blocks = hops.block == ALL_BLOCKS
        state = np.where(all_blocks, self.state, self.state // blocks)
        transition = np.where(all_blocks, self.transition, self._transition(heads, rows))
        return state + np.where(hops.kind == MAP, transition, 0)

    def sent(self, hops: Hops, blocks: int, topology: Topology) -> np.ndarray:
        """Return the bytes that each rank sends within its node and to other nodes.

        Args:
            hops: Hops of the scan.
            blocks: Number of blocks of a state.
            topology: Placement of the ranks.

        Returns:
            int64 [ranks, 2].
        """
        nodes = topology.per_node
        far = hops.source // nodes != hops.destination // nodes
        hop_bytes = self.of(hops, blocks)
        sent = [
            np.bincount(hops.source[link], hop_bytes[link], topology.size) for link in (~far, far)
        ]
        return np.stack(sent, axis=1).astype(np.int64)
