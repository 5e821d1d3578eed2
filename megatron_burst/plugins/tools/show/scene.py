# SPDX-License-Identifier: Apache-2.0
"""The content of pictures of masks, layouts and schedules, read from those that run.

A scene holds numbers only; `pictures` and `timeline` decide how they look. Of a schedule
this module decides what counts as left out, what a rank holds, and which choices go together; the
schedule comes from `cost`, as that of a plan does.

Shape letters: G ranks, S positions.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ....layout import Layout, Span
from ....masks import Cover, Mask
from ....schedule import cost
from ....schedule.bundles import spans_of
from ....schedule.demand import Visibility, all_visible, visibility_of
from ....schedule.dry_run import dry_run
from ....schedule.rings import Schedule
from ....schedule.tables import ALL, FAMILIES, Chunk, Grid, Hop, Pair
from . import balance

KINDS = {"kv": "", "query": "", "dkv": "gradient", "dquery": "gradient", "out": "partial output"}
COUNTED = 99  # rows of a chunk up to which a share is told in rows
Kind = tuple[str, str]  # link class, and what a hop carries in the words of `KINDS`


@dataclass(frozen=True)
class Shards:
    """A sequence of `seq_len` positions over ranks, with its mask."""

    mask: Mask
    layout: Layout
    seq_len: int
    mask_text: str  # in titles
    layout_text: str

    @property
    def size(self) -> int:
        return self.layout.cp_size

    @cached_property
    def spans(self) -> list[Sequence[Span]]:
        """What each rank holds."""
        return [self.layout.spans(rank, self.seq_len) for rank in range(self.size)]

    @cached_property
    def wanted(self) -> Visibility:
        """Which pairs of shards see something, and which rows of them."""
        return visibility_of(self.mask, self.spans, self.spans)

    @cached_property
    def pairs(self) -> np.ndarray:
        """int64 [G, G]: the number of visible position pairs of two shards."""
        counts = [[cost.visible_pairs(self.mask, q, k) for k in self.spans] for q in self.spans]
        return np.array(counts, dtype=np.int64)

    @cached_property
    def order(self) -> np.ndarray:
        """int64 [S]: the positions in shard order, rank after rank."""
        parts = [self.layout.positions(rank, self.seq_len) for rank in range(self.size)]
        return np.concatenate(parts)

    @cached_property
    def holders(self) -> np.ndarray:
        """int64 [S]: the rank that holds each position."""
        holders = np.empty(self.seq_len, dtype=np.int64)
        holders[self.order] = np.repeat(np.arange(self.size), self.lengths)
        return holders

    @property
    def lengths(self) -> list[int]:
        """The number of positions that each rank holds."""
        return [sum(span.length for span in of_rank) for of_rank in self.spans]

    @property
    def edges(self) -> np.ndarray:
        """int64 [G + 1]: where each rank begins in shard order, and the end."""
        return np.cumsum([0, *self.lengths])

    @property
    def work(self) -> list[int]:
        return self.pairs.sum(axis=1).tolist()

    @property
    def imbalance(self) -> float:
        return balance.imbalance(self.layout, self.mask, self.seq_len)

    @property
    def spread(self) -> float:
        """The busiest rank's work over the mean, of all steps together."""
        return max(self.work) * self.size / (sum(self.work) or 1)


@dataclass(frozen=True)
class MaskScene:
    """The score matrix, and the rank and step at which the ring `plan` computes each pair."""

    shards: Shards
    plan: Schedule

    @cached_property
    def computers(self) -> np.ndarray:
        """int64 [S, S], global order: the rank that computes each visible pair, else -1."""
        shards, everywhere = self.shards, np.arange(self.shards.seq_len)
        ranks = np.full((shards.size, shards.size), -1)
        pairs = self.plan.tables.pairs
        ranks[pairs.query, pairs.key] = pairs.rank
        of_pair = ranks[np.ix_(shards.holders, shards.holders)]
        return np.where(shards.mask.visible(everywhere[:, None], everywhere[None, :]), of_pair, -1)

    @cached_property
    def steps(self) -> np.ndarray:
        """int64 [G, G]: the step at which queries of rank i meet keys of rank j; -1 if skipped."""
        steps = np.full((self.shards.size, self.shards.size), -1)
        pairs = self.plan.tables.pairs
        steps[pairs.query, pairs.key] = pairs.step
        return np.where(self.shards.pairs > 0, steps, -1)


@dataclass(frozen=True)
class LayoutScene:
    """Several layouts of one sequence, and the work of each rank under a mask."""

    rows: tuple[Shards, ...]

    @cached_property
    def best(self) -> str | None:
        """The layout with the least imbalance; zigzag, Megatron's own, among equals. None for a
        single layout, and without a mask.
        """
        if len(self.rows) == 1 or not self.rows[0].mask_text:
            return None
        # Differences of rounding are no reason to leave Megatron's own layout.
        rows = sorted(self.rows, key=lambda each: each.layout_text != "zigzag")
        return min(rows, key=lambda each: round(each.spread, 3)).layout_text


class Cell(NamedTuple):
    """One of the pairs that a rank computes at a step."""

    pair: Pair
    cover: Cover  # of its rows, by the visible position pairs
    share: float  # of the position pairs of the busiest (rank, step)


class Total(NamedTuple):
    """Hops of one kind over all ranks: those made, and those if every rank saw everything."""

    hops: int = 0
    bytes: int = 0
    hops_of_all: int = 0
    bytes_of_all: int = 0


@dataclass(frozen=True)
class ScheduleScene:
    """One pass, from boundary to boundary."""

    shards: Shards
    plan: Schedule
    sizes: cost.Sizes
    backward: bool
    only: int | None = None  # the rank that is drawn; None: all of them

    @property
    def size(self) -> int:
        return self.plan.grid.size

    @property
    def ranks(self) -> Sequence[int]:
        """Those that are drawn."""
        return range(self.size) if self.only is None else [self.only]

    @cached_property
    def steps(self) -> int:
        """How many there are before the draining."""
        return max(self.plan.tables.steps, int(self.plan.tables.pairs.step.max(initial=-1)) + 1)

    @cached_property
    def end(self) -> int:
        """The boundary by which the last hop has landed and the last pair is computed."""
        return max([self.steps, *(hop.land for hop in self.hops)])

    # --- what is computed ------------------------------------------------------------------

    def owner(self, rank: int, pair: Pair) -> int:
        """Whose chunk `rank` had to be sent for this pair; of two, the keys'."""
        return pair.key if pair.key != rank else pair.query

    def cells(self, rank: int, step: int) -> list[Cell]:
        """What `rank` computes at `step`; nothing if it waits."""
        return self._cells.get((rank, step), [])

    def most(self, rank: int) -> int:
        """How many pairs `rank` computes at one step, at most."""
        return max((len(self.cells(rank, step)) for step in range(self.steps)), default=0)

    @cached_property
    def _counts(self) -> list[tuple[int, int, Pair, int]]:
        """Rank, step, pair, and how many visible position pairs it has."""
        columns = (column.tolist() for column in self.plan.tables.pairs)
        rows = [(rank, step, Pair(*pair)) for rank, step, *pair in zip(*columns, strict=True)]
        return [(rank, step, pair, self._visible(pair)) for rank, step, pair in rows]

    @cached_property
    def _cells(self) -> dict[tuple[int, int], list[Cell]]:
        most, cells = max(int(self._work.max()), 1), defaultdict(list)
        for rank, step, pair, count in self._counts:
            cells[rank, step].append(Cell(pair, self._cover(pair, count), count / most))
        return dict(cells)

    def _visible(self, pair: Pair) -> int:
        """The number of visible position pairs of its rows."""
        query, key, *rows = pair
        if rows == [ALL, ALL]:
            return int(self.shards.pairs[query, key])
        tables, spans = self.plan.tables, self.shards.spans
        queries = spans_of(tables.queries.ranges(query, rows[0]), spans[query])
        keys = spans_of(tables.keys.ranges(key, rows[1]), spans[key])
        return cost.visible_pairs(self.shards.mask, queries, keys)

    def _cover(self, pair: Pair, count: int) -> Cover:
        rows = self.rows(Chunk("query", *pair[::2]))[0] * self.rows(Chunk("kv", *pair[1::2]))[0]
        return Cover.EMPTY if not count else Cover.FULL if count == rows else Cover.PARTIAL

    # --- what travels ----------------------------------------------------------------------

    def rows(self, chunk: Chunk) -> tuple[int, int]:
        """How many rows of how many of its owner's."""
        bundles, owner = self.plan.tables.bundles(chunk.family), np.array([chunk.owner] * 2)
        rows, of = bundles.rows_of(owner, np.array([chunk.rows, ALL])).tolist()
        return rows, of

    def parts(self, pair: Pair) -> list[str]:
        """The shares of its chunks that take part; nothing for whole ones."""
        chunks = Chunk("query", *pair[::2]), Chunk("kv", *pair[1::2])
        return [part for part in (share(*self.rows(chunk)) for chunk in chunks) if part]

    def partial(self, chunk: Chunk) -> bool:
        """Are there rows of its owner's that it lacks?"""
        rows, of = self.rows(chunk)
        return rows < of

    def ranges(self, chunk: Chunk) -> list[tuple[int, int]]:
        """Its rows as (first, stop) in its owner's shard, in their order there."""
        return sorted(self.plan.tables.bundles(chunk.family).ranges(chunk.owner, chunk.rows))

    def bytes(self, chunk: Chunk) -> int:
        """Bytes of one message."""
        return self.rows(chunk)[0] * getattr(self.plan.row_bytes, chunk.family)

    @cached_property
    def hops(self) -> list[Hop]:
        return list(self.plan.tables.transfers.hops(self.plan.grid))

    @cached_property
    def families(self) -> list[str]:
        """Those that travel, also where everything is visible."""
        travelling = {hop.chunk.family for hop in [*self.hops, *self._full.hops]}
        return [family for family in FAMILIES if family in travelling]

    @cached_property
    def _full(self) -> ScheduleScene:
        """The same pass where every rank sees everything."""
        rows = all_visible(self.size, self.shards.lengths[0])
        return replace(self, plan=replace(self.plan, visibility=rows))

    @cached_property
    def left_out(self) -> list[Hop]:
        """The hops that the schedule would also make if every pair of shards were visible.

        None where the rows that are seen let the algorithm take other ways: no hop is then the same
        hop with fewer rows.
        """
        made = {_way(hop) for hop in self.hops}
        missing = [hop for hop in self._full.hops if _way(hop) not in made]
        return missing if len(missing) + len(made) == len(self._full.hops) else []

    @property
    def totals(self) -> dict[Kind, Total]:
        """The hops and bytes by link class and by what they carry."""
        sums: dict[Kind, Counter[str]] = defaultdict(Counter)
        for scene, of in ((self, ""), (self._full, "_of_all")):
            for hop in scene.hops:
                sums[kind_of(hop)].update({f"hops{of}": 1, f"bytes{of}": scene.bytes(hop.chunk)})
        return {kind: Total(**sums[kind]) for kind in sorted(sums, key=in_order)}

    @property
    def once_per_node(self) -> int:
        """Bytes between nodes if each row, and each row of its gradient, crosses once for every
        other node whose ranks want it.
        """
        bundles, grid = self.plan.travelling, self.plan.grid
        nodes = np.logical_or.reduce(bundles.users.reshape(-1, *grid), axis=2)
        nodes[np.arange(len(nodes)), bundles.owner // grid.intra] = False
        side, each = self.plan.side, self.plan.row_bytes
        row = getattr(each, side) + getattr(each, "d" + side)
        return int((nodes.sum(axis=1) * bundles.rows).sum()) * row

    def released(self, rank: int) -> dict[int, list[Chunk]]:
        """Boundary: chunks of others that `rank` has no more use for."""
        return {b.index: list(b.release) for b in self.plan.program(rank) if b.release}

    @cached_property
    def held(self) -> int:
        """Bytes of received chunks that a rank holds at most."""
        each = self.plan.row_bytes
        return max(
            rows.get("kv", 0) * each.kv + rows.get("query", 0) * each.query
            for rank in range(self.size)
            for rows in dry_run(self.plan, rank).in_use
        )

    # --- work ------------------------------------------------------------------------------

    @property
    def computed(self) -> int:
        """The number of the G x G pairs of shards with a visible position pair."""
        return int((self.shards.pairs > 0).sum())

    @cached_property
    def _work(self) -> np.ndarray:
        """int64 [steps, G]: visible position pairs."""
        work = np.zeros((self.steps, self.size), dtype=np.int64)
        for rank, step, _, count in self._counts:
            work[step, rank] += count
        return work

    @property
    def work(self) -> list[int]:
        """Visible pairs that each rank computes."""
        return self._work.sum(axis=0).tolist()

    @property
    def imbalance(self) -> float:
        """As `balance.imbalance`, over the steps of this schedule."""
        total = int(self._work.sum())
        return int(self._work.max(axis=1).sum()) * self.size / total if total else 1.0


def runs_of(values: np.ndarray) -> list[tuple[int, int, int]]:
    """Return (first, stop, value) of each run of one value."""
    edges = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
    return [(a, b, int(values[a])) for a, b in pairwise(edges)]


def share(rows: int, of: int) -> str:
    """Which part of a chunk so many rows are; nothing for all of it."""
    if rows == of:
        return ""
    return f"{rows}/{of}" if of <= COUNTED else f"{rows / of:.0%}"


def kind_of(hop: Hop) -> Kind:
    """Its link class and what it carries."""
    return hop.link, KINDS[hop.chunk.family]


def in_order(kind: Kind) -> tuple[str, bool]:
    """The key by which kinds of hops are sorted."""
    return kind[1], kind[0] != "intra"


def _way(hop: Hop) -> tuple[str, int, int, int, int]:
    return *hop.chunk[:2], hop.src, hop.dst, hop.post


def schedule_scene(
    shards: Shards,
    grid: Grid,
    sizes: cost.Sizes,
    algorithm: str = "burst",
    *,
    backward: bool = False,
    side: str = "auto",
    route: str = "auto",
    only: int | None = None,
) -> ScheduleScene:
    """The scene of one pass; "auto" is resolved by bytes, as for a plan. Raises ValueError for
    choices that do not go together.
    """
    if only is not None and not 0 <= only < grid.size:
        raise ValueError(f"--rank must be in 0..{grid.size - 1}, got {only}")
    if not backward and side != "auto":
        raise ValueError("--side applies to backward; add --backward")
    call = algorithm, grid, shards.wanted, sizes
    if backward:
        plan = cost.backward_schedule(*call, side=side, route=route)
    else:
        plan = cost.forward_schedule(*call, route=route)
    return ScheduleScene(shards, plan, sizes, backward, only)
