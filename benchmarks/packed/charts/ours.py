"""Layout `balanced` with each of our algorithms on the same documents, kernel and links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from megatron_burst.autotune.candidates import adding, sharing
from megatron_burst.autotune.pair_counts import pairs_seen
from megatron_burst.autotune.prepared import PreparedSchedule
from megatron_burst.autotune.rates import Rates
from megatron_burst.autotune.simulator import PassTime, pass_time
from megatron_burst.layout import Layout, Span, make
from megatron_burst.masks import Causal, Documents, Mask
from megatron_burst.schedule import rings
from megatron_burst.schedule.algorithms import ALGORITHMS
from megatron_burst.schedule.demand import visibility_of
from megatron_burst.schedule.rings import Schedule
from megatron_burst.schedule.tables import Grid
from megatron_burst.schedule.topology import Topology

from .kernel import FLOPS, HEADS, KV_HEADS, WIDTH, kernels, tiled
from .rivals import NODE, Constants, sizes

TRIED = ("ring", "burst", "all_gather", "multicast", "prefetch")
AUTO = TRIED[1:]  # algorithms that `auto` tries
HEAD_CHUNKS = (1, 2)
WIRE = 4  # bytes of an element of gradients that are sent: fp32, the default
MEMORY = 0.8 * 3.35e12  # bytes per second that a pass over an H100's memory reaches
CALL, MESSAGE = 30e-6, 10e-6  # additional seconds of each call and of each message
ELEMENT = 4 + 4 + 2  # bytes read and written to add a bf16 element to an fp32 element
# Additional bytes per element of keys, and of their gradients, in a call for several chunks. Keys:
# two copies in bf16. Gradients in fp32: zeros, reordering and addition.
COPY, GRADIENT = 4 * 2, 6 * 4


class Pieces(NamedTuple):
    """Runs of rows of one document on one rank: rank and rows of each run."""

    rank: np.ndarray
    rows: np.ndarray
    spans: list[Span]


@dataclass(frozen=True)
class Pack:
    """One sequence in a layout.

    Attributes:
        mask: Visible pairs.
        bounds: Boundaries of documents or segments.
        area: Number of visible pairs.
    """

    layout: Layout
    mask: Mask
    bounds: np.ndarray
    area: float
    causal: bool = True

    @property
    def ranks(self) -> int:
        """Return the ranks of the layout."""
        return self.layout.cp_size

    @property
    def shards(self) -> list[Sequence[Span]]:
        """Return the spans of every rank."""
        return [self.layout.spans(rank, int(self.bounds[-1])) for rank in range(self.ranks)]

    def pieces(self) -> Pieces:
        """Return spans cut at document boundaries."""
        spans, owner = [], []
        for rank, shard in enumerate(self.shards):
            for span in shard:
                assert span.stride == 1
                begin, end = span.start, span.start + span.length
                inner = self.bounds[(self.bounds > begin) & (self.bounds < end)].tolist()
                edges = [begin, *inner, end]
                spans += [Span(a, 1, b - a) for a, b in pairwise(edges)]
                owner += [rank] * (len(edges) - 1)
        rows = np.array([span.length for span in spans], dtype=float)
        return Pieces(np.array(owner), rows, spans)


def documents(lengths: np.ndarray, ranks: int, causal: bool, per_node: int | None = None) -> Pack:
    """Return documents in layout balanced over `ranks` ranks."""
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    windows: Any = [(None, 0 if causal else None)]
    layout = make("balanced", cp_size=ranks, cu_seqlens=bounds, windows=windows,
                  per_node=per_node)  # fmt: skip
    mask = Documents(bounds) & Causal() if causal else Documents(bounds)
    area = lengths.astype(float)
    area = area * (area + 1) / 2 if causal else area * area
    return Pack(layout, mask, bounds, float(area.sum()), causal)


class Work(NamedTuple):
    """Visible pairs, and seconds of forward and backward, of queries i and keys j, [G, G] each."""

    pairs: np.ndarray
    seconds: tuple[np.ndarray, np.ndarray]


class _Rows(NamedTuple):
    """Rows of rank i that see keys of rank j, and rows of their tiles, [G, G] each."""

    rows: np.ndarray
    tiles: np.ndarray

    @classmethod
    def of(
        cls,
        pieces: Pieces,
        ranks: int,
        piece: np.ndarray,
        peer: np.ndarray,
        calls: np.ndarray | None = None,
    ) -> _Rows:
        """Count the rows of these pieces.

        Args:
            calls: [G, G], number of the call that computes a pair, to count the rows of a call with
                several other ranks once; they are spread over the pairs of the call.
        """
        once = np.unique(piece * ranks + peer)
        piece, peer = once // ranks, once % ranks
        own = pieces.rank[piece]
        row_counts = []
        for size in (pieces.rows, tiled(pieces.rows)):
            all_ = np.zeros((ranks, ranks))
            np.add.at(all_, (own, peer), size[piece])
            if calls is not None:
                call = np.arange(ranks)[:, None] * (calls.max() + 1) + calls
                foreign = own != peer
                once = np.unique(np.stack([piece, call[own, peer]])[:, foreign], axis=1)
                rows_once = np.bincount(once[1], size[once[0]], call.max() + 1)
                apart = 1 - np.eye(ranks)
                pair_rows = np.bincount(
                    call.reshape(-1), (all_ * apart).reshape(-1), call.max() + 1
                )
                scale = (rows_once / np.maximum(pair_rows, 1.0))[call]
                all_ = np.where(apart > 0, all_ * scale, all_)
            row_counts.append(all_)
        return cls(*row_counts)


ROW = HEADS * WIDTH * ELEMENT / MEMORY  # seconds to add a row to an existing sum


def work(pack: Pack, row: float = ROW, calls: np.ndarray | None = None) -> Work:
    """Return the work of every pair of ranks.

    Args:
        row: Seconds for each row of a partial result that is added.
        calls: [G, G], number of the call that computes a pair, for calls with several other ranks,
            whose keys are copied into one buffer. None if every pair has its own call.
    """
    pieces, ranks = pack.pieces(), pack.ranks
    visible_pairs = pairs_seen(pack.mask, [(span,) for span in pieces.spans])
    i, j = np.nonzero(visible_pairs)
    rows, keys, owner = pieces.rows[i], pieces.rows[j], (pieces.rank[i], pieces.rank[j])
    pair_index = owner[0] * ranks + owner[1]

    def total(pair_values: np.ndarray) -> np.ndarray:
        return np.bincount(pair_index, pair_values, ranks * ranks).reshape(ranks, ranks)

    # Rows of each pair of ranks, each counted once. Results of other ranks are added to existing
    # sums.
    queries = _Rows.of(pieces, ranks, i, owner[1], calls)
    key_rows = _Rows.of(pieces, ranks, j, owner[0])
    rows_of, keys_of = queries.rows, key_rows.rows.T
    apart = 1 - np.eye(ranks)
    pass_seconds = []
    for kernel in kernels("FA3"):
        pair_seconds = np.where(
            (i == j) & pack.causal,
            kernel.triangle(rows),
            kernel.tiles(rows, keys) * np.minimum(1.0, visible_pairs[i, j] / (rows * keys)),
        )
        of_keys = (COPY + GRADIENT * kernel.backward) * (calls is not None)
        of_keys += ELEMENT * kernel.backward
        of_keys *= 2 * KV_HEADS / HEADS / ELEMENT
        added = (rows_of + of_keys * keys_of) * apart * row
        pass_seconds.append(
            total(pair_seconds) + kernel.besides(queries.tiles, key_rows.tiles.T) + added
        )
    return Work(total(visible_pairs[i, j]), (pass_seconds[0], pass_seconds[1]))


class Run(NamedTuple):
    """One algorithm for a pack: its expected time, with the handicap of `auto`, and its real time.

    Attributes:
        algorithm, head_chunks: Settings of the ring.
        share: GPUs that share heads, 1 for none.
        calls: Result of `calls_of`.
    """

    algorithm: str
    head_chunks: int
    share: int
    expected: float
    forward: PassTime
    backward: PassTime
    calls: np.ndarray | None = None

    def speeds(self, pack: Pack) -> tuple[float, float]:
        """Return TFLOP/s per GPU in visible pairs, forward and backward."""
        forward, backward = (
            flops * pack.area / (pack.ranks * self.share) / timed_pass.seconds / 1e12
            for flops, timed_pass in zip(FLOPS, (self.forward, self.backward), strict=True)
        )
        return forward, backward


def runs(
    pack: Pack,
    fitted: Constants,
    tried: Sequence[str] = TRIED,
    *,
    share: int = 1,
    head_chunks: Sequence[int] = HEAD_CHUNKS,
    streams: bool = False,
) -> list[Run]:
    """Return all runs of `tried`, with the fitted links.

    Args:
        share: GPUs that share the heads of one rank of the layout.
        streams: True if relays have their own stream.
    """
    topology = Topology(pack.ranks * share, min(NODE, pack.ranks * share), share)
    grid = Grid(topology.inter_size, topology.intra_size)
    own = sizes(WIRE, int(pack.bounds[-1]) // topology.size).shared(share)
    rates = Rates(fitted.intra, fitted.inter, latency=MESSAGE, launch=CALL,
                  exchange_start=fitted.start)  # fmt: skip
    heads = sharing(topology, own, rates)
    visibility = visibility_of(pack.mask, pack.shards, pack.shards, streams=streams)
    candidates, adds = [], adding(own, MEMORY)
    for name in tried if grid.size > 1 else ("ring",):
        forward = PreparedSchedule(
            rings.forward(name, grid, visibility=visibility, row_bytes=own.forward)
        )
        calls = calls_of(forward.schedule)
        costs = work(pack, calls=calls)
        backward = PreparedSchedule(
            rings.backward(name, grid, "kv", visibility=visibility, row_bytes=own.backward)
        )
        for count in head_chunks if grid.size > 1 else (1,):
            if own.kv_heads % count:
                continue
            passes, plain = [], 0.0
            for schedule, seconds, kernel, flops, exchange, of_sums in zip(
                (forward, backward), costs.seconds, kernels("FA3"), FLOPS, heads, adds, strict=True
            ):
                passes.append(pass_time(schedule, own, seconds / share, rates, count) + exchange)
                # `auto` uses only pairs, a rate, and the rows that are added.
                simple = costs.pairs * (flops / kernel.rate / share)
                simple_pass = pass_time(schedule, own, simple, rates, count, adding=of_sums)
                plain += simple_pass.seconds + exchange.seconds
            expected = plain * ALGORITHMS[name].handicap
            candidates.append(Run(name, count, share, expected, *passes, calls))
    return candidates


def calls_of(schedule: Schedule) -> np.ndarray | None:
    """Return [G, G], the number of the call that computes a pair; None without joined calls."""
    if not schedule.joined:
        return None
    pairs, size = schedule.tables.pairs, schedule.grid.size
    calls = np.zeros((size, size), dtype=np.int64)
    calls[pairs.rank, pairs.key] = pairs.step
    return calls


def taken(candidates: Sequence[Run]) -> Run:
    """Return the run with the shortest expected time, which `auto` picks."""
    return min(candidates, key=lambda run: run.expected)
