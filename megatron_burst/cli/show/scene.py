"""The content of a picture, read from the masks, layouts and schedules that run.

A scene holds numbers only; `text`, `png` and `timeline` decide how they look. Its schedule comes
from `cost`, as that of a plan does.

Shape letters: G ranks, S positions.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ...layout import Layout
from ...masks import Cover, Mask
from ...schedule import cost
from ...schedule.rings import Schedule
from ...schedule.tables import Chunk, Grid, Hop, Pair


@dataclass(frozen=True)
class Shards:
    """A sequence of `seq_len` positions over ranks, with its mask."""

    mask: Mask
    layout: Layout
    seq_len: int
    mask_text: str  # as the user wrote it
    layout_text: str

    @property
    def size(self) -> int:
        return self.layout.cp_size

    @cached_property
    def covers(self) -> np.ndarray:
        """Cover [G, G]: how much the queries of rank i see of the keys of rank j."""
        covers = np.empty((self.size, self.size), dtype=int)
        spans = [self.layout.spans(rank, self.seq_len) for rank in range(self.size)]
        for i, j in np.ndindex(covers.shape):
            found = {self.mask.cover(q, k) for q in spans[i] for k in spans[j]}
            covers[i, j] = found.pop() if len(found) == 1 else Cover.PARTIAL
        return covers

    @cached_property
    def pairs(self) -> np.ndarray:
        """int64 [G, G]: the number of visible position pairs of two shards."""
        spans = [self.layout.spans(rank, self.seq_len) for rank in range(self.size)]
        counts = [[cost.visible_pairs(self.mask, q, k) for k in spans] for q in spans]
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
        spans = (self.layout.spans(rank, self.seq_len) for rank in range(self.size))
        return [sum(span.length for span in of_rank) for of_rank in spans]

    @property
    def work(self) -> list[int]:
        return cost.work(self.layout, self.mask, self.seq_len)

    @property
    def imbalance(self) -> float:
        return cost.imbalance(self.layout, self.mask, self.seq_len)


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


class Cell(NamedTuple):
    """What one rank computes at one step; None: no pair."""

    pair: Pair | None
    cover: Cover  # EMPTY also if a conservative cover is PARTIAL, but nothing is visible
    share: float  # of the pairs of the busiest (rank, step)
    kept: bool  # its travelling chunk was kept from forward


class Total(NamedTuple):
    """Hops of one kind over all ranks: those made, and those if every chunk were needed."""

    hops: int
    bytes: int
    hops_of_all: int
    bytes_of_all: int


@dataclass(frozen=True)
class ScheduleScene:
    """One pass: what every rank computes and sends, from boundary to boundary."""

    shards: Shards
    plan: Schedule
    sizes: cost.Sizes
    backward: bool

    @property
    def size(self) -> int:
        return self.plan.grid.size

    def owner(self, pair: Pair) -> int:
        return pair.key if self.plan.side == "kv" else pair.query

    def cell(self, rank: int, step: int) -> Cell:
        pair = self._pairs.get((rank, step))
        if pair is None:
            return Cell(None, Cover.EMPTY, 0.0, False)
        most = max(int(self.shards.pairs.max()), 1)
        chunk = Chunk(self.plan.side, self.owner(pair))
        kept = self.plan.kept > 0 and chunk in self.plan.kept_chunks(rank)
        cover = Cover(int(self.shards.covers[pair])) if self.shards.pairs[pair] else Cover.EMPTY
        return Cell(pair, cover, int(self.shards.pairs[pair]) / most, kept)

    @cached_property
    def _pairs(self) -> dict[tuple[int, int], Pair]:
        rows = zip(*(column.tolist() for column in self.plan.tables.pairs), strict=True)
        return {(rank, step): Pair(query, key) for rank, step, query, key in rows}

    @cached_property
    def hops(self) -> list[Hop]:
        return list(self.plan.tables.transfers.hops(self.plan.grid))

    @cached_property
    def left_out(self) -> list[Hop]:
        """The hops that the schedule would also make if every pair of shards were visible."""
        everything = replace(self.plan, visible=np.ones_like(self.plan.visible), kept=0)
        made = {(hop.chunk, hop.src, hop.dst, hop.post) for hop in self.hops}
        hops = everything.tables.transfers.hops(everything.grid)
        return [hop for hop in hops if (hop.chunk, hop.src, hop.dst, hop.post) not in made]

    @cached_property
    def end(self) -> int:
        """The boundary by which the last hop has landed and the last pair is computed."""
        return max([self.size, *(hop.land for hop in self.hops)])

    @property
    def totals(self) -> dict[tuple[str, bool], Total]:
        """The hops and bytes by link class, and by whether they carry gradients."""
        hops, sent = Counter(), Counter()
        left, spared = Counter(), Counter()
        for one, count, bytes_ in ((self.hops, hops, sent), (self.left_out, left, spared)):
            for hop in one:
                kind = hop.link, hop.chunk.gradient
                count[kind] += 1
                bytes_[kind] += self.sizes.chunk_bytes(hop.chunk)
        return {
            kind: Total(hops[kind], sent[kind], hops[kind] + left[kind], sent[kind] + spared[kind])
            for kind in sorted(
                set(hops) | set(left), key=lambda kind: (kind[1], kind[0] != "intra")
            )
        }

    @property
    def computed(self) -> int:
        """The number of the G x G pairs of shards with a visible position pair."""
        return int((self.shards.pairs > 0).sum())

    @property
    def work(self) -> list[int]:
        """Visible pairs that each rank computes."""
        pairs, work = self.plan.tables.pairs, np.zeros(self.size, dtype=np.int64)
        np.add.at(work, pairs.rank, self.shards.pairs[pairs.query, pairs.key])
        return work.tolist()

    @property
    def imbalance(self) -> float:
        """As `cost.imbalance`, over the steps of this schedule."""
        return cost.imbalance_of(self.plan, self.shards.pairs)


@dataclass(frozen=True)
class Choices:
    """The choices of a schedule; "auto" is resolved by bytes, as for a plan."""

    algorithm: str = "burst"
    backward: bool = False
    side: str = "auto"
    route: str = "auto"
    kv_cache: float = 0.0


def schedule_scene(
    shards: Shards, grid: Grid, sizes: cost.Sizes, choices: Choices
) -> ScheduleScene:
    """The scene of one pass. Raises ValueError for choices that do not go together."""
    if not choices.backward and (choices.side != "auto" or choices.kv_cache):
        raise ValueError("--side and --kv-cache apply to backward; add --backward")
    if not 0 <= choices.kv_cache <= 1:
        raise ValueError(f"--kv-cache must be in 0..1, got {choices.kv_cache}")
    if choices.kv_cache and choices.side == "query":
        raise ValueError("--kv-cache: with side query no keys travel; use --side kv")
    visible = shards.covers != Cover.EMPTY
    kept = round(choices.kv_cache * (grid.size - 1))

    if choices.backward:
        plan = cost.backward_schedule(
            choices.algorithm, grid, visible, sizes,
            side=choices.side, route=choices.route, kept=kept,
        )  # fmt: skip
    else:
        plan = cost.forward_schedule(choices.algorithm, grid, visible, sizes, route=choices.route)
    return ScheduleScene(shards, plan, sizes, choices.backward)


@dataclass(frozen=True)
class LayoutScene:
    """Several layouts of one sequence, and the work of each rank under a mask."""

    rows: tuple[Shards, ...]
    best: str | None  # the name of the layout with the least imbalance; None if not asked for
