"""The tier of a run: one `HostMemory`, the fraction in force, and the calls that use them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from megatron_burst.config import BurstConfig
from megatron_burst.megatron.log import log
from megatron_burst.megatron.offload.demand import choice, line, too_small
from megatron_burst.megatron.offload.first_step import Clock, FirstStep
from megatron_burst.megatron.offload.link import gather, lone_node, measured_rate, shared_node
from megatron_burst.megatron.offload.received import Received
from megatron_burst.megatron.patching.registry import PatchSet
from megatron_burst.recompute.host.frames import HostFrame
from megatron_burst.recompute.host.mover import HostMemory
from megatron_burst.units import size_of

ASKED = "offload"  # note: the choices of the configuration that asked for it
TIER = "host memory"  # note: the tier, once a forward pass or a step needed it
MIN_BYTES = 1 << 20  # smaller tensors stay: a copy would cost more than they free


def tier_of(patches: PatchSet) -> Tier | None:
    """The tier of the run; None if no configuration asked for one."""
    asked = patches.notes.get(ASKED)
    if asked is None:
        return None
    if TIER not in patches.notes:
        patches.notes[TIER] = Tier(asked)
    return patches.notes[TIER]


class Going(NamedTuple):
    """What a call leaves goes to the host: this fraction of the rows, as one frame."""

    fraction: float
    frame: HostFrame


class Tier:
    """Moves what layers leave to the host, and finds out in the first step how much of it fits.

    Until a step of Megatron's schedules has begun, no rank knows how many others share its node: as
    if all ranks of the run did.
    """

    def __init__(self, burst: BurstConfig) -> None:
        self.auto = burst.offload == "auto"
        self.fraction = 1.0 if self.auto else float(burst.offload)
        self.stated = None
        if burst.host_memory is not None:
            self.stated = size_of(burst.host_memory, "--burst-host-memory")
        self.node = lone_node(self.stated)
        self.host = self._memory()
        self.link: float | None = None
        self.first: FirstStep | None = None
        self.settled = False  # after the first step
        self._paused = False
        self._going: Going | None = None
        self._received = Received()

    def _memory(self) -> HostMemory:
        return HostMemory(self.node.share, ranks=self.node.ranks)

    # --- a step -----------------------------------------------------------------------------

    def begin(self, passes: int) -> None:
        """A training step begins, on all ranks; the first one is collective.

        passes: micro-batches, once per model chunk, that are in flight on this rank.
        """
        if self.settled:
            return
        self.node = shared_node(self.stated)
        self.host = self._memory()
        if self.auto:
            self.link = measured_rate(self.host)
        self.first = FirstStep(passes)
        self.host.spill = self.first.spill

    def end(self) -> None:
        """A training step ends, on all ranks; the first one is collective, and raises ValueError
        on all ranks if what is asked does not fit on the host of one."""
        if self.first is None:
            return
        mine, self.settled = self.first.demand(), True
        self.first = self.host.spill = None
        told = gather((mine, self.node, self.link))
        if self.auto:
            self.fraction = min(choice(*one).fraction for one in told)
        elif error := too_small(self.fraction, [(demand, node) for demand, node, _ in told]):
            raise ValueError(error)
        log(line(self.fraction, mine, self.node, self.link))

    def abandon(self) -> None:
        """The step failed: what it left on the host goes with its graph."""
        self.first = self.host.spill = self._going = None
        self._received = Received()

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Nothing moves inside: no backward follows."""
        paused, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = paused

    @contextlib.contextmanager
    def forward_pass(self, received: Any) -> Iterator[None]:
        """One micro-batch runs through one model chunk inside.

        received: what the pipeline stage before sent, a tensor or a list of them, or None. The
        schedule holds it until backward: what of it has moved to the host is freed at the end.
        """
        if self.first is not None:
            self.first.next_pass()
        self._received = Received(received)
        yield
        self._received.free()
        self._received = Received()

    # --- a call -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def call(self, arguments: Iterable[Any]) -> Iterator[Going | None]:
        """A layer or a checkpoint runs inside: what it saves for backward goes to the host; None
        if nothing does. A call within another one is part of it.

        arguments: of the call; tensors among them that need no gradient (masks, rotary tables) are
        those of all layers and stay.
        """
        if self._going is not None or self._paused or not torch.is_grad_enabled():
            yield self._going
            return
        tensors = [one for one in arguments if isinstance(one, torch.Tensor)]
        shared = {place_of(one) for one in tensors if not one.requires_grad}
        first, before = self.first, self._left()
        self._going = Going(self.fraction, self.host.frame())
        clock = Clock(self.host.device.type == "cuda")
        try:
            with self._going.frame:
                self._received.move(tensors, self.fraction, self.host, MIN_BYTES)
                with self.host.saved(
                    self.fraction, min_bytes=MIN_BYTES, keep=self._staying(shared)
                ):
                    yield self._going
        finally:
            self._going = None
        if first is not None:
            clock.stop()
            first.add(self._left() - before, clock)
            self.host.drain()  # the next call's time is its own

    @property
    def going(self) -> Going | None:
        """The call that runs now, if what it leaves goes to the host."""
        return self._going

    def saved(self, fraction: float) -> contextlib.AbstractContextManager[None]:
        """A part of the call that runs now of which another fraction goes to the host."""
        return self.host.saved(fraction, min_bytes=MIN_BYTES, keep=self._staying(set()))

    def _left(self) -> int:
        """Bytes that layers left for the host so far, with those for which there was no room."""
        return self.host.bytes_out + (self.first.spilt if self.first is not None else 0)

    def _staying(self, shared: set[int]) -> Any:
        def keep(tensor: torch.Tensor) -> bool:
            self._received.saved(tensor)
            return place_of(tensor) in shared

        return keep


def place_of(tensor: torch.Tensor) -> int:
    """Where the memory of a tensor and of its views begins."""
    return tensor.untyped_storage().data_ptr()
