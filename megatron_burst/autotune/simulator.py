"""How long a call will take: schedules run on a clock instead of on devices.

The schedule that would run is walked boundary by boundary, as `walk` does it, on all ranks of a
ring at once, with three things that take time: a message occupies the sender's and the receiver's
end of a link class (each sends and receives at once, and messages follow one another in the order
they are started), a pair of chunks occupies the device, and a rank waits for what must have
landed. So overlap, exposed hops and staggered head chunks are what the schedule makes of
them, and no formula. Seconds per rank and call; sizes are plain numbers: no torch.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..schedule.cost import Sizes
from ..schedule.head_shares import deferred_chunks
from ..schedule.rings import Schedule
from ..schedule.tables import Chunk
from .rates import Rates


class Leg(NamedTuple):
    """Messages that start and land together on one ring: from `src` to `dst`, one per rank."""

    src: np.ndarray
    dst: np.ndarray
    between: np.ndarray  # int: 0 within a node, 1 between nodes
    gradient: bool
    land: int


class Moment(NamedTuple):
    """One boundary of all ranks: what starts there, and what each computes after it [G]."""

    legs: Sequence[Leg]
    seconds: np.ndarray


@dataclass(frozen=True)
class Wires:
    """How ranks are joined, to see what two ways round a ring would bring (TokenRing).

    halves: every chunk travels in halves, one each way round. pairs: within a node a rank has a
    link of its own to each neighbour; otherwise, and between nodes, one NIC for all.
    """

    halves: bool = False
    pairs: bool = False


ONE_WAY = Wires()


class Pass(NamedTuple):
    """Seconds of a pass, and for how long the busiest rank's device and links are in use."""

    seconds: float
    compute: float
    intra: float
    inter: float

    def __add__(self, other: Pass) -> Pass:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Pass(*(a + b for a, b in zip(self, other, strict=True)))


class _Line:
    """The clocks of all ranks, and until when both ends of their links are taken."""

    def __init__(self, size: int, rates: Rates, wires: Wires):
        self.clock = np.zeros(size)
        self.wires, self.latency, self.posting = wires, rates.latency, rates.posting
        self.per_byte = np.array([1 / rates.intra, 1 / rates.inter])
        self.leaving, self.arriving = (np.zeros((2, 2, size)) for _ in range(2))
        self.computing, self.sending = np.zeros(size), np.zeros((2, size))

    def send(self, leg: Leg, size: float) -> np.ndarray:
        """When each rank is done with its part of a leg of `size` bytes per message."""
        done = np.zeros_like(self.clock)
        if not self.wires.halves:
            self._one_way(leg.src, leg.dst, leg.between, size, 0, done)
            return done
        self._one_way(leg.src, leg.dst, leg.between, size / 2, 0, done)
        own_links = np.where(leg.between == 0, int(self.wires.pairs), 0)
        self._one_way(leg.dst, leg.src, leg.between, size / 2, own_links, done)
        return done

    def _one_way(self, src, dst, between, size: float, way: Any, done: np.ndarray) -> None:
        begin = np.maximum(self.clock[src], self.clock[dst])
        begin = np.maximum(begin, self.leaving[way, between, src])
        begin = np.maximum(begin, self.arriving[way, between, dst])
        taken = self.latency + size * self.per_byte[between]
        self.sending[between, src] += taken
        end = begin + taken
        self.leaving[way, between, src] = self.arriving[way, between, dst] = end
        done[src] = np.maximum(done[src], end)
        done[dst] = np.maximum(done[dst], end)

    def walk(
        self, program: Sequence[Moment], sizes: dict[bool, float]
    ) -> Generator[None, None, None]:
        """One group of heads; as `walk.Walk.steps`."""
        landing: dict[int, np.ndarray] = {}

        def land(index: int) -> None:
            if index in landing:
                np.maximum(self.clock, landing.pop(index), out=self.clock)

        for index, moment in enumerate(program):
            land(index)
            for leg in moment.legs:
                if self.posting:
                    self.clock[np.union1d(leg.src, leg.dst)] += self.posting
                done = self.send(leg, sizes[leg.gradient])
                landing[leg.land] = np.maximum(landing.get(leg.land, 0.0), done)
            yield
            land(index)
            self.clock += moment.seconds
            self.computing += moment.seconds


def pass_time(
    plan: Schedule,
    sizes: Sizes,
    seconds: np.ndarray,
    rates: Rates,
    head_chunks: int = 1,
    wires: Wires = ONE_WAY,
) -> Pass:
    """From the common start of all ranks to the end of the last one's pass.

    seconds: [G, G], how long a device needs for the pair of query chunk i and key chunk j, all
    heads; with head chunks each computes its part of it.
    """
    line = _Line(plan.grid.size, rates, wires)
    each = seconds / head_chunks + rates.launch * (seconds > 0)
    legs = _legs(plan)
    late = deferred_chunks(head_chunks)
    bytes_of = {
        gradient: sizes.chunk_bytes(Chunk("d" * gradient + plan.side, 0)) / head_chunks
        for gradient in (False, True)
    }
    walks = [
        line.walk(_program(plan, legs, each, own_last=group >= head_chunks - late), bytes_of)
        for group in range(head_chunks)
    ]
    _staggered(walks)
    busy = line.computing.max(), *line.sending.max(axis=1)
    return Pass(float(line.clock.max()), *map(float, busy))


def _staggered(walks: Sequence[Generator[None, None, None]]) -> None:
    """As `walk.staggered`."""
    waiting, running = list(walks), []
    while waiting or running:
        if waiting:
            running.append(waiting.pop(0))
        running = [walk for walk in running if next(walk, True) is None]


def _legs(plan: Schedule) -> dict[int, list[Leg]]:
    """Boundary -> what starts there, in the order in which ranks start it."""
    nodes, width = plan.rings
    ranks = np.arange(plan.grid.size)
    found: dict[tuple, list[tuple[np.ndarray, np.ndarray]]] = {}
    # Where everything is visible all ranks do the same, each seen from where it is.
    alike = bool(plan.visible.all())
    for rank in [0] if alike else ranks.tolist():
        for hop in plan.sends(rank):
            src, dst = np.array([hop.src]), np.array([hop.dst])
            if alike:
                node, index = divmod(hop.dst, width)
                src = ranks
                dst = (ranks // width + node) % nodes * width + (ranks % width + index) % width
            key = hop.post, hop.ring, hop.chunk.gradient, hop.land
            found.setdefault(key, []).append((src, dst))
    legs: dict[int, list[Leg]] = {}
    for (post, _, gradient, land), ends in sorted(found.items(), key=lambda item: item[0]):
        src, dst = (np.concatenate(side) for side in zip(*ends, strict=True))
        between = (src // plan.grid.intra != dst // plan.grid.intra).astype(int)
        legs.setdefault(post, []).append(Leg(src, dst, between, gradient, land))
    return legs


def _program(
    plan: Schedule, legs: dict[int, list[Leg]], seconds: np.ndarray, own_last: bool
) -> list[Moment]:
    """All boundaries of all ranks; as `Schedule.program`."""
    size, ranks = plan.grid.size, np.arange(plan.grid.size)
    end = max([size, *(leg.land for some in legs.values() for leg in some)])
    own = np.zeros(size, int)
    if own_last and plan.gradients:
        own = np.full(size, size)
        for post, some in legs.items():
            for leg in some:
                if leg.gradient:
                    own[leg.src] = np.maximum(own[leg.src], post)
        end = max(end, int(own.max()) + 1)
    work = np.zeros((end + 1, size))
    for step in range(size):
        pair = plan.pair(ranks, step)  # pyright: ignore[reportArgumentType]  of all ranks at once
        work[step if step else own, ranks] += seconds[pair.query, pair.key]
    return [Moment(legs.get(index, ()), work[index]) for index in range(end + 1)]
