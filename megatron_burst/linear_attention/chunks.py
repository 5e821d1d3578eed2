"""The chunkwise form of every linear attention, in torch operators.

What the rows of a chunk write into the state is U [c, w]: the values themselves where they are
added, and for delta rules the solution of

    (I + L) U = beta (V - K~ S),   L[t, j] = beta_t k_t^T exp(G_t - G_j) k_j  for j < t,

with S the state before the chunk and K~ the keys with the decay since then. The state behind the
chunk is exp(G_end) S + K^^T U, K^ being what is left of the keys at its end, and the answers are
scale (Q~ S + (Q D K^T) U). The map of a piece is what the same recurrence makes of S = [I | 0] and
V = [0 | V]. Shape letters as in `decays`; p pieces.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .decays import Keys, Scalar, Vector
from .form import Form
from .grid import Grid

SIZE = 64  # rows of a chunk


class Rows(NamedTuple):
    """A rank's rows in the accumulation dtype, chunk by chunk: q, k [n, b, g, 1, c, d] (q only for
    outputs), v [n, b, g, r, c, w], beta [n, b, g, r, c, 1], and the decay within each chunk."""

    q: torch.Tensor | None
    k: torch.Tensor
    v: torch.Tensor
    beta: torch.Tensor | None
    decay: Scalar | Vector


def rows(
    grid: Grid,
    q: torch.Tensor | None,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor | None,
    beta: torch.Tensor | None,
    dtype: torch.dtype,
) -> Rows:
    """The tensors of `inputs.Inputs`, chunk by chunk."""
    heads = k.shape[2]

    def shared(x: torch.Tensor) -> torch.Tensor:
        return _chunked(grid, x, dtype).unsqueeze(3)

    def own(x: torch.Tensor, dtype: torch.dtype = dtype) -> torch.Tensor:
        return _chunked(grid, x, dtype).unflatten(2, (heads, -1))

    if decay is None:  # one zero for all
        within = Scalar(k.new_zeros((1, 1, 1, 1, grid.size), dtype=dtype), dtype)
    elif decay.dim() == 3:
        within = Scalar(own(decay.unsqueeze(-1)).squeeze(-1), dtype)
    else:
        within = Vector(own(decay), dtype)
    return Rows(
        None if q is None else shared(q),
        shared(k),
        own(v),
        None if beta is None else own(beta.unsqueeze(-1)),
        within,
    )


def piece_maps(form: Form, grid: Grid, rows: Rows) -> tuple[torch.Tensor, ...]:
    """Of each piece: (transition, increment) as `inputs.Maps` has them, or (increment,) where
    nothing decays. grid: of the pieces that need a map."""
    keys = rows.decay.keys(rows.k)
    _, b, g, r, _, w = rows.v.shape
    d = rows.k.shape[-1]
    size = (grid.pieces, b, g, r, d)
    if form.delta:
        start = torch.eye(d, dtype=rows.v.dtype, device=rows.v.device).expand(*size, d)
        start = torch.nn.functional.pad(start, (0, w))
        _, _, end = _sweep(grid, rows, keys, start, _solved(rows))
        end = grid.unsorted(end).flatten(2, 3)
        return end[..., :d], end[..., d:]
    start = rows.v.new_zeros(*size, w)
    _, _, end = _sweep(grid, rows, keys, start, None)
    end = grid.unsorted(end).flatten(2, 3)
    if form.decay == "none":
        return (end,)
    total = rows.decay.total
    total = total[..., -1:] if form.decay == "scalar" else total[..., -1, :]
    summed = total.new_zeros(*size[:-1], total.shape[-1])
    for number, part in enumerate(total.split(grid.active)):
        summed = summed + torch.nn.functional.pad(
            part, (0, 0) * 4 + (0, grid.pieces - grid.active[number])
        )
    factors = grid.unsorted(summed).to(rows.v.dtype).exp().flatten(2, 3)
    return (factors.squeeze(-1) if form.decay == "scalar" else factors), end


def outputs(
    form: Form, grid: Grid, rows: Rows, entering: torch.Tensor, scale: float
) -> torch.Tensor:
    """[s, b, h, w] in the accumulation dtype; entering [p, b, h, d, w]."""
    assert rows.q is not None
    solved = _solved(rows) if form.delta else None
    start = grid.sorted(entering).unflatten(2, (rows.v.shape[2], -1))
    states, written, _ = _sweep(grid, rows, rows.decay.keys(rows.k), start, solved)
    answers = rows.decay.read(rows.q, states)
    answers = answers + rows.decay.pairs(rows.q, rows.k) @ written
    return grid.scatter((answers * scale).flatten(2, 3).permute(0, 3, 1, 2, 4))


def _solved(rows: Rows) -> torch.Tensor:
    """(I + L)^-1 diag(beta) [n, b, g, r, c, c]."""
    assert rows.beta is not None
    lower = rows.beta * rows.decay.pairs(rows.k, rows.k)  # whose diagonal is not read
    right = torch.diag_embed(rows.beta.squeeze(-1))
    return torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)


def _sweep(
    grid: Grid, rows: Rows, keys: Keys, start: torch.Tensor, solved: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Runs through the chunks of all pieces at once.

    start [p, b, g, r, d, x]: the states that enter, longest piece first; x > w: the values stand in
    the last columns. Returns the states before the chunks [n, b, g, r, d, x], what the chunks write
    [n, b, g, r, c, x], and the states behind the pieces, sorted as start.
    """
    extra = start.shape[-1] - rows.v.shape[-1]
    parts = zip(
        *(_split(grid, x) for x in (rows.v, solved, *keys)),
        grid.active,
        strict=True,
    )
    state, states, written, ended = start, [], [], []
    for v, inverse, read, write, read_factor, write_factor, kept, active in parts:
        state, done = state[:active], state[active:]
        ended.append(done)
        if extra:
            v = torch.nn.functional.pad(v, (extra, 0))
        if inverse is not None:
            v = inverse @ (v - _times(read @ state, read_factor))
        states.append(state)
        written.append(v)
        state = kept * state + write.transpose(-1, -2) @ _times(v, write_factor)
    ended.append(state)
    end = torch.cat(ended[::-1])
    if not states:
        return start[:0], rows.v, end
    return torch.cat(states), torch.cat(written), end


def _split(grid: Grid, x: torch.Tensor | None) -> list:
    """By the chunks' numbers; what is the same for all chunks stays so."""
    if x is None or x.shape[0] != grid.chunks:
        return [x] * len(grid.active)
    return list(x.split(grid.active))


def _times(x: torch.Tensor, factor: torch.Tensor | None) -> torch.Tensor:
    return x if factor is None else x * factor


def _chunked(grid: Grid, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[s, b, h, ...] -> [n, b, h, c, ...]."""
    return grid.gather(x).permute(0, 2, 3, 1, 4).contiguous().to(dtype)
