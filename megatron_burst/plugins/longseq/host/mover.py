# SPDX-License-Identifier: Apache-2.0
"""`HostMemory`, the public interface to host memory for tensors that backward needs.

`HostMemory` combines the allocator (`arena`), asynchronous copies (`engines`), handles (`copies`),
the order of fetches (`frames`) and saved-tensor hooks (`saved`). Sources: MEMO (arXiv 2407.12117:
swap or recompute per token), FPDT (arXiv 2408.16978: double buffer).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from ....layout import check_fraction
from ....recompute.host_limits import host_limit
from .arena import Arena, OutOfHostMemory
from .copies import CopyIndex, HostCopy, HostTraffic, MovedTensor, PendingCopies
from .engines import StreamEngine, WorkerEngine, pin
from .frames import FrameOrder, HostFrame
from .saved import MIN_BYTES, MovedArguments, hooks, movable

_SLICE = 256  # a tensor with gaps is not moved if its storage is this many times larger


class CopyRates(NamedTuple):
    """Rates of copies to the host and back in bytes per second; None before the first copy."""

    out: float | None
    back: float | None


class HostMemory:
    """Host memory of one process, to which saved tensors are offloaded until backward.

    The CUDA part is tested only with streams that record calls. Sources: MEMO (arXiv 2407.12117),
    FPDT (arXiv 2408.16978).

    Args:
        limit: Bytes of host memory; None for this process's share of 80 % of the available memory.
        rate: Bytes per second of a link to emulate, in each direction; only on a CPU.
        strict: True to fill memory with NaN until the wait for a copy into it, and after it is
            freed; for tests.
        device: Device whose tensors are moved; None for "cuda" if it is available, otherwise "cpu".
            On "cpu" worker threads copy.
        ranks: Number of processes of this node that share its host memory; used for the default
            limit and in messages.

    Attributes:
        spill: Function that is called with the bytes of a tensor that does not fit and stays on the
            device; None to raise `OutOfHostMemory` instead.

    Raises:
        ValueError: An argument is invalid; the message names it.
    """

    def __init__(
        self,
        limit: int | None = None,
        *,
        rate: float | None = None,
        strict: bool = False,
        device: str | torch.device | None = None,
        ranks: int = 1,
    ):
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            self.device = torch.device(device)
        except (RuntimeError, TypeError):
            raise ValueError(f"device must be a device of torch, got {device!r}") from None
        cuda = self.device.type == "cuda"
        if self.device.type not in ("cpu", "cuda"):
            raise ValueError(f"device must be cpu or cuda, got {device!r}")
        if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
            raise ValueError(f"ranks must be a number of processes >= 1, got {ranks!r}")
        if limit is None:
            limit = host_limit() // ranks
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
            raise ValueError(f"limit must be a number of bytes >= 1, got {limit!r}")
        number = isinstance(rate, (int, float)) and not isinstance(rate, bool)
        if rate is not None and (cuda or not number or not rate > 0):
            raise ValueError(
                f"rate must be bytes per second > 0 and requires device cpu, got {rate!r} for "
                f"{self.device.type}; None copies at full speed"
            )
        arena = Arena(limit, pin=pin if cuda else None, ranks=ranks, strict=strict)

        def engine() -> StreamEngine | WorkerEngine:
            return StreamEngine(self.device, strict) if cuda else WorkerEngine(rate, strict)

        self._traffic = HostTraffic(arena, engine(), engine(), strict)
        self._pending = PendingCopies()
        self._order = FrameOrder(self._pending.settle)
        self._index = CopyIndex()
        self.spill: Callable[[int], object] | None = None

    def move(
        self,
        tensor: torch.Tensor,
        fraction: float = 1.0,
        *,
        shared: bool = False,
        framed: bool = True,
    ) -> MovedTensor:
        """Begin to copy the last ceil(fraction * rows) rows of a tensor to the host.

        The other rows stay on the device in separate memory. Drop the tensor: its device memory is
        freed when the copy is complete and no other reference exists. Do not change the tensor in
        place before `MovedTensor.release`.

        Args:
            tensor: Tensor to move. Rows are counted along dim 0, or in memory order if dim 0 is not
                the outermost dimension. A tensor stays on the device if it is not plain memory of
                this device (see the module `saved`), is 0-dimensional or is empty.
            fraction: Fraction of the rows, from 0 to 1.
            shared: True to reuse an existing copy of the same memory if autograd has counted no
                change since that copy. Use False for buffers that communication or kernels write,
                because autograd does not count such changes.
            framed: True to add the copy to the current frame. Use False for a tensor that the
                caller fetches before backward.

        Returns:
            A handle; `get()` returns the tensor.

        Raises:
            OutOfHostMemory: The copy does not fit, and `spill` is None.
            ValueError: An argument is invalid.
        """
        check_fraction("fraction", fraction)
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"tensor must be a torch.Tensor, got {type(tensor).__name__}")
        if fraction == 0 or not movable(tensor, self.device.type):
            return MovedTensor(tensor, None)
        with torch.no_grad():
            if not _dense(tensor):
                tensor = tensor.clone(memory_format=torch.preserve_format)
        start = int(tensor.storage_offset())
        rows = len(tensor)
        staying = rows - math.ceil(fraction * rows)
        span = start, start + tensor.numel()
        frame = self._frame_now() if framed else None
        return self._moved(tensor, span, staying * (tensor.numel() // rows), shared, frame)

    @contextmanager
    def saved(
        self,
        fraction: float = 1.0,
        *,
        min_bytes: int = MIN_BYTES,
        keep: Callable[[torch.Tensor], bool] | None = None,
    ) -> Iterator[None]:
        """Offload the tensors that autograd saves for backward inside this context.

        Memory that several saved tensors share is copied once. A dense tensor is copied alone. For
        a tensor with gaps (a slice of columns) the whole storage is copied, unless the storage is
        more than 256 times as large. Parameters, views of parameters and tensors that `move` does
        not copy stay on the device. The context creates a frame unless a frame is active. As with
        all saved-tensor hooks, backward gets a parameter as another tensor object.

        Args:
            fraction: Fraction of each tensor's rows to move, from 0 to 1.
            min_bytes: Tensors of fewer bytes stay on the device.
            keep: Function that returns true for a tensor that must stay on the device.

        Raises:
            ValueError: The fraction is not from 0 to 1.
        """
        check_fraction("fraction", fraction)

        def selected(tensor: torch.Tensor) -> bool:
            if fraction == 0 or not movable(tensor, self.device.type):
                return False
            if tensor.numel() * tensor.element_size() < min_bytes:
                return False
            return keep is None or not keep(tensor)

        def move(tensor: torch.Tensor) -> MovedTensor:
            if _dense(tensor):
                return self.move(tensor.detach(), fraction, shared=True)
            count = tensor.untyped_storage().nbytes() // tensor.element_size()
            if count > _SLICE * tensor.numel() and not self._index.find(tensor, (0, count)):
                return MovedTensor(tensor, None)
            staying = count - math.ceil(fraction * count)
            return self._moved(tensor.detach(), (0, count), staying, True, self._frame_now())

        with self.frame() if not self._order.stack() else nullcontext(), hooks(move, selected):
            yield

    def drain(self) -> None:
        """Make later work of the caller wait for all copies to the host.

        On CUDA only the current stream waits. Call this before measurements, which pending copies
        would disturb.
        """
        with self._traffic.exclusive():
            self._pending.drain()

    def frame(self) -> HostFrame:
        """Return a context in which all moved tensors belong to one frame, usually one layer.

        In backward, the first `get` of a tensor of a frame fetches all tensors of this frame, and
        of the frame that backward probably needs next.
        """
        return HostFrame(self._order)

    def call(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        move: Callable[[torch.Tensor], MovedTensor],
    ) -> MovedArguments:
        """Return a function that calls `function(*args)` and moves `args` at its first call.

        Args:
            function: Function to call.
            args: Arguments of `function`.
            move: Function that moves a tensor, such as `HostMemory.move`.
        """
        return MovedArguments(function, args, move)

    def _moved(
        self,
        tensor: torch.Tensor,
        span: tuple[int, int],
        cut: int,
        shared: bool,
        frame: HostFrame | None,
    ) -> MovedTensor:
        """Return a handle to the host copy of a tensor; make the copy if there is none.

        The tensor occupies the elements `span` (first, end) of its storage. The first `cut`
        elements stay on the device. An earlier copy is reused only if `shared`.
        """
        with self._traffic.exclusive():
            existing = self._index.find(tensor, span) if shared else None
            if existing is not None:
                return MovedTensor(tensor, *existing, frame)
            return self._sent(tensor, span, cut, shared, frame)

    def _sent(
        self,
        tensor: torch.Tensor,
        span: tuple[int, int],
        cut: int,
        shared: bool,
        frame: HostFrame | None,
    ) -> MovedTensor:
        """Begin a copy to the host and return its handle; arguments are the same as in `_moved`.

        If the copy does not fit, the tensor stays on the device.
        """
        with torch.no_grad():
            flat = tensor.detach().as_strided((span[1] - span[0],), (1,), span[0])
        try:
            copy = HostCopy(self._traffic, flat, cut)
        except OutOfHostMemory:
            if self.spill is None:
                raise
            self.spill((len(flat) - cut) * flat.element_size())
            return MovedTensor(tensor, None)
        if shared:
            self._index.add(tensor, span, copy)
        self._pending.add(object() if frame is None else frame, copy)
        return MovedTensor(tensor, copy, span[0], frame)

    def _frame_now(self) -> HostFrame | None:
        stack = self._order.stack()
        return stack[-1] if stack else None

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is in this host memory.

        On a CPU, code that counts device tensors uses this to skip host copies.
        """
        return self._traffic.arena.owns(tensor)

    @property
    def limit(self) -> int:
        """Maximum bytes of host memory, a multiple of the page size."""
        return self._traffic.arena.limit

    @property
    def used(self) -> int:
        """Bytes of the rows that are on the host."""
        return self._traffic.arena.used

    @property
    def peak(self) -> int:
        """Largest value of `used` so far."""
        return self._traffic.arena.peak

    @property
    def mapped(self) -> int:
        """Bytes of allocated host memory, in use or free."""
        return self._traffic.arena.mapped

    @property
    def frames(self) -> int:
        """Number of frames (layers) with tensors on the host."""
        return self._order.live

    @property
    def bytes_out(self) -> int:
        """Bytes copied to the host, counted when a copy begins."""
        return self._traffic.bytes_out

    @property
    def bytes_back(self) -> int:
        """Bytes copied back, counted when a copy begins."""
        return self._traffic.bytes_back

    def rates(self) -> CopyRates:
        """Return bytes per second of completed copies in each direction."""
        traffic = self._traffic
        return CopyRates(traffic.out.rate(), traffic.back.rate())


def _dense(tensor: torch.Tensor) -> bool:
    """Return True if a tensor fills a range of its storage without gaps, in any order of dims."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


BYTES = 64 << 20  # bytes of one copy, enough to reach the full rate of a link
COPIES = 3  # the first copy also maps and pins host memory


def copy_rate(host: HostMemory, together: Callable[[], object]) -> float:
    """Measure the rate of copies to the host and back.

    Args:
        host: Host memory; at most a quarter of it is used.
        together: Function that waits for the other processes that call `copy_rate`, so that all
            copies begin at the same time.

    Returns:
        Bytes per second in the slower direction.
    """
    size = max(1, min(BYTES, host.limit // 4))
    data = torch.zeros(size, dtype=torch.uint8, device=host.device)
    for _ in range(COPIES):
        together()
        moved = host.move(data)
        moved.release()
        moved.get()
        if data.is_cuda:
            torch.cuda.synchronize()
    rates = [rate for rate in host.rates() if rate is not None]
    return min(rates)
