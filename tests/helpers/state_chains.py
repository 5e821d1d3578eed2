"""States along chains of pieces, by hand: dense float64 maps, one document after the other.

The pieces come from the positions of every rank's rows, and not from what the package makes of
them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

import megatron_burst as mb


class Piece(NamedTuple):
    """Rows of a rank with consecutive positions of a document; nth: the how manieth of its rank."""

    position: int
    length: int
    document: int
    rank: int
    nth: int


def pieces(layout: mb.layout.Layout, seq_len: int, bounds: list[int]) -> list[Piece]:
    """All of them, by position."""
    home = {p: d for d in range(len(bounds) - 1) for p in range(bounds[d], bounds[d + 1])}
    found = []
    for rank in range(layout.cp_size):
        runs: list[list[int]] = []
        for position in layout.positions(rank, seq_len).tolist():
            last = runs[-1][-1] if runs else None
            if last == position - 1 and home[last] == home[position]:
                runs[-1].append(position)
            else:
                runs.append([position])
        found += [Piece(run[0], len(run), home[run[0]], rank, nth) for nth, run in enumerate(runs)]
    return sorted(found)


def dense(decay: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """A transition of any form as matrices [b, h, d, d]; like [b, h, d, w]."""
    one = torch.eye(like.shape[2], dtype=like.dtype)
    if decay is None:
        return one.expand(*like.shape[:2], -1, -1)
    if decay.dim() == 4:
        return decay
    return one * (decay[..., None, None] if decay.dim() == 2 else decay[..., None])


def serial(chain, decays, increments, initial):
    """(state that enters each piece, [documents, b, h, d, w] of final states); decays, increments:
    of each piece of the chain."""
    states = list(initial)
    entering = []
    for piece, decay, increment in zip(chain, decays, increments, strict=True):
        state = states[piece.document]
        entering.append(state)
        states[piece.document] = dense(decay, increment) @ state + increment
    return entering, torch.stack(states)


class Shuffled(mb.layout.Layout):
    """Each rank holds a run of positions, the second half of it first: of a document it has two
    pieces one behind the other."""

    name = "shuffled"
    pieces_per_rank = 2

    def _spans(self, rank, seq_len):
        half = seq_len // self.cp_size // 2
        first = 2 * rank * half
        return mb.layout.Span(first + half, 1, half), mb.layout.Span(first, 1, half)


LAYOUTS = {
    "contiguous": lambda n, bounds: mb.layout.make("contiguous", cp_size=n),
    "zigzag": lambda n, bounds: mb.layout.make("zigzag", cp_size=n),
    "document_zigzag": lambda n, bounds: mb.layout.make("zigzag", cp_size=n, cu_seqlens=bounds),
    "shuffled": lambda n, bounds: Shuffled(n),
    "balanced": lambda n, bounds: mb.layout.make("balanced", cp_size=n, cu_seqlens=bounds),
}
GRIDS = {1: (1, 1), 2: (1, 2), 3: (3, 1), 4: (2, 2), 8: (2, 4)}  # world -> nodes, ranks of each


def documents(layout: str, world: int, packed: bool) -> list[int]:
    """Bounds of documents of a sequence of 48 or 96 positions; with an empty one if packed."""
    total = 96 if layout == "document_zigzag" else 48
    if not packed:
        return [0, total]
    if layout == "document_zigzag":
        step = 2 * world
        return [0, step, step, total // step // 2 * step, total]
    return [0, 3, 3, 4, 29, total]
