# SPDX-License-Identifier: Apache-2.0
"""The placement of the ranks of a grid: the node, ring and ulysses group of each rank.

The placement is arithmetic on rank numbers. `comm.groups` makes process groups from it, and `cost`
counts bytes with it. Source: LoongTrain, section 4.2 (2D attention) and section 4.4 (placements).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Placement = Literal["head_first", "context_first"]
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)


@dataclass(frozen=True)
class Topology:
    """Placement of the ranks 0 to size - 1, with `per_node` consecutive ranks on each node.

    Attributes:
        size: Number of ranks.
        per_node: Number of ranks on each node.
        ulysses: Number of ranks in a ulysses group. The ranks of a group exchange rows for heads. 1
            if ranks do not share heads.
        placement: "head_first" puts neighbouring ranks into one ulysses group, which keeps the
            all-to-all within a node. "context_first" puts neighbouring ranks into one ring.

    Raises:
        ValueError: `per_node` or `ulysses` does not divide `size`, or the nodes of a ring would
            hold unequal numbers of ranks. The message lists the sizes that work.
    """

    size: int
    per_node: int
    ulysses: int = 1
    placement: str = "head_first"

    def __post_init__(self):
        for name, value in (
            ("intra", self.per_node),
            ("ulysses", self.ulysses),
            ("ranks", self.size),
        ):
            check_integer(name, value)
        if self.size < 1:
            raise ValueError(f"ranks: a grid needs at least one rank, got {self.size}")
        sizes = alternatives(divisors(self.size))
        if self.per_node < 1 or self.size % self.per_node:
            raise ValueError(
                f"intra: {self.size} ranks cannot be cut into nodes of {self.per_node}; use {sizes}"
            )
        if self.ulysses < 1 or self.size % self.ulysses:
            raise ValueError(
                f"ulysses: {self.ulysses} must divide the {self.size} ranks; use {sizes}"
            )
        if self.placement not in PLACEMENTS:
            raise ValueError(
                f"placement must be one of {', '.join(PLACEMENTS)}, got {self.placement!r}"
            )
        if not self.fits(self.ulysses):
            raise ValueError(
                f"placement: {self.placement} with ulysses={self.ulysses} gives a ring whose nodes "
                f"hold unequal numbers of ranks (its ranks are on nodes {self._nodes_of_ring(0)}); "
                f"choose ulysses so that it divides, or is a multiple of, the {self.per_node} "
                f"ranks per node; use ulysses={alternatives(self.ulysses_that_fit)}"
            )

    @classmethod
    def of_nodes(
        cls, inter: int, intra: int, ulysses: int = 1, placement: str = "head_first"
    ) -> Topology:
        """Return the topology of `inter` nodes with `intra` ranks each.

        Raises:
            ValueError: A size is not a positive integer. The message names the argument.
        """
        for name, value in (("inter", inter), ("intra", intra)):
            check_integer(name, value)
            if value < 1:
                raise ValueError(f"{name}: a grid needs at least one rank, got {name}={value}")
        return cls(inter * intra, intra, ulysses, placement)

    def fits(self, ulysses: int) -> bool:
        """Return True if groups of `ulysses` ranks give each node of a ring equally many ranks."""
        if self.placement == "head_first":
            rings = [range(first, self.size, ulysses) for first in range(ulysses)]
        else:
            width = self.size // ulysses
            rings = [range(first, first + width) for first in range(0, self.size, width)]
        return all(_even([rank // self.per_node for rank in ring]) for ring in rings)

    @property
    def ulysses_that_fit(self) -> list[int]:
        """All values of `ulysses` that these ranks, nodes and placement allow."""
        return [size for size in divisors(self.size) if self.fits(size)]

    @property
    def ring_size(self) -> int:
        """Number of ranks of a ring."""
        return self.size // self.ulysses

    def place(self, rank: int) -> tuple[int, int]:
        """Return a rank's index in its ulysses group and its index in its ring."""
        if self.placement == "head_first":
            ring, index = divmod(rank, self.ulysses)
        else:
            index, ring = divmod(rank, self.ring_size)
        return index, ring

    def rank_at(self, index: int, ring: int) -> int:
        """Return the rank at an index in its ulysses group and an index in its ring.

        This is the inverse of `place`.
        """
        if self.placement == "head_first":
            return ring * self.ulysses + index
        return index * self.ring_size + ring

    def ring(self, rank: int) -> list[int]:
        """Return the ranks of the ring that contains `rank`, in ring order."""
        index, _ = self.place(rank)
        return [self.rank_at(index, ring) for ring in range(self.ring_size)]

    def ulysses_group(self, rank: int) -> list[int]:
        """Return the ranks of the ulysses group that contains `rank`, in order."""
        _, ring = self.place(rank)
        return [self.rank_at(index, ring) for index in range(self.ulysses)]

    def ulysses_pairs(self) -> dict[str, int]:
        """Return the number of ordered pairs of ranks in a ulysses group, by link class."""
        ranks = range(self.size)
        per_node = Counter((self.place(rank)[1], rank // self.per_node) for rank in ranks)
        intra = sum(members * (members - 1) for members in per_node.values())
        return {"intra": intra, "inter": self.size * (self.ulysses - 1) - intra}

    @property
    def intra_size(self) -> int:
        """Number of ranks of a ring on each of its nodes."""
        nodes = self._nodes_of_ring(0)
        return nodes.count(nodes[0])

    @property
    def inter_size(self) -> int:
        """Number of nodes of a ring."""
        return self.ring_size // self.intra_size

    def link(self, src: int, dst: int) -> str:
        """Return the link class between two ranks: "intra" within a node, else "inter"."""
        return "intra" if src // self.per_node == dst // self.per_node else "inter"

    def _nodes_of_ring(self, rank: int) -> list[int]:
        return [r // self.per_node for r in self.ring(rank)]


def _even(nodes: list[int]) -> bool:
    """Return True if equal nodes are adjacent and each node is listed equally often."""
    width = nodes.count(nodes[0])
    return len(nodes) % width == 0 and nodes == [n for n in nodes[::width] for _ in range(width)]


def divisors(number: int) -> list[int]:
    """Return all divisors of a positive number, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]


def alternatives(numbers: Sequence[object]) -> str:
    """Return the numbers as a text such as "1, 2 or 4"."""
    *first, last = map(str, numbers)
    return f"{', '.join(first)} or {last}" if first else last


def check_integer(name: str, value: object) -> None:
    """Raise ValueError unless `value` is an int and not a bool."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name} must be an integer, got {value!r}")
