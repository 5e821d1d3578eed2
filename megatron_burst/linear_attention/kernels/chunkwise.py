# SPDX-License-Identifier: Apache-2.0
"""The kernel "torch": the chunkwise form in torch operators, for any dtype and device.

Between forward and backward it holds q, k, v, decay, beta and the states that enter the pieces, and
nothing per token besides: backward computes the chunks again. Both go through a shard segment by
segment, backward from the last to the first from states that a pass over the chunks has found
before, so that no more than the gradients and what one segment needs is there at a time. It
computes in the accumulation dtype, float32, or float64 for float64 inputs.

What the rows of a chunk write into the state is U [c, w]: the values themselves where they are
added, and for delta rules the solution of

    (I + L) U = beta (V - K~ S),   L[t, j] = beta_t k_t^T exp(G_t - G_j) k_j  for j < t,

with S the state before the chunk and K~ the keys with the decay since then. The state behind the
chunk is exp(G_end) S + K^^T U, K^ being what is left of the keys at its end, and the answers are
scale (Q~ S + (Q D K^T) U). The map of a piece is what the same recurrence makes of S = [I | 0] and
V = [0 | V]. The inverse of I + L, the same for maps and outputs, is made once in forward and once
in backward.

With G_t the sum of the decays (logarithms) of rows 0..t of a chunk, the state that a row j wrote is
worth exp(G_t - G_j) to a later row t, that of before the chunk exp(G_t), and what row j wrote is
worth exp(G_end - G_j) after the chunk. exp(-G_j) alone may overflow, and is never taken; exp(G_t)
overflows where decays grow beyond all numbers within a chunk, which the recurrence shows only for a
state that is not zero. A decay that leaves nothing, as -inf does, counts as one of `FLOORS`:
differences of sums are numbers. Sums are in float64, because small differences of large sums are
what is left over.

Shape letters: n chunks and p pieces (leading), b batch, g query/key heads, r value heads of each,
c rows of a chunk, d width of keys, w width of values, x any width.
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

# By dtype: exp of the floor is 0, also after growth that exp can barely tell; and sums of a chunk
# of them, in float64, still have the digits of what exp can tell.
FLOORS = {torch.float32: -1e4, torch.float64: -1500.0}


class Keys(NamedTuple):
    """Keys as the state meets them: read [n, p, b, g, r | 1, c, d], with what was there before the
    chunk; written, what is left of them after it. Where a decay is one number per head the keys
    stay as they are, shared by the heads, and the factors [n, p, b, g, r, c, 1] go to the side of
    the values. kept [n, p, b, g, r, 1 | d, 1]: of the state, over the chunk.
    """

    read: torch.Tensor
    written: torch.Tensor
    read_factor: torch.Tensor | None
    written_factor: torch.Tensor | None
    kept: torch.Tensor


class Scalar:
    """decay [n, p, b, g, r, c]."""

    def __init__(self, decay: torch.Tensor, dtype: torch.dtype):
        self.total = decay.clamp(min=FLOORS[dtype]).double().cumsum(-1)
        self.dtype = dtype

    def pairs(self, a: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """a_t^T D k_j [..., n, p, b, g, r, c, c] where j <= t, else 0; k [n, p, b, g, 1, c, d], a
        like k or several of these.
        """
        away = self.total.unsqueeze(-1) - self.total.unsqueeze(-2)
        return (a @ k.transpose(-1, -2)) * away.to(self.dtype).masked_fill(
            _later(away.shape[-1], away.device), float("-inf")
        ).exp()

    def keys(self, k: torch.Tensor) -> Keys:
        """What the state meets of keys k [n, p, b, g, 1, c, d]."""
        end = self.total[..., -1:]
        left = (end - self.total).to(self.dtype).exp().unsqueeze(-1)
        kept = end.to(self.dtype).exp().unsqueeze(-1)
        return Keys(k, k, self._entering(), left, kept)

    def read(self, q: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """What q [n, p, b, g, 1, c, d] finds of states [n, p, b, g, r, d, x] before the chunk."""
        return (q @ states) * self._entering()

    def _entering(self) -> torch.Tensor:
        return self.total.to(self.dtype).exp().unsqueeze(-1)


class Vector:
    """decay [n, p, b, g, r, c, d], c a power of two."""

    def __init__(self, decay: torch.Tensor, dtype: torch.dtype):
        self.total = decay.clamp(min=FLOORS[dtype]).double().cumsum(-2)
        self.dtype = dtype

    def pairs(self, a: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """As `Scalar.pairs`. Single rows are joined to blocks, two by two: rows of two blocks meet
        in the state behind the earlier block, which lies between them.
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


SIZE = 64  # rows of a chunk
# Of a segment's keys in the accumulation dtype: it holds up to 50 times as much besides, and
# launches as much besides its chunks however many there are.
SEGMENT_BYTES = 16 << 20


class Segment(NamedTuple):
    """Some consecutive chunks of one or several pieces: `chunks` of each, at the rows (start, stop)
    of each, which are fewer where a piece ends within its last chunk.
    """

    chunks: int
    spans: tuple[tuple[int, int], ...]


class PieceGroup(NamedTuple):
    """Pieces that go through their chunks side by side, longest first, segment by segment; those
    that are over are the last ones, and are left out of later segments. mapped: do they all need a
    map, or none of them?
    """

    pieces: tuple[int, ...]
    mapped: bool
    segments: tuple[Segment, ...]


def groups_of(cut: RankPieces, most: int) -> list[PieceGroup]:
    """The pieces of a rank in groups alike in length and in needing a map, so that a segment has
    about `most` chunks.
    """
    starts = [0, *accumulate(cut.lengths)]
    found = []
    for mapped in (True, False):
        chosen = [i for i, one in enumerate(cut.mapped) if one == mapped]
        chosen.sort(key=lambda i: -cut.lengths[i])
        for first in range(0, len(chosen), most):
            pieces = tuple(chosen[first : first + most])
            spans = [(starts[i], starts[i + 1]) for i in pieces]
            found.append(PieceGroup(pieces, mapped, tuple(_segments(spans, most))))
    return found


def _segments(spans: Sequence[tuple[int, int]], most: int) -> Iterator[Segment]:
    """The segments of pieces at these rows, longest first: at most `most` chunks each, as many of
    each piece that is not over.
    """
    chunks = [-(-(stop - start) // SIZE) for start, stop in spans]
    done = 0
    while done < max(chunks):
        going = [left for left in chunks if left > done]
        count = min(going[-1] - done, max(1, most // len(going)))
        first, last = done * SIZE, (done + count) * SIZE
        of_each = ((start + first, min(start + last, stop)) for start, stop in spans[: len(going)])
        yield Segment(count, tuple(of_each))
        done += count


def gather(x: torch.Tensor, segment: Segment, dtype: torch.dtype) -> torch.Tensor:
    """[s, b, h, ...] -> the segment's chunks [n, p, b, h, c, ...], zero where there is no row."""
    rows, parts = segment.chunks * SIZE, []
    for start, stop in segment.spans:
        part = x[start:stop]
        if stop - start < rows:
            part = torch.cat([part, part.new_zeros((rows - len(part), *part.shape[1:]))])
        parts.append(part.unflatten(0, (segment.chunks, SIZE)))
    chunks = parts[0].unsqueeze(1) if len(parts) == 1 else torch.stack(parts, 1)
    return chunks.movedim(2, 4).to(dtype).contiguous()


def scatter(target: torch.Tensor, chunks: torch.Tensor, segment: Segment) -> None:
    """Add the segment's chunks [n, p, b, h, c, ...] to its rows of target [s, b, h, ...]."""
    for (start, stop), part in zip(segment.spans, chunks.movedim(4, 2).unbind(1), strict=True):
        target[start:stop].add_(part.flatten(0, 1)[: stop - start])


class SegmentRows(NamedTuple):
    """The tensors of `base.LinearInputs` of a rank, or of the chunks of a segment as `gather` has
    them; None for what the form, or who asks, does without.
    """

    q: torch.Tensor | None
    k: torch.Tensor
    v: torch.Tensor
    decay: torch.Tensor | None
    beta: torch.Tensor | None

    def gathered(self, segment: Segment, dtype: torch.dtype) -> SegmentRows:
        """Those of a segment, for nobody to differentiate."""
        chunks = (None if x is None else gather(x, segment, dtype).detach() for x in self)
        return SegmentRows(*chunks)  # pyright: ignore[reportArgumentType]


class Passed(NamedTuple):
    """What a segment makes: outputs [n, p, b, h, c, w], None without queries; the states behind it
    [p, b, h, d, x]; and (I + L)^-1 [n, p, b, g, r, c, c], None where values are added.
    """

    outputs: torch.Tensor | None
    states: torch.Tensor
    inverse: torch.Tensor | None


def pass_through(
    rows: SegmentRows, states: torch.Tensor, scale: float, inverse: torch.Tensor | None
) -> Passed:
    """Go through the chunks of a segment. states [p, b, h, d, x]: those that enter it; x > w: the
    values stand in the last columns. inverse: where it is known already.
    """
    heads, count = rows.k.shape[3], len(rows.k)
    q, k = (None if x is None else x.unsqueeze(4) for x in (rows.q, rows.k))
    assert k is not None
    v = rows.v.unflatten(3, (heads, -1))
    v = torch.nn.functional.pad(v, (states.shape[-1] - v.shape[-1], 0))
    within = _within(rows)
    keys, factor = within.keys(k), None
    answered = None
    if rows.beta is not None:
        beta = rows.beta.unflatten(3, (heads, -1)).unsqueeze(-1)
        if inverse is None or torch.is_grad_enabled():
            if q is None:
                met = within.pairs(k, k)
            else:
                met, answered = within.pairs(torch.stack([k, q]), k)
            inverse = _Inverse.apply(beta * met, inverse)  # pyright: ignore[reportAssignmentType]
        factor = beta if keys.read_factor is None else beta * keys.read_factor
        v = beta * v
    each = (v, inverse, keys.read, factor, keys.written, keys.written_factor, keys.kept)
    state, before, written = states.unflatten(2, (heads, -1)), [], []
    for values, solved, read, known, write, left, kept in _by_chunk(each, count):
        if solved is not None:
            values = solved @ (values - (read @ state) * known)
        before.append(state)
        written.append(values)
        state = kept * state + write.transpose(-1, -2) @ _times(values, left)
    outputs = None
    if q is not None:
        answered = within.pairs(q, k) if answered is None else answered
        outputs = within.read(q, torch.stack(before)) + answered @ torch.stack(written)
        outputs = (outputs * scale).flatten(3, 4)
    return Passed(outputs, state.flatten(2, 3), inverse)


def _within(rows: SegmentRows) -> Scalar | Vector:
    """The decay within each chunk."""
    heads, dtype = rows.k.shape[3], rows.v.dtype
    if rows.decay is None:  # one zero for all
        return Scalar(rows.k.new_zeros((1,) * 5 + (SIZE,)), dtype)
    decay = rows.decay.unflatten(3, (heads, -1))
    return Scalar(decay, dtype) if decay.dim() == 6 else Vector(decay, dtype)


def _by_chunk(tensors: Sequence[torch.Tensor | None], count: int) -> Iterator[tuple[Any, ...]]:
    """What each of `count` chunks has of these; what is the same for all has one in front."""
    none = [None] * count
    each = (none if x is None else x.expand(count, *x.shape[1:]).unbind() for x in tensors)
    return zip(*each, strict=True)


def _times(x: torch.Tensor, factor: torch.Tensor | None) -> torch.Tensor:
    return x if factor is None else x * factor


class _Inverse(torch.autograd.Function):
    """(I + L)^-1 of a matrix of which L is the part below the diagonal; taken over where it is
    known.
    """

    @staticmethod
    def forward(ctx: Any, lower: torch.Tensor, known: torch.Tensor | None) -> torch.Tensor:
        if known is None:
            unit = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
            unit = unit.expand(lower.shape)
            known = torch.linalg.solve_triangular(lower, unit, upper=False, unitriangular=True)
        ctx.save_for_backward(known)
        return known.detach()  # pyright: ignore[reportOptionalMemberAccess]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        turned = ctx.saved_tensors[0].transpose(-1, -2)
        return -(turned @ gradient @ turned).tril(-1), None


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
        self.work = _Work(form, inputs, cut)
        self.maps = no_maps(form, inputs, len(cut.lengths), self.work.dtype)
        given = inputs[1:5]
        if any(cut.mapped):
            found: Any = _MapsOfPieces.apply(self.work, *given)
            self.maps = Maps(found[0], found[1])
            # Outputs take k, v, decay and beta from there: what they make of the gradients arrives
            # where the maps' are added to it.
            given = [
                x if other is None else other for x, other in zip(given, found[2:], strict=True)
            ]
        self.rows = SegmentRows(inputs.q, *given)  # pyright: ignore[reportArgumentType]

    def outputs(self, entering: torch.Tensor) -> torch.Tensor:
        return _OutputsOfPieces.apply(self.work, *self.rows, entering)  # pyright: ignore[reportReturnType]


class _Work:
    """What is computed, of tensors that autograd holds. `inverses`: of the segments of mapped
    pieces, which maps leave to outputs in forward and outputs to maps in backward.
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
        """The groups of pieces that need a map."""
        return [group for group in self.groups if group.mapped]

    def states(
        self, rows: SegmentRows, group: PieceGroup, states: torch.Tensor, out: torch.Tensor | None
    ) -> torch.Tensor:
        """The states behind the pieces of a group, from those that enter them [p, b, h, d, x];
        writes their outputs where there is `out`.
        """
        for segment in group.segments:
            going = len(segment.spans)
            some = rows.gathered(segment, self.dtype)
            outputs, behind, _ = self._pass(some, segment, states[:going], keep=out is None)
            if outputs is not None and out is not None:
                scatter(out, outputs, segment)
            states = torch.cat([behind, states[going:]])
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
        """The gradient of the states that enter the pieces of a group; adds those of its rows to
        `grads`, one for each of `rows` or None. of_out: the gradient of all outputs, of_behind
        that of the states behind; None for zero.
        """
        entered = []
        for segment in group.segments:
            going = len(segment.spans)
            entered.append(states[:going])
            if segment is not group.segments[-1]:
                some = rows._replace(q=None).gathered(segment, self.dtype)
                behind = self._pass(some, segment, states[:going], keep=True).states
                states = torch.cat([behind, states[going:]])
        of_states = torch.zeros_like(states) if of_behind is None else of_behind
        for segment, state in zip(reversed(group.segments), reversed(entered), strict=True):
            going = len(segment.spans)
            some = rows.gathered(segment, self.dtype)
            leaves = [(x.requires_grad_(), grad) for x, grad in zip(some, grads, strict=True)
                      if x is not None and grad is not None]  # fmt: skip
            state = state.detach().requires_grad_()
            with torch.enable_grad():
                keep = of_out is not None and group.mapped
                passed = self._pass(some, segment, state, keep)
            made, arrived = [], []
            if of_out is not None and passed.outputs is not None:
                made, arrived = [passed.outputs], [gather(of_out, segment, self.dtype)]
            if of_behind is not None or segment is not group.segments[-1]:
                made, arrived = [*made, passed.states], [*arrived, of_states[:going]]
            *found, of_state = torch.autograd.grad(
                made, [*(x for x, _ in leaves), state], arrived, allow_unused=True
            )
            for (_, grad), part in zip(leaves, found, strict=True):
                if part is not None:
                    scatter(grad, part, segment)
            of_states = torch.cat([of_state, of_states[going:]])
        return of_states

    def _pass(
        self, rows: SegmentRows, segment: Segment, states: torch.Tensor, keep: bool
    ) -> Passed:
        """Through a segment. keep: will its inverse be asked for again?"""
        passed = pass_through(rows, states, self.scale, self.inverses.pop(segment, None))
        if keep and passed.inverse is not None:
            self.inverses[segment] = passed.inverse.detach()
        return passed


class _MapsOfPieces(torch.autograd.Function):
    """k, v, decay, beta -> the transition of each piece, None if all keep their state; the
    increment; and those of k, v, decay and beta again that want a gradient, else None.
    """

    @staticmethod
    def forward(ctx: Any, work: _Work, *given: torch.Tensor | None) -> tuple[Any, ...]:
        rows = SegmentRows(None, *given)  # pyright: ignore[reportArgumentType]
        ctx.work = work
        ctx.save_for_backward(*given)
        _, b, h, w = rows.v.shape
        d, pieces = rows.k.shape[-1], len(work.cut.lengths)
        transition, increment = None, rows.v.new_zeros((pieces, b, h, d, w), dtype=work.dtype)
        if work.form.delta:
            transition = increment.new_zeros((pieces, b, h, d, d))
        elif rows.decay is not None:
            transition = _kept(work, rows.decay)
        with _full_precision(rows.k):
            for group in work.mapped:
                behind = work.states(rows, group, _unit(work, rows, group), None)
                for piece, state in zip(group.pieces, behind.unbind(), strict=True):
                    increment[piece] = state[..., -w:]
                    if work.form.delta and transition is not None:
                        transition[piece] = state[..., :d]
        pairs = zip(given, ctx.needs_input_grad[1:], strict=True)
        return transition, increment, *(x.view_as(x) if need else None for x, need in pairs)  # pyright: ignore

    @staticmethod
    @first_order_only("linear attention")
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, of_transition: torch.Tensor | None, of_increment: torch.Tensor, *of_given: Any
    ) -> tuple[torch.Tensor | None, ...]:
        work, rows = ctx.work, SegmentRows(None, *ctx.saved_tensors)
        # Nobody else has these: `_OutputsOfPieces` made them, or else torch did.
        grads = SegmentRows(None, *of_given)
        with _full_precision(rows.k):
            for group in work.mapped:
                of_behind = torch.stack([of_increment[i] for i in group.pieces])
                if work.form.delta and of_transition is not None:
                    of_starts = torch.stack([of_transition[i] for i in group.pieces])
                    of_behind = torch.cat([of_starts, of_behind], -1)
                # A column that nobody asks for is left out: what grew to inf in it would be NaN.
                start = _unit(work, rows, group) * (of_behind != 0).any(-2, keepdim=True)
                work.gradients(rows, group, start, None, of_behind, grads)
        if of_transition is not None and not work.form.delta and rows.decay is not None:
            _add_kept_gradient(work, grads.decay, rows.decay, of_transition)
        return None, *grads[1:]


class _OutputsOfPieces(torch.autograd.Function):
    """q, k, v, decay, beta, entering states [p, b, h, d, w] -> outputs [s, b, h, w]."""

    @staticmethod
    def forward(ctx: Any, work: _Work, *given: torch.Tensor | None) -> torch.Tensor:
        *tensors, entering = given
        assert entering is not None
        rows = SegmentRows(*tensors)  # pyright: ignore[reportArgumentType]
        ctx.work = work
        ctx.save_for_backward(*given)
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
                found = work.gradients(rows, group, states, of_out, None, grads)
                for piece, of_state in zip(group.pieces, found.unbind(), strict=True):
                    of_entering[piece] = of_state
        return None, *grads, of_entering


def _unit(work: _Work, rows: SegmentRows, group: PieceGroup) -> torch.Tensor:
    """The states that the maps of a group are made of: [I | 0] for delta rules, else zero."""
    _, b, h, w = rows.v.shape
    size = (len(group.pieces), b, h, rows.k.shape[-1])
    if not work.form.delta:
        return rows.v.new_zeros((*size, w), dtype=work.dtype)
    unit = torch.eye(size[-1], dtype=work.dtype, device=rows.v.device)
    return torch.nn.functional.pad(unit.expand(*size, size[-1]), (0, w))


def _of_group(work: _Work, states: torch.Tensor, group: PieceGroup) -> torch.Tensor:
    """The states of a group, of those of all pieces."""
    return torch.stack([states[piece] for piece in group.pieces]).to(work.dtype)


def _kept(work: _Work, decay: torch.Tensor) -> torch.Tensor:
    """What is left of a state behind each mapped piece [p, b, h] or [p, b, h, d]."""
    kept = decay.new_zeros((len(work.cut.lengths), *decay.shape[1:]), dtype=work.dtype)
    for piece, part in enumerate(decay.split(work.cut.lengths)):
        if work.cut.mapped[piece]:
            total = part.clamp(min=FLOORS[work.dtype]).sum(0, dtype=torch.float64)
            kept[piece] = total.to(work.dtype).exp()
    return kept


def _add_kept_gradient(
    work: _Work, grad: torch.Tensor | None, decay: torch.Tensor, of_kept: torch.Tensor
) -> None:
    """Add to `grad`, if it is wanted, what `_kept` makes of the gradient of its result. Where that
    is zero, so is this, also of a factor that has grown beyond all numbers.
    """
    if grad is None:
        return
    of_total = torch.where(of_kept == 0, 0, of_kept * _kept(work, decay)).to(grad.dtype)
    parts = zip(grad.split(work.cut.lengths), decay.split(work.cut.lengths), of_total, strict=True)
    for part, logs, of_piece in parts:
        part += torch.where(logs < FLOORS[work.dtype], 0, of_piece)


def _full_precision(x: torch.Tensor) -> torch.autocast:
    """Without autocast, which would round states to bf16, and gradients where backward is called
    under it.
    """
    return torch.autocast(x.device.type, enabled=False)
