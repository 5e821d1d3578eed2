"""Pairs of shards that are measured: mask, positions, and their form for the rivals.

Zigzag and striped pairs belong to a ring of `RANKS` ranks. `one_call` describes how one call of a
stock operator computes the pair, if possible; `seen` is the mask on local indices, in torch, for
FlexAttention only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.report import human
from megatron_burst.layout import Span, make
from megatron_burst.masks import BlockSparse, Causal, Documents, Full, Mask, Tree, Window
from megatron_burst.schedule.cost import visible_pairs

RANKS = 8
Seen = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (row, column) -> may attend?


class OneCall(NamedTuple):
    """A single operator call on some rows and columns.

    Its mask is everything, a lower triangle (column <= row), the last `window` columns up to the
    own one, or a triangle in each document.
    """

    rows: slice = slice(None)
    columns: slice = slice(None)
    triangle: bool = False
    window: int | None = None
    bounds: tuple[int, ...] | None = None


class Case:
    """One mask over one pair of shards."""

    def __init__(
        self,
        name: str,
        mask: Mask,
        q_spans: tuple[Span, ...],
        k_spans: tuple[Span, ...],
        one_call: OneCall | None,
        seen: Callable[[torch.device], Seen] | None,
    ):
        self.name, self.mask, self.one_call, self.seen = name, mask, one_call, seen
        self.q_spans, self.k_spans = q_spans, k_spans

    @cached_property
    def pairs(self) -> int:
        """Return the number of visible (query, key) pairs."""
        return visible_pairs(self.mask, self.q_spans, self.k_spans)

    def visible(self, rows: np.ndarray, columns: np.ndarray) -> torch.Tensor:
        """Return a bool [rows, columns] of these local indices, by the mask itself."""
        q, k = (
            np.concatenate([s.positions() for s in spans]) for spans in (self.q_spans, self.k_spans)
        )
        return torch.from_numpy(np.array(self.mask.visible(q[rows][:, None], k[columns][None, :])))


def cases(tokens: int, window: int, block: int) -> list[Case]:
    """Return all masks over shards of `tokens` rows, the most important first."""
    half, last = tokens // 2, RANKS - 1
    own = (Span(0, 1, tokens),)
    zigzag, striped = (
        [make(name, cp_size=RANKS).spans(r, RANKS * tokens) for r in (0, last)]
        for name in ("zigzag", "striped")
    )
    triangle = OneCall(triangle=True)
    bounds = documents(tokens)
    packed = Documents(bounds) & Causal()
    sparse = BlockSparse(quarter(tokens // block), block)
    return [
        Case("full", Full(), own, own, OneCall(), None),
        Case("causal zigzag, own keys", Causal(), zigzag[0], zigzag[0], triangle,
             lambda device: lambda q, k: k <= q),
        Case("causal striped, first rank, last keys", Causal(), striped[0], striped[1],
             OneCall(slice(1, None), slice(None, -1), triangle=True),
             lambda device: lambda q, k: k < q),
        Case(f"window {human(window)}", Window(window - 1, 0), own, own, OneCall(window=window),
             lambda device: lambda q, k: (k <= q) & (q - k < window)),
        Case("documents, causal", packed, own, own, OneCall(bounds=bounds),
             lambda device: _by_document(bounds, device)),
        Case(f"blocks of {human(block)}, 25 %", sparse, own, own, None,
             lambda device: _by_block(sparse, device)),
        Case("tree", Tree(tree(tokens)), own, own, None,
             lambda device: _by_ancestor(tree(tokens), device)),
        Case("causal zigzag, first rank, last keys", Causal(), zigzag[0], zigzag[1],
             OneCall(rows=slice(half, None)), lambda device: lambda q, k: (q >= half) & (k >= 0)),
        Case("causal zigzag, last rank, first keys", Causal(), zigzag[1], zigzag[0],
             OneCall(columns=slice(None, half)), lambda device: lambda q, k: (k < half) & (q >= 0)),
    ]  # fmt: skip


def documents(tokens: int) -> tuple[int, ...]:
    """Return cumulative lengths of twelve documents of fixed, unequal lengths."""
    cuts = np.random.default_rng(0).choice(np.arange(1, tokens), size=11, replace=False)
    return (0, *sorted(cuts.tolist()), tokens)


def tree(tokens: int) -> np.ndarray:
    """Return the end of each row's subtree: a prompt, four branches, four leaves on each branch."""
    out = np.full(tokens, tokens)
    for first, end in _fourths(tokens // 4, tokens):
        out[first:end] = end
        for leaf, leaf_end in _fourths(first + (end - first) // 4, end):
            out[leaf:leaf_end] = leaf_end
    return out


def _fourths(first: int, end: int) -> list[tuple[int, int]]:
    """Return four consecutive ranges of rows."""
    bounds = np.linspace(first, end, 5).astype(int).tolist()
    return list(pairwise(bounds))


def quarter(blocks: int) -> np.ndarray:
    """Return a bool [blocks, blocks] with a random quarter true, and each row's own block."""
    table = np.eye(blocks, dtype=bool)
    wanted = max(1, round(0.25 * blocks)) - 1
    random = np.random.default_rng(0)
    for i in range(blocks):
        table[i, random.choice(np.delete(np.arange(blocks), i), size=wanted, replace=False)] = True
    return table


def _by_document(bounds: tuple[int, ...], device: torch.device) -> Seen:
    lengths = torch.tensor(bounds).diff()
    document = torch.repeat_interleave(torch.arange(len(lengths)), lengths).to(device)
    return lambda q, k: (document[q] == document[k]) & (k <= q)


def _by_block(mask: BlockSparse, device: torch.device) -> Seen:
    table, block = torch.tensor(mask.table, device=device), mask.block
    return lambda q, k: table[q // block, k // block]


def _by_ancestor(out: np.ndarray, device: torch.device) -> Seen:
    end = torch.from_numpy(out).to(device)
    return lambda q, k: (k <= q) & (q < end[k])
