"""The kernel "torch": the chunkwise form in torch operators, for any dtype and device.

Between forward and backward it holds q, k, v, decay, beta and the states that enter the pieces, and
nothing per token besides: backward computes the chunks again (`recomputed`). It computes in the
accumulation dtype, float32, or float64 for float64 inputs.

What the rows of a chunk write into the state is U [c, w]: the values themselves where they are
added, and for delta rules the solution of

    (I + L) U = beta (V - K~ S),   L[t, j] = beta_t k_t^T exp(G_t - G_j) k_j  for j < t,

with S the state before the chunk and K~ the keys with the decay since then. The state behind the
chunk is exp(G_end) S + K^^T U, K^ being what is left of the keys at its end, and the answers are
scale (Q~ S + (Q D K^T) U). The map of a piece is what the same recurrence makes of S = [I | 0] and
V = [0 | V].

With G_t the sum of the decays (logarithms) of rows 0..t of a chunk, the state that a row j wrote is
worth exp(G_t - G_j) to a later row t, that of before the chunk exp(G_t), and what row j wrote is
worth exp(G_end - G_j) after the chunk. No exponent is larger than those of the recurrence:
exp(-G_j) alone may overflow, and is never taken. A decay that leaves nothing, as -inf does, counts
as one of `FLOORS`: differences of sums are numbers. Sums are in float64, because small differences
of large sums are what is left over.

Shape letters: n chunks (leading), b batch, g query/key heads, r value heads of each, c rows of a
chunk, d width of keys, w width of values, x any width; p pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ...kernels.autograd import first_order_only
from ...kernels.online_softmax import accumulation_dtype
from ...layout.sharding import to_device
from ..forms import Form
from .base import LinearInputs, Maps, RankPieces, no_maps

# By dtype: exp of the floor is 0, also after growth that exp can barely tell; and sums of a chunk
# of them, in float64, still have the digits of what exp can tell.
FLOORS = {torch.float32: -1e4, torch.float64: -1500.0}


class Keys(NamedTuple):
    """Keys as the state meets them: read [n, b, g, r | 1, c, d], with what was there before the
    chunk; written, what is left of them after it. Where a decay is one number per head the keys
    stay as they are, shared by the heads, and the factors [n, b, g, r, c, 1] go to the side of the
    values. kept [n, b, g, r, 1 | d, 1]: of the state, over the chunk."""

    read: torch.Tensor
    written: torch.Tensor
    read_factor: torch.Tensor | None
    written_factor: torch.Tensor | None
    kept: torch.Tensor


class Scalar:
    """decay [n, b, g, r, c]."""

    def __init__(self, decay: torch.Tensor, dtype: torch.dtype):
        self.total = decay.clamp(min=FLOORS[dtype]).double().cumsum(-1)
        self.dtype = dtype

    def pairs(self, a: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """a_t^T D k_j [n, b, g, r, c, c] where j <= t, else 0; a, k [n, b, g, 1, c, d]."""
        away = self.total.unsqueeze(-1) - self.total.unsqueeze(-2)
        return (a @ k.transpose(-1, -2)) * away.to(self.dtype).masked_fill(
            _later(away.shape[-1], away.device), float("-inf")
        ).exp()

    def keys(self, k: torch.Tensor) -> Keys:
        """What the state meets of keys k [n, b, g, 1, c, d]."""
        end = self.total[..., -1:]
        left = (end - self.total).to(self.dtype).exp().unsqueeze(-1)
        kept = end.to(self.dtype).exp().unsqueeze(-1)
        return Keys(k, k, self._entering(), left, kept)

    def read(self, q: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """What q [n, b, g, 1, c, d] finds of states [n, b, g, r, d, x] from before the chunk."""
        return (q @ states) * self._entering()

    def _entering(self) -> torch.Tensor:
        return self.total.to(self.dtype).exp().unsqueeze(-1)


class Vector:
    """decay [n, b, g, r, c, d], c a power of two."""

    def __init__(self, decay: torch.Tensor, dtype: torch.dtype):
        self.total = decay.clamp(min=FLOORS[dtype]).double().cumsum(-2)
        self.dtype = dtype

    def pairs(self, a: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """As `Scalar.pairs`. Single rows are joined to blocks, two by two: rows of two blocks meet
        in the state behind the earlier block, which lies between them."""
        total, dtype = self.total, self.dtype
        a, k = a.expand_as(total), k.expand_as(total)
        scores = (a * k).sum(-1)[..., None, None]
        while scores.shape[-3] > 1:  # [..., blocks, rows, rows]
            halves = (-1, 2, scores.shape[-1])
            late, since = (x.unflatten(-2, halves)[..., 1, :, :] for x in (a, total))
            early, until = (x.unflatten(-2, halves)[..., 0, :, :] for x in (k, total))
            end = until[..., -1:, :]
            late = late * (since - end).to(dtype).exp()
            early = early * (end - until).to(dtype).exp()
            across = late @ early.transpose(-1, -2)
            first, second = scores.unflatten(-3, (-1, 2)).unbind(-3)
            above = torch.cat([first, torch.zeros_like(first)], -1)
            scores = torch.cat([above, torch.cat([across, second], -1)], -2)
        return scores.squeeze(-3)

    def keys(self, k: torch.Tensor) -> Keys:
        """As `Scalar.keys`."""
        end = self.total[..., -1:, :]
        written = k * (end - self.total).to(self.dtype).exp()
        kept = end.to(self.dtype).exp().transpose(-1, -2)
        return Keys(k * self._entering(), written, None, None, kept)

    def read(self, q: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """As `Scalar.read`."""
        return (q * self._entering()) @ states

    def _entering(self) -> torch.Tensor:
        return self.total.to(self.dtype).exp()


def _later(size: int, device: torch.device) -> torch.Tensor:
    """[size, size]: is column j behind row t?"""
    return torch.ones(size, size, dtype=torch.bool, device=device).triu(1)


class ChunkGrid:
    """spans: (first row, rows) of each piece; rows: of the rank; size: of a chunk.

    active: how many pieces have a chunk of each number. order: the pieces, longest first.
    """

    def __init__(
        self, spans: Sequence[tuple[int, int]], rows: int, size: int, device: torch.device
    ):
        self.rows, self.size, self.device = rows, size, device
        chunks = np.array([-(-length // size) for _, length in spans], dtype=np.int64)
        self.order = np.argsort(-chunks, kind="stable")
        self.pieces = len(spans)
        longest = int(chunks.max(initial=0))
        self.active = [int((chunks > number).sum()) for number in range(longest)]
        self.chunks = sum(self.active)
        shortest = min((length for _, length in spans), default=0)
        self._even = shortest > 0 and shortest % size == 0 and self.pieces * shortest == rows
        if not self._even:
            self._place(spans)

    def _place(self, spans: Sequence[tuple[int, int]]) -> None:
        """Which row stands where."""
        firsts = np.cumsum([0, *self.active])  # the first piece's chunk of each number
        rank_of = np.argsort(self.order)
        source, target = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for piece, (start, length) in enumerate(spans):
            at = np.arange(length)
            source.append(start + at)
            target.append((firsts[at // self.size] + rank_of[piece]) * self.size + at % self.size)
        self._source = to_device(np.concatenate(source), self.device)
        self._target = to_device(np.concatenate(target), self.device)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, ...] -> [chunks, size, ...]."""
        if self._even:
            return x.unflatten(0, (self.pieces, -1, self.size)).transpose(0, 1).flatten(0, 1)
        moved = _Moved.apply(x, self._source, self._target, self.chunks * self.size)
        return moved.unflatten(0, (self.chunks, self.size))

    def scatter(self, y: torch.Tensor) -> torch.Tensor:
        """[chunks, size, ...] -> [rows, ...]; rows of no piece are zero."""
        if self._even:
            return y.unflatten(0, (-1, self.pieces)).transpose(0, 1).flatten(0, 2)
        return _Moved.apply(y.flatten(0, 1), self._target, self._source, self.rows)

    def sorted(self, x: torch.Tensor) -> torch.Tensor:
        """[pieces, ...] in the order of the pieces -> longest first."""
        return self._picked(x, self.order)

    def unsorted(self, x: torch.Tensor) -> torch.Tensor:
        """[pieces, ...] longest first -> in the order of the pieces."""
        return self._picked(x, np.argsort(self.order))

    def _picked(self, x: torch.Tensor, order: np.ndarray) -> torch.Tensor:
        if np.array_equal(order, np.arange(self.pieces)):
            return x
        return x.index_select(0, to_device(order, self.device))


class _Moved(torch.autograd.Function):
    """ChunkedInputs source of x at rows target of a tensor of `size` rows, zero elsewhere.

    No row comes twice, so that the gradient is moved back and nothing is added up.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, source: torch.Tensor, target: torch.Tensor, size: int
    ) -> torch.Tensor:
        ctx.save_for_backward(source, target)
        ctx.size = x.shape[0]
        return _moved(x, source, target, size)

    @staticmethod
    @first_order_only("linear attention")
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        source, target = ctx.saved_tensors
        return _moved(gradient, target, source, ctx.size), None, None, None


def _moved(x: torch.Tensor, source: torch.Tensor, target: torch.Tensor, size: int) -> torch.Tensor:
    result = x.new_zeros((size, *x.shape[1:]))
    return result.index_copy_(0, target, x.index_select(0, source))


SIZE = 64  # rows of a chunk


class ChunkedInputs(NamedTuple):
    """A rank's rows in the accumulation dtype, chunk by chunk: q, k [n, b, g, 1, c, d] (q only for
    outputs), v [n, b, g, r, c, w], beta [n, b, g, r, c, 1], and the decay within each chunk."""

    q: torch.Tensor | None
    k: torch.Tensor
    v: torch.Tensor
    beta: torch.Tensor | None
    decay: Scalar | Vector


def chunk_rows(
    grid: ChunkGrid,
    q: torch.Tensor | None,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor | None,
    beta: torch.Tensor | None,
    dtype: torch.dtype,
) -> ChunkedInputs:
    """The tensors of `base.LinearInputs`, chunk by chunk."""
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
    return ChunkedInputs(
        None if q is None else shared(q),
        shared(k),
        own(v),
        None if beta is None else own(beta.unsqueeze(-1)),
        within,
    )


def piece_maps(form: Form, grid: ChunkGrid, rows: ChunkedInputs) -> tuple[torch.Tensor, ...]:
    """The (transition, increment) of each piece as `base.Maps` has them, or (increment,) where
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
    form: Form, grid: ChunkGrid, rows: ChunkedInputs, entering: torch.Tensor, scale: float
) -> torch.Tensor:
    """[s, b, h, w] in the accumulation dtype; entering [p, b, h, d, w]."""
    assert rows.q is not None
    solved = _solved(rows) if form.delta else None
    start = grid.sorted(entering).unflatten(2, (rows.v.shape[2], -1))
    states, written, _ = _sweep(grid, rows, rows.decay.keys(rows.k), start, solved)
    outs = rows.decay.read(rows.q, states)
    outs = outs + rows.decay.pairs(rows.q, rows.k) @ written
    return grid.scatter((outs * scale).flatten(2, 3).permute(0, 3, 1, 2, 4))


def _solved(rows: ChunkedInputs) -> torch.Tensor:
    """(I + L)^-1 diag(beta) [n, b, g, r, c, c]."""
    assert rows.beta is not None
    lower = rows.beta * rows.decay.pairs(rows.k, rows.k)  # whose diagonal is not read
    right = torch.diag_embed(rows.beta.squeeze(-1))
    return torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)


def _sweep(
    grid: ChunkGrid,
    rows: ChunkedInputs,
    keys: Keys,
    start: torch.Tensor,
    solved: torch.Tensor | None,
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


def _split(grid: ChunkGrid, x: torch.Tensor | None) -> list:
    """By the chunks' numbers; what is the same for all chunks stays so."""
    if x is None or x.shape[0] != grid.chunks:
        return [x] * len(grid.active)
    return list(x.split(grid.active))


def _times(x: torch.Tensor, factor: torch.Tensor | None) -> torch.Tensor:
    return x if factor is None else x * factor


def _chunked(grid: ChunkGrid, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[s, b, h, ...] -> [n, b, h, c, ...]."""
    return grid.gather(x).permute(0, 2, 3, 1, 4).contiguous().to(dtype)


Tensors = tuple[torch.Tensor, ...]


def recomputed(function: Callable[..., Tensors], *tensors: torch.Tensor | None) -> Tensors:
    """function(*tensors), a tuple of tensors; differentiable once."""
    return _Recomputed.apply(function, *tensors)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, function: Callable[..., Tensors], *tensors: torch.Tensor | None
    ) -> Tensors:
        ctx.function = function
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        with _full_precision(tensors):
            return function(*tensors)

    @staticmethod
    @first_order_only("linear attention")
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        wanted = ctx.needs_input_grad[1:]
        leaves = [
            None if x is None else x.detach().requires_grad_(need)
            for x, need in zip(ctx.saved_tensors, wanted, strict=True)
        ]
        with torch.enable_grad(), _full_precision(leaves):
            results = ctx.function(*leaves)
            pairs = [
                (result, gradient)
                for result, gradient in zip(results, gradients, strict=True)
                if gradient is not None and result.requires_grad
            ]
            needed = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
            of_needed: Any = [None] * len(needed)
            if pairs and needed:
                ends, arrived = zip(*pairs, strict=True)
                of_needed = torch.autograd.grad(ends, needed, arrived, allow_unused=True)
        each = iter(
            torch.zeros_like(leaf) if gradient is None else gradient
            for leaf, gradient in zip(needed, of_needed, strict=True)
        )
        return None, *(next(each) if need else None for need in wanted)


def _full_precision(tensors: Any) -> torch.autocast:
    """Without autocast, which would round states to bf16, and gradients where backward is called
    under it."""
    kind = next(x.device.type for x in tensors if x is not None)
    return torch.autocast(kind, enabled=False)


class ChunkwiseKernel:
    """The kernel "torch"."""

    name = "torch"

    def refusal(self, form: Form, inputs: LinearInputs) -> str | None:
        return None

    def run(self, form: Form, inputs: LinearInputs, cut: RankPieces) -> ChunkwiseRun:
        return ChunkwiseRun(form, inputs, cut)


class ChunkwiseRun:
    """An `base.Run`. The increments and transitions of pieces that need no map are zero."""

    def __init__(self, form: Form, inputs: LinearInputs, cut: RankPieces):
        self.inputs = inputs
        self.work = _Work(form, cut, inputs.scale, accumulation_dtype(inputs.v.dtype))
        _, k, v, decay, beta, _ = inputs
        if any(cut.mapped):
            *transition, increment = recomputed(self.work.maps, k, v, decay, beta)
            self.maps = Maps(transition[0] if transition else None, increment)
        else:
            self.maps = no_maps(form, inputs, len(cut.lengths), self.work.dtype)

    def outputs(self, entering: torch.Tensor) -> torch.Tensor:
        q, k, v, decay, beta, _ = self.inputs
        (out,) = recomputed(self.work.outputs, q, k, v, decay, beta, entering)
        return out


class _Work(NamedTuple):
    """What is computed, without a tensor: backward holds it, and what it held besides the saved
    tensors would never be freed."""

    form: Form
    cut: RankPieces
    scale: float
    dtype: torch.dtype

    def maps(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        decay: torch.Tensor | None,
        beta: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        """Transitions, if the form has them, and increments."""
        chosen = [i for i, mapped in enumerate(self.cut.mapped) if mapped]
        grid = self._grid(chosen, v)
        rows = chunk_rows(grid, None, k, v, decay, beta, self.dtype)
        maps = piece_maps(self.form, grid, rows)
        if len(chosen) == len(self.cut.mapped):
            return maps
        spread = iter(range(len(chosen)))
        at = [next(spread) if mapped else None for mapped in self.cut.mapped]
        return tuple(
            torch.stack([torch.zeros_like(x[0]) if i is None else x[i] for i in at]) for x in maps
        )

    def outputs(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        decay: torch.Tensor | None,
        beta: torch.Tensor | None,
        entering: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """[s, b, h, w] in the dtype of v, alone in a tuple."""
        grid = self._grid(range(len(self.cut.lengths)), v)
        rows = chunk_rows(grid, q, k, v, decay, beta, self.dtype)
        out = outputs(self.form, grid, rows, entering.to(self.dtype), self.scale)
        return (out.to(v.dtype),)

    def _grid(self, chosen: Sequence[int], v: torch.Tensor) -> ChunkGrid:
        lengths = self.cut.lengths
        spans = [(sum(lengths[:i]), lengths[i]) for i in chosen]
        return ChunkGrid(spans, v.shape[0], SIZE, v.device)
