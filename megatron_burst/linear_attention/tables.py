"""What is made of layouts, documents and algorithms, once per grid: chains, programs, windows.

It lies in the cache that `Groups` carries and has its lifetime. Decides how much of it is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch

from ..comm.groups import Groups
from ..comm.rows import Paths, paths
from ..layout.chains import Chains, chains
from ..layout.layouts import Layout
from ..layout.routes import preceding_and_most
from ..layout.sharding import to_device
from ..schedule.scans import SCANS
from ..schedule.scans.blocks import Blocks
from ..schedule.scans.choice import Choice, blocks_for, choose, links_of
from ..schedule.scans.hops import Hops, Task
from ..schedule.scans.sizes import Sizes
from .program import Program, program

KEPT = 32  # of all kinds together: layers of a few kinds, documents of a few micro-batches


class Sequence(NamedTuple):
    """What chains are made of; bounds: of the documents, None for one."""

    layout: Layout
    seq_len: int
    bounds: tuple[int, ...] | None


class Directions(NamedTuple):
    """Of an algorithm: tables of all ranks, and this rank's part of them, there and back."""

    hops: tuple[Hops, Hops]
    programs: tuple[Program, Program]

    @property
    def digest(self) -> int:
        """Of the tables: ranks that make others would exchange the wrong states."""
        found = 0
        for hops in self.hops:
            for column in hops:
                found = crc32(np.ascontiguousarray(column).tobytes(), found)
        return found


class Window(NamedTuple):
    """How the rows before each piece come to it: paths, for x [s, ...]; order: of the rows of x
    and of what came, one behind the other, so that each piece follows the rows before it; ends:
    those of the windows that end at a row of x, in the order of its rows, counted by their first
    row. longest: rows of the longest message between any two ranks."""

    paths: Paths
    order: torch.Tensor
    ends: torch.Tensor
    longest: int


def chains_of(groups: Groups, sequence: Sequence) -> Chains:
    """The chains of a sequence; ValueError as of `layout.chains`."""
    make: Callable[[], Chains] = lambda: chains(*sequence)  # noqa: E731
    return _kept(groups, ("chains", sequence), make)


def directions(groups: Groups, sequence: Sequence, algorithm: str, blocks: Blocks) -> Directions:
    """The tables of an algorithm for a sequence, with states in these blocks."""

    def make() -> Directions:
        there = chains_of(groups, sequence)
        both = there, there.backward()
        tables = [SCANS[algorithm](Task(one, groups.topology, blocks.number)) for one in both]
        programs = [
            program(hops, one, groups.rank, blocks) for hops, one in zip(tables, both, strict=True)
        ]
        return Directions((tables[0], tables[1]), (programs[0], programs[1]))

    return _kept(groups, ("directions", sequence, algorithm, blocks), make)


def choice_of(
    groups: Groups, sequence: Sequence, sizes: Sizes, algorithm: str, rates: Any
) -> Choice | int:
    """For algorithm "auto" the one predicted to be fastest at these rates, nominal ones if None;
    for another the number of its blocks."""

    def make() -> Choice | int:
        given = chains_of(groups, sequence), groups.topology, sizes, links_of(rates)
        return choose(*given) if algorithm == "auto" else blocks_for(algorithm, *given)

    return _kept(groups, ("choice", sequence, sizes, algorithm, rates), make)


def window(groups: Groups, sequence: Sequence, width: int, device: torch.device) -> Window:
    """The window of `width` rows that ends at each row."""

    def make() -> Window:
        found, me = chains_of(groups, sequence), groups.rank
        order, ends = _around(found.table[found.of(me)], width - 1)
        there = to_device(order, device), to_device(ends, device)
        route, most = preceding_and_most(found, width, me)
        return Window(paths(route, device), *there, most)

    return _kept(groups, ("window", sequence, width, device), make)


def _around(pieces: np.ndarray, back: int) -> tuple[np.ndarray, np.ndarray]:
    """`order` and `ends` of a `Window`, for pieces in the order of rows."""
    first, length = pieces[:, 1], pieces[:, 2]
    rows, nth = int(length.sum()), np.arange(len(pieces))
    before = rows + nth[:, None] * back + np.arange(back)
    order = [part for i in nth for part in (before[i], np.arange(first[i], first[i] + length[i]))]
    ends = [np.arange(f, f + n) + i * back for i, (f, n) in enumerate(pieces[:, 1:3].tolist())]
    return _joined(order), _joined(ends)


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts])


def _kept(groups: Groups, key: Any, make: Callable[[], Any]) -> Any:
    """What was made for `key`; what was not asked for the longest makes room for new things."""
    found: dict[Any, Any] = groups.cache.setdefault("linear", {})
    value = found.pop(key) if key in found else make()
    while len(found) >= KEPT:
        del found[next(iter(found))]
    found[key] = value
    return value
