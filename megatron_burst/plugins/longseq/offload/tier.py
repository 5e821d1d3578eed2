# SPDX-License-Identifier: Apache-2.0
"""Offloading in one training run: the host memory, the offloaded fraction, and layer calls.

The first step moves tensors as long as they fit, and never raises `OutOfHostMemory`. At its end,
all ranks check together whether the moved tensors fit in host memory. With `auto`, they select the
fraction from the measured bytes and times.

Until backward, Megatron's schedule holds the input that a pipeline stage received. The first layer
saves this input, so the input is copied to the host like the input of every layer. Its device
memory is freed after the copy: backward reads the gradient and the shape of the held tensor, never
its elements.
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
from ..host.copies import MovedTensor
from ..host.frames import HostFrame
from ..host.mover import HostMemory, copy_rate
from ..options import LongSequenceOptions
from .demand import HostDemand, HostNode, choice, line, too_small

# Keys of `RunState.plugins`.
OPTIONS = "longseq: options"  # the options of a configuration that offloads
TIER = "longseq: tier"  # the tier, created at the first use
MIN_BYTES = 1 << 20  # smaller tensors stay: launch time dominates their copies


def configured(patches: PatchSet, config: Any, burst: LongSequenceOptions) -> None:
    """Record the options of a configuration in `patches` if they enable offloading."""
    if burst.offload:
        patches.run.plugins[OPTIONS] = burst


def tier_of(patches: PatchSet) -> Tier | None:
    """Return the `Tier` of the training run; None if no configuration enables offloading.

    The first call creates it.
    """
    burst = patches.run.plugins.get(OPTIONS)
    if burst is None:
        return None
    if TIER not in patches.run.plugins:
        patches.run.plugins[TIER] = Tier(burst)
    return patches.run.plugins[TIER]


class RunningCall(NamedTuple):
    """Layer call in progress: the fraction of rows that it moves to the host, and its frame.

    A frame consists of the tensors of one layer, which backward fetches together.
    """

    fraction: float
    frame: HostFrame


class KeyMemory:
    """Host memory for keys of other ranks during one attention call in row chunks.

    These keys are on the host only during the forward of one layer, so they are counted separately
    from saved tensors.

    Attributes:
        bytes: Bytes moved so far, including bytes that did not fit.
    """

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self.bytes = 0

    def move(self, tensor: torch.Tensor, *, framed: bool = False) -> MovedTensor:
        """Move all rows of a tensor of any size to the host; see `HostMemory.move`."""
        before = self._tier.moved()
        moved = self._tier.host.move(tensor, framed=framed)
        nbytes = self._tier.moved() - before
        self.bytes += nbytes
        self._tier.note_keys(self, nbytes)
        return moved


class Tier:
    """Offloading of saved tensors to host memory in one training run.

    The first step measures how many bytes are moved. Before the first step of Megatron's schedules,
    the number of ranks of a node is unknown. Until then all ranks of the run are assumed to share
    one node.
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
        self.settled = False  # true after the first step
        self._paused = False
        self._key_bytes = 0  # bytes of keys of other ranks that were moved so far
        self._running: RunningCall | None = None
        self._received = ReceivedInputs()

    def _memory(self) -> HostMemory:
        return HostMemory(self.node.share, ranks=self.node.ranks)

    # --- a step -----------------------------------------------------------------------------

    def begin(self, passes: int) -> None:
        """Begin a training step on all ranks; the first call is collective.

        Args:
            passes: Maximum number of this rank's forward passes that wait for backward at the same
                time. A micro-batch has one forward pass in each model chunk.
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
        """End a training step on all ranks; the first call is collective.

        Raises:
            ValueError: The moved tensors of a rank do not fit on its host; all ranks raise the
                error.
        """
        if self.first is None:
            return
        own, self.settled = self.first.demand(), True
        self.first = self.host.spill = None
        of_ranks = gather((own, self.node, self.link))
        if self.auto:
            self.fraction = min(choice(*rank).fraction for rank in of_ranks)
        elif error := too_small(self.fraction, [(demand, node) for demand, node, _ in of_ranks]):
            raise ValueError(error)
        log(line(self.fraction, own, self.node, self.link))

    def abandon(self) -> None:
        """Reset the state after a failed step; the host memory is freed with the autograd graph."""
        self.first = self.host.spill = self._running = None
        self._received = ReceivedInputs()

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Return a context that disables offloading, for forward passes without backward."""
        paused, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = paused

    @contextlib.contextmanager
    def forward_pass(self, received: Any) -> Iterator[None]:
        """Return a context for the forward pass of one micro-batch in one model chunk.

        Args:
            received: Tensor, list of tensors or None that the previous pipeline stage sent. The
                schedule holds it until backward. Its tensors that were moved to the host are freed
                on the device when the context ends.
        """
        if self.first is not None:
            self.first.next_pass()
        self._received = ReceivedInputs(received)
        yield
        self._received.free()
        self._received = ReceivedInputs()

    # --- a call -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def call(self, arguments: Iterable[Any]) -> Iterator[RunningCall | None]:
        """Return a context that offloads the tensors that one call of a layer or checkpoint saves.

        A call within another call is part of the outer call. The context yields the offloaded call,
        or None if offloading is disabled.

        Args:
            arguments: Arguments of the call. Tensors that need no gradient (masks, rotary tables)
                belong to all layers and stay on the device.
        """
        if self._running is not None or self._paused or not torch.is_grad_enabled():
            yield self._running
            return
        tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
        shared = {address_of(tensor) for tensor in tensors if not tensor.requires_grad}
        first, before = self.first, self._saved_bytes()
        self._running = RunningCall(self.fraction, self.host.frame())
        clock = Clock(self.host.device.type == "cuda")
        try:
            with self._running.frame:
                self._received.move(tensors, self.fraction, self.host, MIN_BYTES)
                with self.host.saved(
                    self.fraction, min_bytes=MIN_BYTES, keep=self._staying(shared)
                ):
                    yield self._running
        finally:
            self._running = None
        if first is not None:
            clock.stop()
            first.add(self._saved_bytes() - before, clock)
            self.host.drain()  # copies must not disturb the time of the next call

    @property
    def running(self) -> RunningCall | None:
        """Call in progress whose saved tensors are offloaded, or None."""
        return self._running

    def saved(self, fraction: float) -> contextlib.AbstractContextManager[None]:
        """Return a context that moves `fraction` of the rows of each tensor that autograd saves."""
        return self.host.saved(fraction, min_bytes=MIN_BYTES, keep=self._staying(set()))

    def keys(self) -> KeyMemory | None:
        """Return host memory for keys of other ranks, for one attention call in row chunks.

        If offloading is disabled, return None on all ranks.
        """
        return None if self._paused or not self.fraction else KeyMemory(self)

    def moved(self) -> int:
        """Return the bytes moved to the host so far, including bytes that did not fit."""
        return self.host.bytes_out + (self.first.spilt if self.first is not None else 0)

    def note_keys(self, memory: KeyMemory, nbytes: int) -> None:
        """Count bytes of other ranks' keys that were moved to the host.

        Args:
            memory: Host memory of the attention call, which counts all bytes of this call.
            nbytes: Bytes that were moved since the last call of this method.
        """
        self._key_bytes += nbytes
        if self.first is not None:
            self.first.note_keys(memory.bytes)

    def _saved_bytes(self) -> int:
        """Return the bytes of saved tensors moved so far, including bytes that did not fit."""
        return self.moved() - self._key_bytes

    def _staying(self, shared: set[int]) -> Any:
        def keep(tensor: torch.Tensor) -> bool:
            self._received.saved(tensor)
            return address_of(tensor) in shared

        return keep


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage."""
    return tensor.untyped_storage().data_ptr()


class _MovedInput(NamedTuple):
    tensor: torch.Tensor
    moved: MovedTensor


class ReceivedInputs:
    """Inputs that one forward pass received from the previous pipeline stage.

    They are moved to the host, and freed on the device after the forward pass.

    Args:
        received: A tensor, a list of tensors, or None.
    """

    def __init__(self, received: Any = None) -> None:
        tensors = received if isinstance(received, (list, tuple)) else [received]
        # Receive buffers of the schedule are leaves. Other code may read tensors with a history.
        self._waiting = [
            tensor
            for tensor in tensors
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad and tensor.is_leaf
        ]
        self._moved: list[_MovedInput] = []
        self._saved: set[int] = set()

    def move(
        self, arguments: Iterable[torch.Tensor], fraction: float, host: HostMemory, least: int
    ) -> None:
        """Begin to copy received inputs that are arguments of the first layer to the host.

        When the layer saves such an input, the same copy is used.

        Args:
            arguments: Arguments of the layer.
            fraction: Fraction of the rows that is moved.
            host: Host memory.
            least: Inputs of fewer bytes stay on the device.
        """
        for argument in arguments:
            if any(argument is tensor for tensor in self._waiting):
                self._waiting = [tensor for tensor in self._waiting if tensor is not argument]
                share = fraction if argument.nbytes >= least else 0.0
                moved = host.move(argument.detach(), share, shared=True)
                if moved.moved:
                    self._moved.append(_MovedInput(argument, moved))

    def saved(self, tensor: torch.Tensor) -> None:
        """Record that autograd saves this tensor for a layer."""
        if self._moved:
            self._saved.add(tensor.untyped_storage()._cdata)

    def free(self) -> None:
        """Free the device memory of moved inputs after the copies to the host.

        An input that autograd did not save for a layer stays on the device.
        """
        for tensor, moved in self._moved:
            storage = tensor.untyped_storage()
            if storage._cdata in self._saved and storage.resizable():
                moved.release()
                storage.resize_(0)
        self._moved.clear()


class Clock:
    """Time from construction to `stop`, on the device if there is one, otherwise on this thread."""

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
        """Wait for the device and return the elapsed seconds."""
        start, end = self.marks
        if not self.on_device:
            return end - start
        end.synchronize()
        return start.elapsed_time(end) / 1e3


class FirstStep:
    """Measurements of the first step: the bytes that layer calls move, and the time of each call.

    Attributes:
        passes: Maximum number of forward passes that wait for backward at the same time. A
            micro-batch has one forward pass in each model chunk.
        spilt: Bytes that did not fit on the host.
    """

    def __init__(self, passes: int) -> None:
        self.passes = passes
        self.spilt = 0
        self._keys = 0  # largest number of bytes of keys of other ranks in one call
        self._clocks: list[Clock] = []
        self._largest = 0
        self._of_passes = [0]

    def next_pass(self) -> None:
        """Record that the forward pass of one micro-batch in one model chunk begins."""
        self._of_passes.append(0)

    def spill(self, nbytes: int) -> None:
        """Count bytes that stay on the device because they do not fit on the host."""
        self.spilt += nbytes

    def note_keys(self, nbytes: int) -> None:
        """Record the bytes of other ranks' keys that an attention call has moved so far."""
        self._keys = max(self._keys, nbytes)

    def add(self, nbytes: int, clock: Clock) -> None:
        """Record a layer call.

        Args:
            nbytes: Bytes that the call moved, including bytes that did not fit.
            clock: Clock that measured the call.
        """
        self._largest = max(self._largest, nbytes)
        self._of_passes[-1] += nbytes
        self._clocks.append(clock)

    def demand(self) -> HostDemand:
        """Return this rank's `HostDemand`. It depends on the fraction used in the first step."""
        seconds = median(clock.seconds() for clock in self._clocks) if self._clocks else 0.0
        sums = max(self._of_passes)
        return HostDemand(self._largest, seconds, sums, self.passes, bool(self.spilt), self._keys)


def gather(value: Any) -> list[Any]:
    """Return a list with `value` of every rank of the run. All ranks must call it."""
    if not torch.distributed.is_initialized():
        return [value]
    gathered = [value] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, value)
    return gathered


def shared_node(stated: int | None) -> HostNode:
    """Return the host memory of this rank's node. All ranks of the node get the same result.

    This is a collective over all ranks of the run.

    Args:
        stated: Bytes per node; None for 80 % of the available memory.
    """
    host = this_host()
    limit = stated or host_limit()
    limits = [rank_limit for name, rank_limit in gather((host, limit)) if name == host]
    return HostNode(min(limits), len(limits))


def lone_node(stated: int | None) -> HostNode:
    """Return this node's host memory, as if all ranks of the run were on this node.

    The function does not communicate.
    """
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    return HostNode(stated or host_limit(), ranks)


def measured_rate(host: HostMemory) -> float:
    """Measure the copy rate to `host` or back, the slower one, while all ranks copy.

    This is a collective over all ranks of the run.

    Returns:
        Bytes per second.
    """
    return copy_rate(host, lambda: gather(None))
