# SPDX-License-Identifier: Apache-2.0
"""Kernel "torch": the chunkwise form in torch operators, for any dtype and device.

Terms: a piece is a run of consecutive positions of one document on one rank. A chunk is at most
`SIZE` rows of a piece. A segment is a number of consecutive chunks of one or several pieces.

Memory: between forward and backward the kernel keeps q, k, v, decay, beta and the entering states
of the pieces, and no other tensor per token. Backward computes the chunks again. Forward and
backward process a shard segment by segment. Backward first runs over the chunks to compute the
states between segments, then processes the segments from the last to the first. At any time only
the gradients and the tensors of one segment are in memory. The accumulation dtype is float32, and
float64 for float64 inputs.

Chunks: the rows of a chunk write U [c, w] into the state. For additive forms U = V. For delta rules
U is the solution of

    (I + L) U = beta (V - K~ S),   L[t, j] = beta_t k_t^T exp(G_t - G_j) k_j  for j < t,

where S is the state before the chunk. K~ has the keys with the decay from the start of the chunk to
their row. The state after the chunk is exp(G_end) S + K^^T U, where K^ has the keys with the decay
from their row to the end of the chunk. The outputs are scale (Q~ S + (Q D K^T) U). The map of a
piece is the result of the same recurrence for S = [I | 0] and V = [0 | V]. Maps and outputs share
the inverse of I + L, which is computed once in forward and once in backward.

Decays: G_t is the sum of the decays (logarithms) of rows 0..t of a chunk. The update that row j
wrote has the factor exp(G_t - G_j) at a later row t, and exp(G_end - G_j) after the chunk. The
state before the chunk has the factor exp(G_t). exp(-G_j) alone may overflow and is never computed.
exp(G_t) overflows if decays grow to inf within a chunk. In the recurrence, this affects only
nonzero states. A decay that erases the state, such as -inf, is replaced by one of `FLOORS`, so that
differences of sums are finite. Sums are in float64, because small differences of large sums matter.

Shape letters: n chunks, p pieces, b batch, g query/key heads, r value heads per query/key head, h =
g * r value heads, c rows of a chunk, d width of keys, w width of values, x any width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from ...kernels.autograd import first_order_only
from ...kernels.online_softmax import accumulation_dtype
from ..forms import Form
from .base import LinearInputs, Maps, RankPieces, no_maps

# Floor of the decay by accumulation dtype. exp(floor + g) is 0 for the largest g with a finite
# exp(g). The float64 sum of floors over a chunk is still exact enough for exp.
FLOORS = {torch.float32: -1e4, torch.float64: -1500.0}


class DecayedKeys(NamedTuple):
    """Keys with their decay from the start of a chunk, and to the end of the chunk.

    With one decay per head, the keys stay unchanged, and the value heads share them. The factors
    [n, p, b, g, r, c, 1] are then applied to the values.

    Attributes:
        read: Keys with the decay from the start of the chunk to their row [n, p, b, g, r | 1, c,
            d].
        written: Keys with the decay from their row to the end of the chunk, of the same shape.
        read_factor: Decay from the start for unchanged keys, or None.
        written_factor: Decay to the end for unchanged keys, or None.
        state_factor: Decay of the state over the chunk [n, p, b, g, r, 1 | d, 1].
    """

    read: torch.Tensor
    written: torch.Tensor
    read_factor: torch.Tensor | None
    written_factor: torch.Tensor | None
    state_factor: torch.Tensor


class ScalarDecay:
    """Scalar decays within chunks, one number per row and value head.

    Methods return keys, products and outputs with the decays applied.

    Args:
        decay: Logarithms of the decays [n, p, b, g, r, c]; see the shape letters of this module.
        dtype: Accumulation dtype.
    """

    def __init__(self, decay: torch.Tensor, dtype: torch.dtype):
        self.total = decay.clamp(min=FLOORS[dtype]).double().cumsum(-1)
        self.dtype = dtype

    def pairs(self, a: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """Return a_t^T exp(G_t - G_j) k_j [..., n, p, b, g, r, c, c] for j <= t, and 0 for j > t.

        G_t is the sum of the decays of rows 0 to t of a chunk.

        Args:
            a: Tensor with the shape of k, or several such tensors in a leading dimension.
            k: Keys [n, p, b, g, 1, c, d].
        """
        away = self.total.unsqueeze(-1) - self.total.unsqueeze(-2)
        return (a @ k.transpose(-1, -2)) * away.to(self.dtype).masked_fill(
            _later(away.shape[-1], away.device), float("-inf")
        ).exp()

    def keys(self, k: torch.Tensor) -> DecayedKeys:
        """Apply the decays to keys k [n, p, b, g, 1, c, d]."""
        end = self.total[..., -1:]
        left = (end - self.total).to(self.dtype).exp().unsqueeze(-1)
        state_factor = end.to(self.dtype).exp().unsqueeze(-1)
        return DecayedKeys(k, k, self._entering(), left, state_factor)

    def read(self, q: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Return the outputs [n, p, b, g, r, c, x] of queries for the states before each chunk.

        Args:
            q: Queries [n, p, b, g, 1, c, d].
            states: States [n, p, b, g, r, d, x].
        """
        return (q @ states) * self._entering()

    def _entering(self) -> torch.Tensor:
        return self.total.to(self.dtype).exp().unsqueeze(-1)


class VectorDecay:
    """Vector decays [n, p, b, g, r, c, d] within chunks; c must be a power of two."""

    def __init__(self, decay: torch.Tensor, dtype: torch.dtype):
        self.total = decay.clamp(min=FLOORS[dtype]).double().cumsum(-2)
        self.dtype = dtype

    def pairs(self, a: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """Return the same as `ScalarDecay.pairs`.

        Blocks of rows are merged in pairs, starting with single rows. In each pair, the decay from
        row j of the earlier block to row t of the later block is split at the end of the earlier
        block. The earlier block has the factor exp(G_end - G_j), and the later block has the factor
        exp(G_t - G_end). No factor exceeds 1, unless a decay is positive.
        """
        total, dtype = self.total, self.dtype
        a, k = a.expand(torch.broadcast_shapes(a.shape, total.shape)), k.expand_as(total)
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

    def keys(self, k: torch.Tensor) -> DecayedKeys:
        """Return the same as `ScalarDecay.keys`."""
        end = self.total[..., -1:, :]
        written = k * (end - self.total).to(self.dtype).exp()
        state_factor = end.to(self.dtype).exp().transpose(-1, -2)
        return DecayedKeys(k * self._entering(), written, None, None, state_factor)

    def read(self, q: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Return the same as `ScalarDecay.read`."""
        return (q * self._entering()) @ states

    def _entering(self) -> torch.Tensor:
        return self.total.to(self.dtype).exp()


def _later(size: int, device: torch.device) -> torch.Tensor:
    """Return a bool mask [size, size], True in columns j > t of row t."""
    return torch.ones(size, size, dtype=torch.bool, device=device).triu(1)


SIZE = 64  # rows of a chunk
# Bytes of a segment's keys in the accumulation dtype. Computing a segment needs up to 50 times this
# memory. Smaller segments launch more kernels in total.
SEGMENT_BYTES = 16 << 20


class Segment(NamedTuple):
    """Consecutive chunks of one or several pieces, which are computed at once.

    Attributes:
        chunks: Number of chunks of each piece in this segment.
        spans: Rows (start, stop) of each piece. The last chunk of a piece may have fewer rows.
    """

    chunks: int
    spans: tuple[tuple[int, int], ...]


class PieceGroup(NamedTuple):
    """Pieces that are processed together, segment by segment, sorted by descending length.

    Segments after the end of a piece omit the piece.

    Attributes:
        pieces: Indices of the pieces.
        mapped: True if all pieces need a map, False if no piece does.
        segments: Segments of the group.
    """

    pieces: tuple[int, ...]
    mapped: bool
    segments: tuple[Segment, ...]


def groups_of(cut: RankPieces, limit: int) -> list[PieceGroup]:
    """Group pieces of similar length that all need a map, or all need none.

    A group has at most `limit` pieces.
    """
    starts = [0, *accumulate(cut.lengths)]
    groups = []
    for mapped in (True, False):
        chosen = [i for i, needs_map in enumerate(cut.mapped) if needs_map == mapped]
        chosen.sort(key=lambda i: -cut.lengths[i])
        for first in range(0, len(chosen), limit):
            pieces = tuple(chosen[first : first + limit])
            spans = [(starts[i], starts[i + 1]) for i in pieces]
            groups.append(PieceGroup(pieces, mapped, tuple(_segments(spans, limit))))
    return groups


def _segments(spans: Sequence[tuple[int, int]], limit: int) -> Iterator[Segment]:
    """Yield the segments of a group of pieces, from the first rows of the pieces to the last.

    A segment takes the same number of chunks from each piece that still has rows.

    Args:
        spans: Rows (start, stop) of each piece, longest piece first. At most `limit` pieces.
        limit: Largest number of chunks of a segment, over all pieces.
    """
    chunks = [-(-(stop - start) // SIZE) for start, stop in spans]
    done = 0
    while done < max(chunks):
        active = [left for left in chunks if left > done]
        count = min(active[-1] - done, max(1, limit // len(active)))
        first, last = done * SIZE, (done + count) * SIZE
        piece_spans = (
            (start + first, min(start + last, stop)) for start, stop in spans[: len(active)]
        )
        yield Segment(count, tuple(piece_spans))
        done += count


def gather(x: torch.Tensor, segment: Segment, dtype: torch.dtype) -> torch.Tensor:
    """Copy the rows of a segment from x into chunks, padded with zeros.

    Args:
        x: Rows [s, b, h, ...].
        segment: Segment to gather.
        dtype: Dtype of the chunks.

    Returns:
        The chunks [n, p, b, h, c, ...].
    """
    rows, parts = segment.chunks * SIZE, []
    for start, stop in segment.spans:
        part = x[start:stop]
        if stop - start < rows:
            part = torch.cat([part, part.new_zeros((rows - len(part), *part.shape[1:]))])
        parts.append(part.unflatten(0, (segment.chunks, SIZE)))
    chunks = parts[0].unsqueeze(1) if len(parts) == 1 else torch.stack(parts, 1)
    return chunks.movedim(2, 4).to(dtype).contiguous()


def scatter(target: torch.Tensor, chunks: torch.Tensor, segment: Segment) -> None:
    """Add chunks [n, p, b, h, c, ...] to the rows of the segment in target [s, b, h, ...]."""
    for (start, stop), part in zip(segment.spans, chunks.movedim(4, 2).unbind(1), strict=True):
        target[start:stop].add_(part.flatten(0, 1)[: stop - start])


class SegmentRows(NamedTuple):
    """Tensors of `base.LinearInputs` of a rank, or chunks of these tensors from `gather`.

    A tensor is None if the form does not have it or the caller does not need it.
    """

    q: torch.Tensor | None
    k: torch.Tensor
    v: torch.Tensor
    decay: torch.Tensor | None
    beta: torch.Tensor | None

    def gathered(self, segment: Segment, dtype: torch.dtype) -> SegmentRows:
        """Return the detached chunks of a segment, in `dtype`."""
        chunks = (None if x is None else gather(x, segment, dtype).detach() for x in self)
        return SegmentRows(*chunks)  # pyright: ignore[reportArgumentType]


class SegmentResult(NamedTuple):
    """Result of a segment.

    Attributes:
        outputs: Outputs [n, p, b, h, c, x]; None without queries.
        states: States after the segment [p, b, h, d, x].
        inverse: (I + L)^-1 [n, p, b, g, r, c, c]; None for additive forms.
    """

    outputs: torch.Tensor | None
    states: torch.Tensor
    inverse: torch.Tensor | None


def run_segment(
    rows: SegmentRows, states: torch.Tensor, scale: float, inverse: torch.Tensor | None
) -> SegmentResult:
    """Compute the chunks of a segment.

    Args:
        rows: Chunks of the tensors.
        states: States before the segment [p, b, h, d, x]. If x > w, x - w columns of zeros are put
            before the values.
        scale: Factor of the outputs.
        inverse: (I + L)^-1 if it was computed before, or None.
    """
    heads, count = rows.k.shape[3], len(rows.k)
    q, k = (None if x is None else x.unsqueeze(4) for x in (rows.q, rows.k))
    assert k is not None
    v = rows.v.unflatten(3, (heads, -1))
    v = torch.nn.functional.pad(v, (states.shape[-1] - v.shape[-1], 0))
    within = _within(rows)
    keys, factor = within.keys(k), None
    scores = None
    if rows.beta is not None:
        beta = rows.beta.unflatten(3, (heads, -1)).unsqueeze(-1)
        if inverse is None or torch.is_grad_enabled():
            if q is None:
                key_products = within.pairs(k, k)
            else:
                key_products, scores = within.pairs(torch.stack([k, q]), k)
            inverse = _Inverse.apply(beta * key_products, inverse)  # pyright: ignore[reportAssignmentType]
        factor = beta if keys.read_factor is None else beta * keys.read_factor
        v = beta * v
    tensors = (v, inverse, keys.read, factor, keys.written, keys.written_factor, keys.state_factor)
    state, before, written = states.unflatten(2, (heads, -1)), [], []
    for (
        values,
        solved,
        read_keys,
        read_factor,
        written_keys,
        write_factor,
        state_factor,
    ) in _by_chunk(tensors, count):
        if solved is not None:
            values = solved @ (values - (read_keys @ state) * read_factor)
        before.append(state)
        written.append(values)
        state = state_factor * state + written_keys.transpose(-1, -2) @ _times(values, write_factor)
    outputs = None
    if q is not None:
        scores = within.pairs(q, k) if scores is None else scores
        outputs = within.read(q, torch.stack(before)) + scores @ torch.stack(written)
        outputs = (outputs * scale).flatten(3, 4)
    return SegmentResult(outputs, state.flatten(2, 3), inverse)


def _within(rows: SegmentRows) -> ScalarDecay | VectorDecay:
    """Return the decays of chunks, as an object with the operations on decayed keys."""
    heads, dtype = rows.k.shape[3], rows.v.dtype
    if rows.decay is None:  # one zero, broadcast to all rows
        return ScalarDecay(rows.k.new_zeros((1,) * 5 + (SIZE,)), dtype)
    decay = rows.decay.unflatten(3, (heads, -1))
    return ScalarDecay(decay, dtype) if decay.dim() == 6 else VectorDecay(decay, dtype)


def _by_chunk(tensors: Sequence[torch.Tensor | None], count: int) -> Iterator[tuple[Any, ...]]:
    """Yield the tensors of each of `count` chunks.

    A tensor with a leading dimension of 1 is shared by all chunks.
    """
    missing = [None] * count
    columns = (missing if x is None else x.expand(count, *x.shape[1:]).unbind() for x in tensors)
    return zip(*columns, strict=True)


def _times(x: torch.Tensor, factor: torch.Tensor | None) -> torch.Tensor:
    return x if factor is None else x * factor


class _Inverse(torch.autograd.Function):
    """Autograd function that returns (I + L)^-1, where L is the input below the diagonal.

    If the caller passes a known inverse, it is returned unchanged.
    """

    @staticmethod
    def forward(ctx: Any, lower: torch.Tensor, inverse: torch.Tensor | None) -> torch.Tensor:
        if inverse is None:
            unit = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
            unit = unit.expand(lower.shape)
            inverse = torch.linalg.solve_triangular(lower, unit, upper=False, unitriangular=True)
        ctx.save_for_backward(inverse)
        return inverse.detach()  # pyright: ignore[reportOptionalMemberAccess]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        transposed = ctx.saved_tensors[0].transpose(-1, -2)
        return -(transposed @ gradient @ transposed).tril(-1), None


class ChunkwiseKernel:
    """Kernel "torch": linear attention in chunks, with torch operators."""

    name = "torch"

    def refusal(self, form: Form, inputs: LinearInputs) -> str | None:
        return None

    def run(self, form: Form, inputs: LinearInputs, cut: RankPieces) -> ChunkwiseRun:
        return ChunkwiseRun(form, inputs, cut)


class ChunkwiseRun:
    """`base.PieceRun` that computes chunks; pieces that need no map have maps of zeros."""

    def __init__(self, form: Form, inputs: LinearInputs, cut: RankPieces):
        self.work = _ChunkedShard(form, inputs, cut)
        self.maps = no_maps(form, inputs, len(cut.lengths), self.work.dtype)
        tensors = inputs[1:5]
        if any(cut.mapped):
            mapped: Any = _MapsOfPieces.apply(self.work, *tensors)
            self.maps = Maps(mapped[0], mapped[1])
            # Outputs use the k, v, decay and beta that the maps returned. The gradients of the
            # outputs then reach the backward of the maps, which adds its own gradients in place.
            tensors = [
                x if replacement is None else replacement
                for x, replacement in zip(tensors, mapped[2:], strict=True)
            ]
        self.rows = SegmentRows(inputs.q, *tensors)  # pyright: ignore[reportArgumentType]

    def outputs(self, entering: torch.Tensor) -> torch.Tensor:
        return _OutputsOfPieces.apply(self.work, *self.rows, entering)  # pyright: ignore[reportReturnType]


class _ChunkedShard:
    """Computation over the segments of a shard, for the two autograd functions of this module.

    Attributes:
        inverses: (I + L)^-1 of each segment of pieces that need a map. In forward, outputs reuse
            the inverses that maps have computed. In backward, maps reuse the inverses that outputs
            have computed.
    """

    def __init__(self, form: Form, inputs: LinearInputs, cut: RankPieces):
        self.form, self.cut, self.scale = form, cut, inputs.scale
        self.dtype = accumulation_dtype(inputs.v.dtype)
        _, b, h, _ = inputs.v.shape
        of_chunk = SIZE * b * h * inputs.k.shape[-1] * self.dtype.itemsize
        self.groups = groups_of(cut, max(1, SEGMENT_BYTES // of_chunk))
        self.inverses: dict[Segment, torch.Tensor] = {}

    @property
    def mapped(self) -> list[PieceGroup]:
        """Groups of the pieces that need a map."""
        return [group for group in self.groups if group.mapped]

    def states(
        self, rows: SegmentRows, group: PieceGroup, states: torch.Tensor, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the states after the pieces of a group, and write the outputs of their rows.

        Args:
            rows: Tensors of the rank.
            group: Group of pieces.
            states: Entering states [p, b, h, d, x].
            out: Outputs of all rows [s, b, h, w], which are updated; None to compute only states.
        """
        for segment in group.segments:
            active = len(segment.spans)
            chunks = rows.gathered(segment, self.dtype)
            outputs, behind, _ = self._pass(chunks, segment, states[:active], keep=out is None)
            if outputs is not None and out is not None:
                scatter(out, outputs, segment)
            states = torch.cat([behind, states[active:]])
        return states

    def gradients(
        self,
        rows: SegmentRows,
        group: PieceGroup,
        states: torch.Tensor,
        of_out: torch.Tensor | None,
        of_behind: torch.Tensor | None,
        grads: Sequence[torch.Tensor | None],
    ) -> torch.Tensor:
        """Return the gradient of a group's entering states, and add the gradients of its rows.

        Args:
            rows: Tensors of the rank.
            group: Group of pieces.
            states: Entering states [p, b, h, d, x].
            of_out: Gradient of all outputs; None means zero.
            of_behind: Gradient of the states after the pieces; None means zero.
            grads: Gradients of the tensors of `rows`, which are updated; None for a tensor that
                needs no gradient.
        """
        entered = []
        for segment in group.segments:
            active = len(segment.spans)
            entered.append(states[:active])
            if segment is not group.segments[-1]:
                chunks = rows._replace(q=None).gathered(segment, self.dtype)
                behind = self._pass(chunks, segment, states[:active], keep=True).states
                states = torch.cat([behind, states[active:]])
        of_states = torch.zeros_like(states) if of_behind is None else of_behind
        for segment, state in zip(reversed(group.segments), reversed(entered), strict=True):
            active = len(segment.spans)
            chunks = rows.gathered(segment, self.dtype)
            leaves = [(x.requires_grad_(), grad) for x, grad in zip(chunks, grads, strict=True)
                      if x is not None and grad is not None]  # fmt: skip
            state = state.detach().requires_grad_()
            with torch.enable_grad():
                keep = of_out is not None and group.mapped
                result = self._pass(chunks, segment, state, keep)
            outputs, upstream = [], []
            if of_out is not None and result.outputs is not None:
                outputs, upstream = [result.outputs], [gather(of_out, segment, self.dtype)]
            if of_behind is not None or segment is not group.segments[-1]:
                outputs, upstream = [*outputs, result.states], [*upstream, of_states[:active]]
            *leaf_grads, of_state = torch.autograd.grad(
                outputs, [*(x for x, _ in leaves), state], upstream, allow_unused=True
            )
            for (_, grad), part in zip(leaves, leaf_grads, strict=True):
                if part is not None:
                    scatter(grad, part, segment)
            of_states = torch.cat([of_state, of_states[active:]])
        return of_states

    def _pass(
        self, rows: SegmentRows, segment: Segment, states: torch.Tensor, keep: bool
    ) -> SegmentResult:
        """Compute a segment, with the stored inverse (I + L)^-1 if there is one.

        If `keep` is True, store the inverse for the next computation of the segment.
        """
        result = run_segment(rows, states, self.scale, self.inverses.pop(segment, None))
        if keep and result.inverse is not None:
            self.inverses[segment] = result.inverse.detach()
        return result


class _MapsOfPieces(torch.autograd.Function):
    """Autograd function that computes the maps of the pieces.

    Inputs are k, v, decay and beta. Outputs are the transition of each piece (None for the
    identity), the increment of each piece, and views of the four inputs (None for an input that
    needs no gradient).
    """

    @staticmethod
    def forward(ctx: Any, work: _ChunkedShard, *tensors: torch.Tensor | None) -> tuple[Any, ...]:
        rows = SegmentRows(None, *tensors)  # pyright: ignore[reportArgumentType]
        ctx.work = work
        ctx.save_for_backward(*tensors)
        _, b, h, w = rows.v.shape
        d, pieces = rows.k.shape[-1], len(work.cut.lengths)
        transition, increment = None, rows.v.new_zeros((pieces, b, h, d, w), dtype=work.dtype)
        if work.form.delta:
            transition = increment.new_zeros((pieces, b, h, d, d))
        elif rows.decay is not None:
            transition = _state_factors(work, rows.decay)
        with _full_precision(rows.k):
            for group in work.mapped:
                behind = work.states(rows, group, _unit(work, rows, group), None)
                for piece, state in zip(group.pieces, behind.unbind(), strict=True):
                    increment[piece] = state[..., -w:]
                    if work.form.delta and transition is not None:
                        transition[piece] = state[..., :d]
        pairs = zip(tensors, ctx.needs_input_grad[1:], strict=True)
        return transition, increment, *(x.view_as(x) if need else None for x, need in pairs)  # pyright: ignore

    @staticmethod
    @first_order_only("linear attention")
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, of_transition: torch.Tensor | None, of_increment: torch.Tensor, *of_tensors: Any
    ) -> tuple[torch.Tensor | None, ...]:
        work, rows = ctx.work, SegmentRows(None, *ctx.saved_tensors)
        # These gradients may be changed in place: only `_OutputsOfPieces` or torch made them.
        grads = SegmentRows(None, *of_tensors)
        with _full_precision(rows.k):
            for group in work.mapped:
                of_behind = torch.stack([of_increment[i] for i in group.pieces])
                if work.form.delta and of_transition is not None:
                    of_starts = torch.stack([of_transition[i] for i in group.pieces])
                    of_behind = torch.cat([of_starts, of_behind], -1)
                # Skip columns without a gradient: an inf in such a column would become NaN.
                start = _unit(work, rows, group) * (of_behind != 0).any(-2, keepdim=True)
                work.gradients(rows, group, start, None, of_behind, grads)
        if of_transition is not None and not work.form.delta and rows.decay is not None:
            _add_factor_gradient(work, grads.decay, rows.decay, of_transition)
        return None, *grads[1:]


class _OutputsOfPieces(torch.autograd.Function):
    """Autograd function that computes the outputs of the pieces.

    Inputs are q, k, v, decay, beta and entering states [p, b, h, d, w]. The output is [s, b, h, w].
    """

    @staticmethod
    def forward(ctx: Any, work: _ChunkedShard, *inputs: torch.Tensor | None) -> torch.Tensor:
        *tensors, entering = inputs
        assert entering is not None
        rows = SegmentRows(*tensors)  # pyright: ignore[reportArgumentType]
        ctx.work = work
        ctx.save_for_backward(*inputs)
        out = torch.zeros_like(rows.v)
        with _full_precision(rows.k):
            for group in work.groups:
                work.states(rows, group, _of_group(work, entering, group), out)
        return out

    @staticmethod
    @first_order_only("linear attention")
    def backward(ctx: Any, of_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        work, (*tensors, entering) = ctx.work, ctx.saved_tensors
        rows = SegmentRows(*tensors)
        pairs = zip(rows, ctx.needs_input_grad[1:], strict=False)
        grads = SegmentRows(*(torch.zeros_like(x) if need else None for x, need in pairs))  # pyright: ignore
        of_entering = torch.empty_like(entering)
        with _full_precision(rows.k):
            for group in work.groups:
                states = _of_group(work, entering, group)
                of_states = work.gradients(rows, group, states, of_out, None, grads)
                for piece, of_state in zip(group.pieces, of_states.unbind(), strict=True):
                    of_entering[piece] = of_state
        return None, *grads, of_entering


def _unit(work: _ChunkedShard, rows: SegmentRows, group: PieceGroup) -> torch.Tensor:
    """Return the initial states for the maps of a group: [I | 0] for delta rules, else zeros."""
    _, b, h, w = rows.v.shape
    size = (len(group.pieces), b, h, rows.k.shape[-1])
    if not work.form.delta:
        return rows.v.new_zeros((*size, w), dtype=work.dtype)
    unit = torch.eye(size[-1], dtype=work.dtype, device=rows.v.device)
    return torch.nn.functional.pad(unit.expand(*size, size[-1]), (0, w))


def _of_group(work: _ChunkedShard, states: torch.Tensor, group: PieceGroup) -> torch.Tensor:
    """Select the states [p, b, h, d, w] of the pieces in `group` from the states of all pieces."""
    return torch.stack([states[piece] for piece in group.pieces]).to(work.dtype)


def _state_factors(work: _ChunkedShard, decay: torch.Tensor) -> torch.Tensor:
    """Return the decay of the state over each piece that needs a map, [p, b, h] or [p, b, h, d]."""
    factors = decay.new_zeros((len(work.cut.lengths), *decay.shape[1:]), dtype=work.dtype)
    for piece, part in enumerate(decay.split(work.cut.lengths)):
        if work.cut.mapped[piece]:
            total = part.clamp(min=FLOORS[work.dtype]).sum(0, dtype=torch.float64)
            factors[piece] = total.to(work.dtype).exp()
    return factors


def _add_factor_gradient(
    work: _ChunkedShard, grad: torch.Tensor | None, decay: torch.Tensor, of_factors: torch.Tensor
) -> None:
    """Add the gradient of the decays through `_state_factors` to `grad`, unless `grad` is None.

    A zero gradient stays zero even for a factor that has grown to inf.
    """
    if grad is None:
        return
    of_total = torch.where(of_factors == 0, 0, of_factors * _state_factors(work, decay)).to(
        grad.dtype
    )
    parts = zip(grad.split(work.cut.lengths), decay.split(work.cut.lengths), of_total, strict=True)
    for part, logs, of_piece in parts:
        part += torch.where(logs < FLOORS[work.dtype], 0, of_piece)


def _full_precision(x: torch.Tensor) -> torch.autocast:
    """Return a context without autocast.

    Autocast would round states to bf16, and gradients if backward runs under it.
    """
    return torch.autocast(x.device.type, enabled=False)
