# SPDX-License-Identifier: Apache-2.0
"""Content of pictures of masks, layouts and schedules.

A scene contains only data; `pictures` and `timeline` draw it. `cost` creates the schedules, as for
plans. Scenes also compute the hops (transfers) that a schedule omits, and the bytes of received
chunks that a rank holds. A chunk is some rows of the tensors of one rank, sent as a unit.

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

from ....layout import Layout, Span, Spans
from ....masks import Compressed, Cover, Full, Mask
from ....schedule import cost
from ....schedule.bundles import spans_of
from ....schedule.demand import Visibility, visibility_of
from ....schedule.dry_run import dry_run
from ....schedule.rings import Schedule
from ....schedule.tables import ALL, FAMILIES, Chunk, Grid, Hop, Pair
from . import balance

KINDS = {"kv": "", "query": "", "dkv": "gradient", "dquery": "gradient", "out": "partial output"}
COUNTED = 99  # a part of a shard is written as 4/8 up to this number of rows, then in percent
Kind = tuple[str, str]  # (link class, content of a hop from `KINDS`)


@dataclass(frozen=True)
class Shards:
    """Sequence with its mask, divided by a layout into shards, one per rank.

    Attributes:
        mask: Mask of the sequence.
        layout: Layout of the sequence.
        seq_len: Number of positions.
        mask_text: Description of the mask; "" if there is none.
        layout_text: Description of the layout.
    """

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
        """Spans of positions, for each rank."""
        return [self.layout.spans(rank, self.seq_len) for rank in range(self.size)]

    @property
    def key_len(self) -> int:
        """Number of keys. It is smaller than `seq_len` with a mask of compressed keys."""
        if isinstance(self.mask, Compressed):
            return int(self.mask.windows(self.seq_len))
        return self.seq_len

    @cached_property
    def key_spans(self) -> list[Sequence[Span]]:
        """Spans of keys, for each rank. The layout also divides compressed keys."""
        return [self.layout.spans(rank, self.key_len) for rank in range(self.size)]

    @cached_property
    def visibility(self) -> Visibility:
        """Pairs of ranks whose shards attend to each other, and the rows that are needed for it."""
        return visibility_of(self.mask, self.spans, self.key_spans)

    @cached_property
    def pairs(self) -> np.ndarray:
        """Number of visible pairs of queries on rank i (rows) and keys on rank j (columns).

        int64 [G, G].
        """
        keys = self.key_spans
        counts = [[cost.visible_pairs(self.mask, q, k) for k in keys] for q in self.spans]
        return np.array(counts, dtype=np.int64)

    @cached_property
    def order(self) -> np.ndarray:
        """Positions of rank 0, then positions of rank 1, and so on, int64 [S]."""
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
        """Cumulative number of positions of ranks 0, 1, ..., int64 [G + 1], starting with 0."""
        return np.cumsum([0, *self.lengths])

    @property
    def work(self) -> list[int]:
        return self.pairs.sum(axis=1).tolist()

    @property
    def imbalance(self) -> float:
        return balance.imbalance(self.layout, self.mask, self.seq_len)

    @property
    def spread(self) -> float:
        """Total work of the busiest rank, divided by the mean over ranks."""
        return max(self.work) * self.size / (sum(self.work) or 1)


@dataclass(frozen=True)
class MaskScene:
    """Content of a picture of a mask: rank and step in which each (query, key) pair is computed.

    `plan` is the schedule of a ring over all ranks.
    """

    shards: Shards
    plan: Schedule

    @cached_property
    def computers(self) -> np.ndarray:
        """Rank that computes each (query position, key position) pair, int64 [S, S].

        -1 for invisible pairs.
        """
        shards, positions = self.shards, np.arange(self.shards.seq_len)
        ranks = np.full((shards.size, shards.size), -1)
        pairs = self.plan.tables.pairs
        ranks[pairs.query, pairs.key] = pairs.rank
        of_pair = ranks[np.ix_(shards.holders, shards.holders)]
        return np.where(shards.mask.visible(positions[:, None], positions[None, :]), of_pair, -1)

    @cached_property
    def steps(self) -> np.ndarray:
        """Step in which queries on rank i (rows) attend to keys on rank j (columns), int64 [G, G].

        -1 if no pair is visible; the step is then skipped.
        """
        steps = np.full((self.shards.size, self.shards.size), -1)
        pairs = self.plan.tables.pairs
        steps[pairs.query, pairs.key] = pairs.step
        return np.where(self.shards.pairs > 0, steps, -1)


@dataclass(frozen=True)
class LayoutScene:
    """Content of a picture of layouts of one sequence: `rows` has the shards of each layout."""

    rows: tuple[Shards, ...]

    @cached_property
    def best(self) -> str | None:
        """Layout with the least imbalance; None if there is only one layout or no mask.

        If zigzag (Megatron's layout) is one of several best layouts, it is returned.
        """
        if len(self.rows) == 1 or not self.rows[0].mask_text:
            return None
        # Round, so that a tiny difference does not exclude zigzag.
        rows = sorted(self.rows, key=lambda shards: shards.layout_text != "zigzag")
        return min(rows, key=lambda shards: round(shards.spread, 3)).layout_text


class Cell(NamedTuple):
    """Pair of chunks (rows of one rank) that a rank computes in a step.

    Attributes:
        pair: Chunk of queries and chunk of keys.
        cover: FULL, PARTIAL or EMPTY: all, some or no (query, key) pairs are visible.
        share: Number of visible pairs, divided by the largest number that any rank computes in any
            step.
    """

    pair: Pair
    cover: Cover
    share: float


class Total(NamedTuple):
    """Number and bytes of all transfers (hops) of one kind, over all ranks.

    Attributes:
        hops: Number of transfers with the mask.
        bytes: Bytes of these transfers.
        hops_of_all: Number of transfers if all pairs were visible.
        bytes_of_all: Bytes of these transfers.
    """

    hops: int = 0
    bytes: int = 0
    hops_of_all: int = 0
    bytes_of_all: int = 0


@dataclass(frozen=True)
class ScheduleScene:
    """Content of a picture of a schedule.

    Attributes:
        shards: Sequence, mask and layout.
        plan: The schedule.
        sizes: Sizes of the attention call.
        backward: True for backward, False for forward.
        only: Rank to draw; None for all ranks.
    """

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
        """Ranks that the picture shows."""
        return range(self.size) if self.only is None else [self.only]

    @cached_property
    def steps(self) -> int:
        """Number of steps with compute. Transfers may arrive after the last one."""
        return max(self.plan.tables.steps, int(self.plan.tables.pairs.step.max(initial=-1)) + 1)

    @cached_property
    def end(self) -> int:
        """First step before which all transfers have arrived and all pairs have been computed."""
        return max([self.steps, *(hop.land for hop in self.hops)])

    # --- computation -----------------------------------------------------------------------

    def owner(self, rank: int, pair: Pair) -> int:
        """Return the rank that owns the pair's keys, or its queries if `rank` owns the keys."""
        return pair.key if pair.key != rank else pair.query

    def cells(self, rank: int, step: int) -> list[Cell]:
        """Return the pairs of chunks that `rank` computes in `step`."""
        return self._cells.get((rank, step), [])

    def most(self, rank: int) -> int:
        """Return the largest number of pairs of chunks that `rank` computes in one step."""
        return max((len(self.cells(rank, step)) for step in range(self.steps)), default=0)

    @cached_property
    def _counts(self) -> list[tuple[int, int, Pair, int]]:
        """For each pair of chunks: rank, step, the pair, and its number of visible pairs."""
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
        """Return the number of visible pairs in a pair of chunks."""
        query, key, *rows = pair
        if rows == [ALL, ALL]:
            return int(self.shards.pairs[query, key])
        tables, shards = self.plan.tables, self.shards
        queries = spans_of(tables.queries.ranges(query, rows[0]), Spans.of(shards.spans[query]))
        keys = spans_of(tables.keys.ranges(key, rows[1]), Spans.of(shards.key_spans[key]))
        return cost.visible_pairs(self.shards.mask, queries, keys)

    def _cover(self, pair: Pair, count: int) -> Cover:
        rows = self.rows(Chunk("query", *pair[::2]))[0] * self.rows(Chunk("kv", *pair[1::2]))[0]
        return Cover.EMPTY if not count else Cover.FULL if count == rows else Cover.PARTIAL

    # --- transfers -------------------------------------------------------------------------

    def rows(self, chunk: Chunk) -> tuple[int, int]:
        """Return the number of rows of a chunk, and of its owner's whole shard."""
        bundles, owner = self.plan.tables.bundles(chunk.family), np.array([chunk.owner] * 2)
        rows, of = bundles.rows_of(owner, np.array([chunk.rows, ALL])).tolist()
        return rows, of

    def parts(self, pair: Pair) -> list[str]:
        """Return a text such as "4/8" for each chunk of the pair that is not a whole shard.

        "4/8" means 4 of the 8 rows of the owner's shard.
        """
        chunks = Chunk("query", *pair[::2]), Chunk("kv", *pair[1::2])
        return [part for part in (share(*self.rows(chunk)) for chunk in chunks) if part]

    def partial(self, chunk: Chunk) -> bool:
        """Return whether a chunk has only some rows of its owner's shard."""
        rows, of = self.rows(chunk)
        return rows < of

    def ranges(self, chunk: Chunk) -> list[tuple[int, int]]:
        """Return the ranges (first, stop) of a chunk's rows in its owner's shard, ascending."""
        ranges = self.plan.tables.bundles(chunk.family).ranges(chunk.owner, chunk.rows)
        return sorted(map(tuple, ranges.tolist()))

    def bytes(self, chunk: Chunk) -> int:
        """Return the size in bytes of a message that contains this chunk."""
        return self.rows(chunk)[0] * getattr(self.plan.row_bytes, chunk.family)

    @cached_property
    def hops(self) -> list[Hop]:
        return list(self.plan.tables.transfers.hops(self.plan.grid))

    @cached_property
    def families(self) -> list[str]:
        """Kinds of tensors, such as "kv", that ranks send with this mask or with a full mask."""
        sent = {hop.chunk.family for hop in [*self.hops, *self._full.hops]}
        return [family for family in FAMILIES if family in sent]

    @cached_property
    def _full(self) -> ScheduleScene:
        """Scene of the same pass if all pairs were visible."""
        shards = self.shards
        rows = visibility_of(Full(), shards.spans, shards.key_spans)
        return replace(self, plan=replace(self.plan, visibility=rows))

    @cached_property
    def left_out(self) -> list[Hop]:
        """Transfers that the schedule omits because none of their rows are visible.

        Empty if the schedule has transfers that would not exist if all pairs were visible.
        """
        made = {_way(hop) for hop in self.hops}
        missing = [hop for hop in self._full.hops if _way(hop) not in made]
        return missing if len(missing) + len(made) == len(self._full.hops) else []

    @property
    def totals(self) -> dict[Kind, Total]:
        """(link class, kind of content) -> number and bytes of transfers, over all ranks."""
        sums: dict[Kind, Counter[str]] = defaultdict(Counter)
        for scene, of in ((self, ""), (self._full, "_of_all")):
            for hop in scene.hops:
                sums[kind_of(hop)].update({f"hops{of}": 1, f"bytes{of}": scene.bytes(hop.chunk)})
        return {kind: Total(**sums[kind]) for kind in sorted(sums, key=in_order)}

    @property
    def once_per_node(self) -> int:
        """Bytes sent between nodes if each row were sent once to every node that needs it.

        In backward the gradient of the row is included.
        """
        bundles, grid = self.plan.travelling, self.plan.grid
        nodes = np.logical_or.reduce(bundles.users.reshape(-1, *grid), axis=2)
        nodes[np.arange(len(nodes)), bundles.owner // grid.intra] = False
        side, row_bytes = self.plan.side, self.plan.row_bytes
        row = getattr(row_bytes, side) + getattr(row_bytes, "d" + side)
        return int((nodes.sum(axis=1) * bundles.rows).sum()) * row

    def released(self, rank: int) -> dict[int, list[Chunk]]:
        """Return the received chunks that `rank` frees just before a step: step -> chunks."""
        return {b.index: list(b.release) for b in self.plan.program(rank) if b.release}

    @cached_property
    def received_bytes(self) -> int:
        """Maximum bytes of received chunks that any rank holds at the same time."""
        row_bytes = self.plan.row_bytes
        return max(
            rows.get("kv", 0) * row_bytes.kv + rows.get("query", 0) * row_bytes.query
            for rank in range(self.size)
            for rows in dry_run(self.plan, rank).in_use
        )

    # --- work ------------------------------------------------------------------------------

    @property
    def computed(self) -> int:
        """Number of pairs of shards with at least one visible pair, at most G x G."""
        return int((self.shards.pairs > 0).sum())

    @cached_property
    def _work(self) -> np.ndarray:
        """Number of visible pairs in each step on each rank, int64 [steps, G]."""
        work = np.zeros((self.steps, self.size), dtype=np.int64)
        for rank, step, _, count in self._counts:
            work[step, rank] += count
        return work

    @property
    def work(self) -> list[int]:
        """Number of visible pairs that each rank computes in total."""
        return self._work.sum(axis=0).tolist()

    @property
    def imbalance(self) -> float:
        """Imbalance of this schedule, which `balance.imbalance` defines."""
        total = int(self._work.sum())
        return int(self._work.max(axis=1).sum()) * self.size / total if total else 1.0


def runs_of(values: np.ndarray) -> list[tuple[int, int, int]]:
    """Return the ranges of consecutive equal values, as (first, stop, value)."""
    edges = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
    return [(a, b, int(values[a])) for a, b in pairwise(edges)]


def share(rows: int, of: int) -> str:
    """Return the text for `rows` of `of` rows, such as 4/8 or 50%; "" for all rows."""
    if rows == of:
        return ""
    return f"{rows}/{of}" if of <= COUNTED else f"{rows / of:.0%}"


def kind_of(hop: Hop) -> Kind:
    """Return the link class of a transfer (intra or inter), and the kind of its content.

    The kind is a value of `KINDS`.
    """
    return hop.link, KINDS[hop.chunk.family]


def in_order(kind: Kind) -> tuple[str, bool]:
    """Return a sort key for kinds of transfers: by content, and intra before inter."""
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
    """Return the scene of forward or backward. "auto" selects the option with the fewest bytes.

    Args:
        shards: Sequence, mask and layout.
        grid: Number of nodes and of ranks per node.
        sizes: Sizes of the attention call.
        algorithm: Name of the algorithm.
        backward: True for backward, False for forward.
        side: Tensors that backward sends, "kv" or "query", or "auto".
        route: "ring", "direct" (owners send chunks directly to the ranks that use them), or "auto".
        only: Rank to draw; None for all ranks.

    Raises:
        ValueError: Options are inconsistent.
    """
    if only is not None and not 0 <= only < grid.size:
        raise ValueError(f"--rank must be in 0..{grid.size - 1}, got {only}")
    if not backward and side != "auto":
        raise ValueError(f"--side {side} applies to backward; add --backward, or remove --side")
    call = algorithm, grid, shards.visibility, sizes
    if backward:
        plan = cost.backward_schedule(*call, side=side, route=route)
    else:
        plan = cost.forward_schedule(*call, route=route)
    return ScheduleScene(shards, plan, sizes, backward, only)
