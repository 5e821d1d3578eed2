# SPDX-License-Identifier: Apache-2.0
"""Content of pictures of masks, layouts and schedules.

A scene contains data only; `pictures` and `timeline` draw it. `cost` creates the schedules, as for
plans. Scenes also compute which hops a schedule omits, and how many bytes of chunks a rank holds.

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
COUNTED = 99  # up to this number of rows, a part of a chunk is written as 4/8, otherwise in percent
Kind = tuple[str, str]  # (link class, content of a hop from `KINDS`)


@dataclass(frozen=True)
class Shards:
    """Sequence of `seq_len` positions that is divided among ranks, with mask and descriptions."""

    mask: Mask
    layout: Layout
    seq_len: int
    mask_text: str
    layout_text: str

    @property
    def size(self) -> int:
        return self.layout.cp_size

    @cached_property
    def spans(self) -> list[Sequence[Span]]:
        """Spans of positions that each rank holds."""
        return [self.layout.spans(rank, self.seq_len) for rank in range(self.size)]

    @cached_property
    def visibility(self) -> Visibility:
        """Pairs of shards with visible position pairs, and the rows that are visible."""
        return visibility_of(self.mask, self.spans, self.spans)

    @cached_property
    def pairs(self) -> np.ndarray:
        """Visible position pairs of queries of shard i and keys of shard j, int64 [G, G]."""
        counts = [[cost.visible_pairs(self.mask, q, k) for k in self.spans] for q in self.spans]
        return np.array(counts, dtype=np.int64)

    @cached_property
    def order(self) -> np.ndarray:
        """Positions in shard order, rank after rank, int64 [S]."""
        parts = [self.layout.positions(rank, self.seq_len) for rank in range(self.size)]
        return np.concatenate(parts)

    @cached_property
    def holders(self) -> np.ndarray:
        """Rank that holds each position, int64 [S]."""
        holders = np.empty(self.seq_len, dtype=np.int64)
        holders[self.order] = np.repeat(np.arange(self.size), self.lengths)
        return holders

    @property
    def lengths(self) -> list[int]:
        """Number of positions of each rank."""
        return [sum(span.length for span in of_rank) for of_rank in self.spans]

    @property
    def edges(self) -> np.ndarray:
        """Cumulative numbers of positions of ranks, int64 [G + 1]."""
        return np.cumsum([0, *self.lengths])

    @property
    def work(self) -> list[int]:
        return self.pairs.sum(axis=1).tolist()

    @property
    def imbalance(self) -> float:
        return balance.imbalance(self.layout, self.mask, self.seq_len)

    @property
    def spread(self) -> float:
        """Work of the busiest rank divided by the mean, for the sum over all steps."""
        return max(self.work) * self.size / (sum(self.work) or 1)


@dataclass(frozen=True)
class MaskScene:
    """Score matrix, with the rank and step at which the ring `plan` computes each pair."""

    shards: Shards
    plan: Schedule

    @cached_property
    def computers(self) -> np.ndarray:
        """Rank that computes each pair, in global order; -1 if not visible; int64 [S, S]."""
        shards, positions = self.shards, np.arange(self.shards.seq_len)
        ranks = np.full((shards.size, shards.size), -1)
        pairs = self.plan.tables.pairs
        ranks[pairs.query, pairs.key] = pairs.rank
        of_pair = ranks[np.ix_(shards.holders, shards.holders)]
        return np.where(shards.mask.visible(positions[:, None], positions[None, :]), of_pair, -1)

    @cached_property
    def steps(self) -> np.ndarray:
        """Step of queries of rank i with keys of rank j; -1 if skipped; int64 [G, G]."""
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
        """Layout with the least imbalance; zigzag (Megatron's) if it is among the best.

        None for a single layout, and without a mask.
        """
        if len(self.rows) == 1 or not self.rows[0].mask_text:
            return None
        # Round, so that a tiny difference does not exclude zigzag.
        rows = sorted(self.rows, key=lambda shards: shards.layout_text != "zigzag")
        return min(rows, key=lambda shards: round(shards.spread, 3)).layout_text


class Cell(NamedTuple):
    """Pair of chunks that a rank computes at a step.

    Attributes:
        pair: Chunk of queries and chunk of keys.
        cover: Whether all, some or none of the position pairs are visible.
        share: Visible position pairs divided by the largest number of any rank and step.
    """

    pair: Pair
    cover: Cover
    share: float


class Total(NamedTuple):
    """Hops and bytes of one kind over all ranks; `*_of_all` if all position pairs were visible."""

    hops: int = 0
    bytes: int = 0
    hops_of_all: int = 0
    bytes_of_all: int = 0


@dataclass(frozen=True)
class ScheduleScene:
    """Schedule of forward or backward; `only` is the rank to draw, None for all ranks."""

    shards: Shards
    plan: Schedule
    sizes: cost.Sizes
    backward: bool
    only: int | None = None

    @property
    def size(self) -> int:
        return self.plan.grid.size

    @property
    def ranks(self) -> Sequence[int]:
        """Ranks that are drawn."""
        return range(self.size) if self.only is None else [self.only]

    @cached_property
    def steps(self) -> int:
        """Number of steps with compute; remaining transfers may arrive later."""
        return max(self.plan.tables.steps, int(self.plan.tables.pairs.step.max(initial=-1)) + 1)

    @cached_property
    def end(self) -> int:
        """Last boundary, at which all hops have arrived and all pairs are computed."""
        return max([self.steps, *(hop.land for hop in self.hops)])

    # --- computation -----------------------------------------------------------------------

    def owner(self, rank: int, pair: Pair) -> int:
        """Return the owner of a pair's received chunk: of keys if received, else of queries."""
        return pair.key if pair.key != rank else pair.query

    def cells(self, rank: int, step: int) -> list[Cell]:
        """Return the pairs that `rank` computes at `step`; empty if the rank waits."""
        return self._cells.get((rank, step), [])

    def most(self, rank: int) -> int:
        """Return the largest number of pairs that `rank` computes at one step."""
        return max((len(self.cells(rank, step)) for step in range(self.steps)), default=0)

    @cached_property
    def _counts(self) -> list[tuple[int, int, Pair, int]]:
        """(rank, step, pair, number of visible position pairs) for all pairs."""
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
        """Return the number of visible position pairs of the rows of a pair."""
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

    # --- transfers -------------------------------------------------------------------------

    def rows(self, chunk: Chunk) -> tuple[int, int]:
        """Return (rows of a chunk, rows of the shard of the chunk's owner)."""
        bundles, owner = self.plan.tables.bundles(chunk.family), np.array([chunk.owner] * 2)
        rows, of = bundles.rows_of(owner, np.array([chunk.rows, ALL])).tolist()
        return rows, of

    def parts(self, pair: Pair) -> list[str]:
        """Return texts such as "4/8" for chunks of a pair that have only some rows of the shard."""
        chunks = Chunk("query", *pair[::2]), Chunk("kv", *pair[1::2])
        return [part for part in (share(*self.rows(chunk)) for chunk in chunks) if part]

    def partial(self, chunk: Chunk) -> bool:
        """Return whether a chunk has only some rows of the owner's shard."""
        rows, of = self.rows(chunk)
        return rows < of

    def ranges(self, chunk: Chunk) -> list[tuple[int, int]]:
        """Return the rows of a chunk as (first, stop) in its owner's shard, in ascending order."""
        return sorted(self.plan.tables.bundles(chunk.family).ranges(chunk.owner, chunk.rows))

    def bytes(self, chunk: Chunk) -> int:
        """Return the bytes of one message with this chunk."""
        return self.rows(chunk)[0] * getattr(self.plan.row_bytes, chunk.family)

    @cached_property
    def hops(self) -> list[Hop]:
        return list(self.plan.tables.transfers.hops(self.plan.grid))

    @cached_property
    def families(self) -> list[str]:
        """Families of chunks that are sent, or would be sent if all pairs were visible."""
        sent = {hop.chunk.family for hop in [*self.hops, *self._full.hops]}
        return [family for family in FAMILIES if family in sent]

    @cached_property
    def _full(self) -> ScheduleScene:
        """Scene of the same pass with all position pairs visible."""
        rows = all_visible(self.size, self.shards.lengths[0])
        return replace(self, plan=replace(self.plan, visibility=rows))

    @cached_property
    def left_out(self) -> list[Hop]:
        """Hops that the schedule omits because none of their rows are visible.

        Empty if the algorithm chooses other routes for the visible rows. The hops are then not a
        subset of the hops with all pairs visible.
        """
        made = {_way(hop) for hop in self.hops}
        missing = [hop for hop in self._full.hops if _way(hop) not in made]
        return missing if len(missing) + len(made) == len(self._full.hops) else []

    @property
    def totals(self) -> dict[Kind, Total]:
        """(link class, content) -> hops and bytes."""
        sums: dict[Kind, Counter[str]] = defaultdict(Counter)
        for scene, of in ((self, ""), (self._full, "_of_all")):
            for hop in scene.hops:
                sums[kind_of(hop)].update({f"hops{of}": 1, f"bytes{of}": scene.bytes(hop.chunk)})
        return {kind: Total(**sums[kind]) for kind in sorted(sums, key=in_order)}

    @property
    def once_per_node(self) -> int:
        """Bytes between nodes if each row (and gradient) were sent once per node that needs it."""
        bundles, grid = self.plan.travelling, self.plan.grid
        nodes = np.logical_or.reduce(bundles.users.reshape(-1, *grid), axis=2)
        nodes[np.arange(len(nodes)), bundles.owner // grid.intra] = False
        side, row_bytes = self.plan.side, self.plan.row_bytes
        row = getattr(row_bytes, side) + getattr(row_bytes, "d" + side)
        return int((nodes.sum(axis=1) * bundles.rows).sum()) * row

    def released(self, rank: int) -> dict[int, list[Chunk]]:
        """Return boundary -> received chunks that `rank` frees there."""
        return {b.index: list(b.release) for b in self.plan.program(rank) if b.release}

    @cached_property
    def received_bytes(self) -> int:
        """Maximum bytes of received chunks that a rank holds at the same time."""
        row_bytes = self.plan.row_bytes
        return max(
            rows.get("kv", 0) * row_bytes.kv + rows.get("query", 0) * row_bytes.query
            for rank in range(self.size)
            for rows in dry_run(self.plan, rank).in_use
        )

    # --- work ------------------------------------------------------------------------------

    @property
    def computed(self) -> int:
        """Number of shard pairs (of G x G) with visible position pairs."""
        return int((self.shards.pairs > 0).sum())

    @cached_property
    def _work(self) -> np.ndarray:
        """Visible position pairs of each step and rank, int64 [steps, G]."""
        work = np.zeros((self.steps, self.size), dtype=np.int64)
        for rank, step, _, count in self._counts:
            work[step, rank] += count
        return work

    @property
    def work(self) -> list[int]:
        """Number of visible position pairs that each rank computes."""
        return self._work.sum(axis=0).tolist()

    @property
    def imbalance(self) -> float:
        """Imbalance of this schedule, see `balance.imbalance_of`."""
        total = int(self._work.sum())
        return int(self._work.max(axis=1).sum()) * self.size / total if total else 1.0


def runs_of(values: np.ndarray) -> list[tuple[int, int, int]]:
    """Return (first, stop, value) of each range of consecutive equal values."""
    edges = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
    return [(a, b, int(values[a])) for a, b in pairwise(edges)]


def share(rows: int, of: int) -> str:
    """Return the text for `rows` of `of` rows, such as 4/8 or 50%; "" for all rows."""
    if rows == of:
        return ""
    return f"{rows}/{of}" if of <= COUNTED else f"{rows / of:.0%}"


def kind_of(hop: Hop) -> Kind:
    """Return the link class and the content of a hop."""
    return hop.link, KINDS[hop.chunk.family]


def in_order(kind: Kind) -> tuple[str, bool]:
    """Return the sort key by which kinds of hops are listed."""
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
    """Return the scene of forward or backward; "auto" is resolved by bytes, as in a plan.

    Args:
        shards: Sequence, mask and layout.
        grid: Number of nodes and of ranks per node.
        sizes: Sizes of the attention call.
        algorithm: Name of the algorithm.
        backward: Draw backward.
        side: Side of backward, or "auto".
        route: Route of chunks, or "auto".
        only: Rank to draw; None for all ranks.

    Raises:
        ValueError: Options are inconsistent.
    """
    if only is not None and not 0 <= only < grid.size:
        raise ValueError(f"--rank must be in 0..{grid.size - 1}, got {only}")
    if not backward and side != "auto":
        raise ValueError("--side applies to backward; add --backward")
    call = algorithm, grid, shards.visibility, sizes
    if backward:
        plan = cost.backward_schedule(*call, side=side, route=route)
    else:
        plan = cost.forward_schedule(*call, route=route)
    return ScheduleScene(shards, plan, sizes, backward, only)
