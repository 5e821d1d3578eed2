# SPDX-License-Identifier: Apache-2.0
"""The tier of a run: one `HostMemory`, the fraction in force, and the calls that use them.

The first step moves what fits on the host and never fails for lack of it: whether the rest of the
run fits is decided at its end, by all ranks together, from the bytes and times of that step.

The input that a pipeline stage received is held by Megatron's schedule until backward. Its first
layer saves it, so it travels to the host like every layer's input, and its memory on the device
would stay all the same. It is freed once it is on the host: backward reads the gradient and the
shape of the held tensor, never its elements.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from statistics import median
from typing import Any, NamedTuple

import torch

from ....comm.hosts import this_host
from ....megatron.patching import PatchSet, log
from ....recompute.host_limits import host_limit
from ....units import size_of
from ..host.copies import Moved
from ..host.frames import HostFrame
from ..host.mover import HostMemory, copy_rate
from ..options import LongSequenceOptions
from .demand import HostDemand, Node, choice, line, too_small

ASKED = "offload"  # note: the choices of the configuration that asked for it
TIER = "host memory"  # note: the tier, once a forward pass or a step needed it
MIN_BYTES = 1 << 20  # smaller tensors stay: a copy would cost more than they free


def configured(patches: PatchSet, config: Any, burst: LongSequenceOptions) -> None:
    """Note that a configuration of the run moves activations to host memory."""
    if burst.offload:
        patches.notes[ASKED] = burst


def tier_of(patches: PatchSet) -> Tier | None:
    """The tier of the run; None if no configuration asked for one."""
    burst = patches.notes.get(ASKED)
    if burst is None:
        return None
    if TIER not in patches.notes:
        patches.notes[TIER] = Tier(burst)
    return patches.notes[TIER]


class Going(NamedTuple):
    """What a call leaves goes to the host: this fraction of the rows, as one frame."""

    fraction: float
    frame: HostFrame


class KeyMemory:
    """Host memory for the keys of other ranks of one attention call in row chunks; `bytes`: moved
    so far, with those for which there was no room.

    These keys are on the host while one layer's forward runs, so they are counted apart from what
    layers leave until backward.
    """

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self.bytes = 0

    def move(self, tensor: torch.Tensor, *, framed: bool = False) -> Moved:
        """Move a whole tensor, whatever its size, as `HostMemory.move`."""
        before = self._tier.moved()
        moved = self._tier.host.move(tensor, framed=framed)
        nbytes = self._tier.moved() - before
        self.bytes += nbytes
        self._tier.note_keys(self, nbytes)
        return moved


class Tier:
    """Moves what layers leave to the host, and finds out in the first step how much of it fits.

    Until a step of Megatron's schedules has begun, no rank knows how many others share its node: as
    if all ranks of the run did.
    """

    def __init__(self, burst: LongSequenceOptions) -> None:
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
        self._key_bytes = 0  # of keys of other ranks, since the start
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
        on all ranks if what is asked does not fit on the host of one.
        """
        if self.first is None:
            return
        own, self.settled = self.first.demand(), True
        self.first = self.host.spill = None
        of_ranks = gather((own, self.node, self.link))
        if self.auto:
            self.fraction = min(choice(*one).fraction for one in of_ranks)
        elif error := too_small(self.fraction, [(demand, node) for demand, node, _ in of_ranks]):
            raise ValueError(error)
        log(line(self.fraction, own, self.node, self.link))

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

    def keys(self) -> KeyMemory | None:
        """Return memory for keys of other ranks during one attention call in row chunks; None where
        nothing is offloaded. The same on all ranks.
        """
        return None if self._paused or not self.fraction else KeyMemory(self)

    def moved(self) -> int:
        """Return the bytes moved to the host so far, with those for which there was no room."""
        return self.host.bytes_out + (self.first.spilt if self.first is not None else 0)

    def note_keys(self, memory: KeyMemory, nbytes: int) -> None:
        """Count keys of other ranks that one call has moved."""
        self._key_bytes += nbytes
        if self.first is not None:
            self.first.note_keys(memory.bytes)

    def _left(self) -> int:
        """Bytes that layers left for backward so far, with those for which there was no room."""
        return self.moved() - self._key_bytes

    def _staying(self, shared: set[int]) -> Any:
        def keep(tensor: torch.Tensor) -> bool:
            self._received.saved(tensor)
            return place_of(tensor) in shared

        return keep


def place_of(tensor: torch.Tensor) -> int:
    """Where the memory of a tensor and of its views begins."""
    return tensor.untyped_storage().data_ptr()


class _Held(NamedTuple):
    tensor: torch.Tensor
    moved: Moved


class Received:
    """What one forward pass received: a tensor, a list of tensors, or nothing."""

    def __init__(self, received: Any = None) -> None:
        tensors = received if isinstance(received, (list, tuple)) else [received]
        # A leaf: what the schedule made for receiving, and no result that others may read.
        self._waiting = [
            one
            for one in tensors
            if isinstance(one, torch.Tensor) and one.requires_grad and one.is_leaf
        ]
        self._moved: list[_Held] = []
        self._saved: set[int] = set()

    def move(
        self, arguments: Iterable[torch.Tensor], fraction: float, host: HostMemory, least: int
    ) -> None:
        """Begin to copy what of it is an argument of the first layer; that the layer saves it
        later adds no copy. least: bytes below which it stays.
        """
        for one in arguments:
            if any(one is other for other in self._waiting):
                self._waiting = [other for other in self._waiting if other is not one]
                share = fraction if one.nbytes >= least else 0.0
                moved = host.move(one.detach(), share, shared=True)
                if moved.moved:
                    self._moved.append(_Held(one, moved))

    def saved(self, tensor: torch.Tensor) -> None:
        """A layer has saved this tensor, in a way that moves it."""
        if self._moved:
            self._saved.add(tensor.untyped_storage()._cdata)

    def free(self) -> None:
        """Free the memory of what was saved from the host's copy, after that copy. What a layer
        keeps in another way stays.
        """
        for tensor, moved in self._moved:
            storage = tensor.untyped_storage()
            if storage._cdata in self._saved and storage.resizable():
                moved.release()
                storage.resize_(0)
        self._moved.clear()


class Clock:
    """Time from its making to `stop`, on the device where there is one, else on this thread."""

    def __init__(self, on_device: bool) -> None:
        self.on_device = on_device
        self.marks = [self._now()]

    def _now(self) -> Any:
        if not self.on_device:
            return time.perf_counter()
        mark = torch.cuda.Event(enable_timing=True)
        mark.record()
        return mark

    def stop(self) -> None:
        self.marks.append(self._now())

    def seconds(self) -> float:
        """Waits for the device."""
        start, end = self.marks
        if not self.on_device:
            return end - start
        end.synchronize()
        return start.elapsed_time(end) / 1e3


class FirstStep:
    """Collects what calls leave in the first step; `passes`: micro-batches, once per model
    chunk, that are in flight at the same time.
    """

    def __init__(self, passes: int) -> None:
        self.passes = passes
        self.spilt = 0  # bytes for which there was no room
        self._keys = 0  # most bytes of keys of other ranks in one call
        self._clocks: list[Clock] = []
        self._largest = 0
        self._of_passes = [0]

    def next_pass(self) -> None:
        """Another micro-batch begins, or the same in another model chunk."""
        self._of_passes.append(0)

    def spill(self, nbytes: int) -> None:
        """So many bytes stay, because there is no room."""
        self.spilt += nbytes

    def note_keys(self, nbytes: int) -> None:
        """Note the bytes of keys of other ranks that one call has moved so far."""
        self._keys = max(self._keys, nbytes)

    def add(self, nbytes: int, clock: Clock) -> None:
        """A call that left so many bytes for the host, whether or not there was room."""
        self._largest = max(self._largest, nbytes)
        self._of_passes[-1] += nbytes
        self._clocks.append(clock)

    def demand(self) -> HostDemand:
        """What this rank moves at the fraction of the first step."""
        seconds = median(clock.seconds() for clock in self._clocks) if self._clocks else 0.0
        sums = max(self._of_passes)
        return HostDemand(self._largest, seconds, sums, self.passes, bool(self.spilt), self._keys)


def gather(value: Any) -> list[Any]:
    """The value of every rank of the run, in their order; collective."""
    if not torch.distributed.is_initialized():
        return [value]
    gathered = [value] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, value)
    return gathered


def shared_node(stated: int | None) -> Node:
    """This rank's node; collective, so that all its ranks find the same.

    stated: bytes per node; None for 80 % of what is there.
    """
    host = this_host()
    limit = stated or host_limit()
    limits = [other for place, other in gather((host, limit)) if place == host]
    return Node(min(limits), len(limits))


def lone_node(stated: int | None) -> Node:
    """The same without asking anybody: as if all ranks of the run were on this node."""
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    return Node(stated or host_limit(), ranks)


def measured_rate(host: HostMemory) -> float:
    """Bytes per second of the slower direction while all ranks of a node copy both ways;
    collective.
    """
    return copy_rate(host, lambda: gather(None))
