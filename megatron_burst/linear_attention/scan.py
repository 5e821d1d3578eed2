# SPDX-License-Identifier: Apache-2.0
"""The state scan: a table of hops run on one rank, forward and backward, as an autograd function.

A hop carries a state that was received, or that of an earlier piece carried on by known maps, of
one piece or of a run of pieces; so algorithms are tables. A round is one exchange, so that what
NCCL runs is one batch on every rank. An initial state is known only to the rank of the piece it
enters, within the map of that piece. Final states go from the rank of a document's last piece to
all ranks in one exchange, and their gradients come back by another and are added in the order of
the ranks; a document without positions hands its initial state on, on every rank by itself.

Backward is the same algorithm on the reversed chains, with transposed transitions and the gradients
of the states that entered as increments.

Shape letters: p pieces of this rank, b batch, h heads, d rows (keys), w columns (values); D
documents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..comm.groups import Groups
from ..comm.packing import CallTag
from ..comm.rows import over_grid
from ..comm.transport import Tensors
from ..kernels.autograd import first_order_only
from ..schedule.scans.blocks import StateBlocks
from ..schedule.scans.hops import ALL_BLOCKS, MAP
from .maps import Map, gradient, turned
from .program import Program, Round, StateHop, States


class KnownStates:
    """States and maps of one rank, block by block.

    begins: of every piece, is it the first of its document? The state that enters it is zero here:
    the rank that holds it has an initial state in its map. own: piece -> its map.
    """

    def __init__(self, begins: list[bool], blocks: StateBlocks, own: Mapping[int, Map]):
        self._begins, self._blocks = begins, blocks
        self._states: dict[tuple[int, int], torch.Tensor] = {}  # (piece it enters, block)
        # (block, piece after its last) -> first piece -> map of the run
        self._runs: dict[tuple[int, int], dict[int, Map]] = {}
        for piece, own_map in own.items():
            for block in range(blocks.number):
                part = own_map.part(blocks.slices(block)) if blocks.number > 1 else own_map
                self._runs[block, piece + 1] = {piece: part}

    def receive(self, hop: StateHop, arrived: list[torch.Tensor]) -> None:
        """Take in what a hop brought."""
        for block in self._each(hop.block):
            parts = Map(arrived[0] if len(arrived) > 1 else None, arrived[-1])
            if hop.block == ALL_BLOCKS and self._blocks.number > 1:
                parts = parts.part(self._blocks.slices(block))
            if hop.kind == MAP:
                self._runs.setdefault((block, hop.last + 1), {})[hop.first] = parts
            else:
                self._states[hop.first, block] = parts.increment

    def content(self, hop: StateHop) -> list[torch.Tensor]:
        """What a hop carries: a state, or the transition, if there is one, and increment of a
        map.
        """
        if hop.kind == MAP:
            maps = [self.map(hop.first, hop.last, block) for block in self._each(hop.block)]
            increments = [each.increment for each in maps]
            if maps[0].transition is not None:
                transitions = [each.transition for each in maps if each.transition is not None]
                return [self._whole_transition(transitions), self.whole(increments)]
            return [self.whole(increments)]
        states = [self.state(hop.first, block) for block in self._each(hop.block)]
        assert all(state is not None for state in states), "a hop carries a state that is zero"
        return [self.whole(states)]

    def state(self, piece: int, block: int) -> torch.Tensor | None:
        """The state that enters a piece; None for zero."""
        known = self._states.get((piece, block))
        if known is not None or self._begins[piece]:
            return known
        way = self._way(piece, block, lambda at: (at, block) in self._states or self._begins[at])
        state = self._states.get((way[0][0], block))
        for _, run in way:
            state = run(state)
        assert state is not None
        self._states[piece, block] = state
        return state

    def map(self, first: int, last: int, block: int) -> Map:
        """The map of a run of pieces."""
        runs = self._runs.setdefault((block, last + 1), {})
        if first not in runs:
            way = self._way(last + 1, block, lambda at: at == first, first)
            whole = way[0][1]
            for _, run in way[1:]:
                whole = run.after(whole)
            runs[first] = whole
        return runs[first]

    def _way(self, end, block, arrived, least=0) -> list[tuple[int, Map]]:
        """Known runs, each with its first piece, that lead to before piece `end` from a piece that
        `arrived` says is one to begin at. Long runs are tried first.
        """
        after: dict[int, int] = {end: end}  # piece -> that at which the run from it ends
        open_ = [end]
        while open_:
            at = open_.pop()
            if at != end and arrived(at):
                break
            if at != end and self._begins[at]:
                continue
            firsts = self._runs.get((block, at), {})
            for first in sorted(firsts, reverse=True):
                if first not in after and first >= least:
                    after[first] = at
                    open_.append(first)
        else:
            raise AssertionError(f"no known maps lead to piece {end}")
        way = []
        while at != end:
            way.append((at, self._runs[block, after[at]][at]))
            at = after[at]
        return way

    def _each(self, block: int) -> range:
        """The blocks that a hop's block is."""
        return range(self._blocks.number) if block == ALL_BLOCKS else range(block, block + 1)

    def whole(self, parts: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """All blocks of a state [b, h, d, w], put together; of a single one itself."""
        if len(parts) == 1:
            assert parts[0] is not None
            return parts[0]
        some = next(part for part in parts if part is not None)
        state = some.new_zeros((some.shape[0], *self._blocks.sizes))
        for block, part in enumerate(parts):
            if part is not None:
                heads, rows, columns = self._blocks.slices(block)
                state[:, heads, rows, columns] = part
        return state

    def _whole_transition(self, parts: list[torch.Tensor]) -> torch.Tensor:
        if len(parts) == 1:
            return parts[0]
        (heads, rows, _), some = self._blocks.sizes, parts[0]
        shape = {2: (heads,), 3: (heads, rows), 4: (heads, rows, rows)}[some.dim()]
        whole = some.new_empty((some.shape[0], *shape))
        for block, part in enumerate(parts):
            h, d, _ = self._blocks.slices(block)
            whole[(slice(None), h, d) if some.dim() == 3 else (slice(None), h)] = part
        return whole


Initial = Mapping[int, torch.Tensor]  # document -> [b, h, d, w]; zero for others


class Scanned(NamedTuple):
    """entering [p, b, h, d, w]; leaving: document -> the state after its last piece, where that
    is this rank's.
    """

    entering: torch.Tensor
    leaving: dict[int, torch.Tensor]


@dataclass(frozen=True)
class DirectedScan:
    """One direction of a scan, on one rank. name: of the direction, for messages of errors."""

    groups: Groups
    program: Program
    states: States
    device: torch.device
    name: str

    def run(self, call: CallTag, maps: Map, initial: Initial, leaving: bool) -> Scanned:
        """Carry the states along. maps: of this rank's pieces, with p; leaving: are the states
        after the last pieces wanted?
        """
        program = self.program
        known = KnownStates(program.begins, program.blocks, self._own(maps, initial))
        for each in program.rounds:
            self._round(known, call, each)
        entering, left = maps.increment.new_zeros(maps.increment.shape), {}
        for index, piece in enumerate(program.own):
            document, ends = program.document[index], leaving and program.ends[piece]
            if program.begins[piece]:
                state = None
                if document in initial:
                    entering[index] = initial[document]
            else:
                every = range(program.blocks.number)
                state = known.whole([known.state(piece, block) for block in every])
                entering[index] = state
            if ends:
                left[document] = self._own_map(maps, initial, index)(state)
        return Scanned(entering, left)

    def _own(self, maps: Map, initial: Initial) -> dict[int, Map]:
        own = enumerate(self.program.own)
        return {piece: self._own_map(maps, initial, index) for index, piece in own}

    def _own_map(self, maps: Map, initial: Initial, index: int) -> Map:
        """The map of a piece; where its document begins, from zero."""
        program, transition = self.program, maps.transition
        own_map = Map(None if transition is None else transition[index], maps.increment[index])
        document = program.document[index]
        if program.begins[program.own[index]] and document in initial:
            own_map = own_map._replace(increment=own_map(initial[document]))
        return own_map

    def _round(self, known: KnownStates, call: CallTag, each: Round) -> None:
        """Exchange what one round of the table says."""
        sent = {peer: [t for hop in hops for t in known.content(hop)] for peer, hops in each.sends}
        shapes = {
            peer: [(s, self.states.dtype) for hop in hops for s in self._shapes(hop)]
            for peer, hops in each.receives
        }
        label = f"round {each.number} of {self.name}"
        arrived = over_grid(self.groups, sent, shapes, self.device, call, label)
        for peer, hops in each.receives:
            rest = iter(arrived[peer])
            for hop in hops:
                known.receive(hop, [next(rest) for _ in self._shapes(hop)])

    def _shapes(self, hop: StateHop) -> list[torch.Size]:
        return self.program.shapes(hop, self.states)


@dataclass(frozen=True)
class Finals:
    """holders: document -> the rank of its last piece; None for one that is empty."""

    groups: Groups
    holders: tuple[int | None, ...]
    states: States
    device: torch.device

    def held_by(self, rank: int) -> list[int]:
        """The documents that end on a rank."""
        return [document for document, holder in enumerate(self.holders) if holder == rank]

    @property
    def message(self) -> int:
        """The bytes of the longest message."""
        most = max(map(len, map(self.held_by, range(self.groups.size))))
        return most * self.shape.numel() * self.states.dtype.itemsize

    @property
    def shape(self) -> torch.Size:
        """The shape of a state."""
        return torch.Size((self.states.batch, *self.states.sizes))

    def spread(
        self, call: CallTag, left: Mapping[int, torch.Tensor], initial: torch.Tensor | None
    ) -> torch.Tensor:
        """[documents, b, h, d, w] on every rank. left: document -> the state after its last piece,
        of this rank's; initial [documents, b, h, d, w] or None for zeros.
        """
        me, size = self.groups.rank, self.groups.size
        final = torch.zeros(
            (len(self.holders), *self.shape), dtype=self.states.dtype, device=self.device
        )
        held = self.held_by(me)
        others = [rank for rank in range(size) if rank != me]
        own = tuple(left[document] for document in held)
        sent = dict.fromkeys(others if held else [], own)
        counts = {rank: len(self.held_by(rank)) for rank in others if self.held_by(rank)}
        came = self._exchange(call, "final states", sent, counts)
        for document in held:
            final[document] = left[document]
        for rank, states in came.items():
            for document, state in zip(self.held_by(rank), states, strict=True):
                final[document] = state
        if initial is not None:
            for document in self.empty:
                final[document] = initial[document]
        return final

    @property
    def empty(self) -> list[int]:
        """Documents without positions."""
        return [document for document, holder in enumerate(self.holders) if holder is None]

    def collect(self, call: CallTag, gradient: torch.Tensor) -> dict[int, torch.Tensor]:
        """Document -> the sum over all ranks of the gradient of its final state, of those that end
        here. gradient [documents, b, h, d, w]: this rank's.
        """
        me, size = self.groups.rank, self.groups.size
        gradient = gradient.to(self.states.dtype)
        held = self.held_by(me)
        others = [rank for rank in range(size) if rank != me]
        ends = {rank: self.held_by(rank) for rank in others if self.held_by(rank)}
        sent = {rank: [gradient[document] for document in some] for rank, some in ends.items()}
        counts = dict.fromkeys(others if held else [], len(held))
        came = self._exchange(call, "gradients of final states", sent, counts)
        given = {**came, me: [gradient[document] for document in held]}
        each = [given[rank] for rank in sorted(given)]
        return {d: torch.stack([some[i] for some in each]).sum(0) for i, d in enumerate(held)}

    def _exchange(
        self, call: CallTag, name: str, sent: Mapping[int, Tensors], counts: Mapping[int, int]
    ) -> dict[int, Tensors]:
        """So many states from each of the ranks in `counts`."""
        wanted = {rank: [(self.shape, self.states.dtype)] * n for rank, n in counts.items()}
        return over_grid(self.groups, sent, wanted, self.device, call, name)


@dataclass(frozen=True)
class ScanJob:
    """What one rank executes of a scan, in both directions."""

    groups: Groups
    forward: DirectedScan
    backward: DirectedScan
    finals: Finals


class ScanTensors(NamedTuple):
    """One rank's tensors: decay None or [p, b, h], [p, b, h, d] or [p, b, h, d, d]; increment
    [p, b, h, d, w]; initial [D, b, h, d, w] or None.
    """

    decay: torch.Tensor | None
    increment: torch.Tensor
    initial: torch.Tensor | None


class ScanCall(NamedTuple):
    """What every call of one rank needs beside tensors; leaving: are final states wanted?"""

    job: ScanJob
    call: CallTag
    leaving: bool


class StateScan(torch.autograd.Function):
    """tensors: decay, increment and initial state; returns the entering states, with
    `call.leaving` (entering states, final states).
    """

    @staticmethod
    def forward(ctx: Any, call: ScanCall, *tensors: torch.Tensor | None) -> Any:
        given = ScanTensors(*tensors)  # pyright: ignore
        # Autocast does not decide the precision.
        with call.job.groups.running(call.job.forward.device.type):
            entering, final = _forward(call, given)
        ctx.call = call
        ctx.kinds = [None if t is None else (t.dtype, t.shape) for t in tensors]
        ctx.save_for_backward(given.decay, entering)
        return (entering, final) if call.leaving else entering

    @staticmethod
    @first_order_only("mb.state_scan")
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, entered: torch.Tensor, final: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, ...]:
        call, groups = ctx.call, ctx.call.job.groups
        groups.check()
        groups.calls.backward(call.call)
        saved, needs = ctx.saved_tensors, ctx.needs_input_grad[1:]
        with groups.running(call.job.forward.device.type):
            return None, *_backward(call, saved, entered, final, needs, ctx.kinds)


def _forward(scan: ScanCall, given: ScanTensors) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Entering states and final states, or None."""
    job, call, leaving = scan
    dtype = job.forward.states.dtype
    decay, increment, start = (None if t is None else t.to(dtype) for t in given)
    assert increment is not None
    initial = {} if start is None else dict(enumerate(start))
    scanned = job.forward.run(call, Map(decay, increment), initial, leaving)
    final = job.finals.spread(call, scanned.leaving, start) if leaving else None
    return scanned.entering, final


def _backward(
    scan: ScanCall,
    saved: tuple[torch.Tensor | None, torch.Tensor],
    entered: torch.Tensor,
    final: torch.Tensor | None,
    needs: Sequence[bool],
    kinds: Sequence[tuple[torch.dtype, torch.Size] | None],
) -> list[torch.Tensor | None]:
    """Gradients of decay, increment and initial state. entered, final: the gradients that came."""
    job, call, _ = scan
    decay, entering = saved
    dtype = job.backward.states.dtype
    decay = None if decay is None else decay.to(dtype)
    last = {} if final is None else job.finals.collect(call, final)
    maps = Map(turned(decay, entering.dim()), entered.to(dtype))
    scanned = job.backward.run(call, maps, last, kinds[2] is not None)
    of_decay = of_initial = None
    if decay is not None and needs[0]:
        of_decay = gradient(decay, scanned.entering, entering)
    if kinds[2] is not None and needs[2]:
        of_initial = entering.new_zeros(kinds[2][1])
        for document, state in scanned.leaving.items():
            of_initial[document] = state
        for document in job.finals.empty if final is not None else ():
            assert final is not None
            of_initial[document] = final[document]
    results = of_decay, scanned.entering if needs[1] else None, of_initial
    return [
        None if t is None or kind is None else t.to(kind[0])
        for t, kind in zip(results, kinds, strict=True)
    ]


def following(first: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """The first tensor; the backward of what is made of it runs wherever one of them needs a
    gradient, and before that of what made the others.
    """
    return _Following.apply(first, *others)  # pyright: ignore[reportReturnType]


class _Following(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, first: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        ctx.others = len(others)
        return first.view_as(first)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient, *(None,) * ctx.others
