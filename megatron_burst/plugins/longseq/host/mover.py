# SPDX-License-Identifier: Apache-2.0
"""Host memory as a place for what backward needs: `HostMemory`, the public door.

Joins the parts: memory (`arena`), copies beside the computation (`engines`), what is on the host
(`copies`), what is fetched when (`frames`), and what autograd saves (`saved`). Sources: MEMO
(arXiv 2407.12117: swap or recompute per token), FPDT (arXiv 2408.16978: double buffer).
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
from .copies import HostCopy, HostTraffic, KnownCopies, Moved, PendingCopies
from .engines import StreamEngine, WorkerEngine, pin
from .frames import HostFrame, Order
from .saved import MIN_BYTES, Arguments, hooks, movable

_SLICE = 256  # a tensor with gaps in a storage this many times as large is no layer's result


class CopyRates(NamedTuple):
    """Bytes per second out to the host and back, None before the first copy."""

    out: float | None
    back: float | None


class HostMemory:
    """Host memory of one process, to which saved tensors are offloaded until backward.

    limit: bytes; None for this process's share of 80 % of what is there (`host_limit`).
    rate: bytes per second that copies keep to in each direction, on a CPU only: an emulated link.
    strict: memory holds NaN until the copy into it was waited for, and after it was freed; for
    tests.
    device: what tensors are moved from; the others are left. None for "cuda" where it is available,
    else "cpu", where worker threads copy in place of transfers.
    ranks: processes of this node that share its host memory, for the default limit and messages.

    Raises ValueError for arguments that cannot be. Only tests with streams that record what they
    are told have run the part for CUDA.
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
            raise ValueError(f"device must be cpu or cuda: others are not served, got {device!r}")
        if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
            raise ValueError(f"ranks must be a number of processes from 1 on, got {ranks!r}")
        if limit is None:
            limit = host_limit() // ranks
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
            raise ValueError(f"limit must be a number of bytes from 1 on, got {limit!r}")
        number = isinstance(rate, (int, float)) and not isinstance(rate, bool)
        if rate is not None and (cuda or not number or not rate > 0):
            raise ValueError(
                f"rate must be bytes per second of an emulated link on a CPU, got {rate!r} for "
                f"{self.device.type}; None copies as fast as it can"
            )
        arena = Arena(limit, pin=pin if cuda else None, ranks=ranks, strict=strict)

        def engine() -> StreamEngine | WorkerEngine:
            return StreamEngine(self.device, strict) if cuda else WorkerEngine(rate, strict)

        self._traffic = HostTraffic(arena, engine(), engine(), strict)
        self._pending = PendingCopies()
        self._order = Order(self._pending.settle)
        self._known = KnownCopies()
        # Called with the bytes of a tensor for which there is no room, and which then stays;
        # None: OutOfHostMemory is raised.
        self.spill: Callable[[int], object] | None = None

    def move(
        self,
        tensor: torch.Tensor,
        fraction: float = 1.0,
        *,
        shared: bool = False,
        framed: bool = True,
    ) -> Moved:
        """Begin to copy the last ceil(fraction * rows) rows (dim 0; in memory order where dim 0 is
        not the outermost) to the host; the other rows stay, in memory of their own.

        The tensor's memory on the device is free when the copy is over and nobody else holds it:
        drop it. It must not be changed in place any more (`Moved.release` ends that). What is not
        plain memory of this device (see `saved`), has no dimension or no element is left as it is.

        shared: a copy of the same memory that is there serves this tensor too, if autograd counts
        no change since; not for buffers that communication or kernels write, which it cannot see.
        framed: False for a tensor that belongs to no frame, because the caller fetches it before
        backward.

        Raises OutOfHostMemory, ValueError for a fraction outside 0 to 1.
        """
        check_fraction("fraction", fraction)
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"tensor must be a tensor, got {type(tensor).__name__}")
        if fraction == 0 or not movable(tensor, self.device.type):
            return Moved(tensor, None)
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
        """Offload everything that autograd saves for backward inside, `fraction` of the rows of
        each. Memory that several saved tensors share travels once: a dense tensor alone, of one
        with gaps (a slice of columns) the whole storage, unless that is 256 times as large.

        Left: what `move` leaves, parameters and their views, what has fewer than `min_bytes` bytes,
        and tensors for which `keep` is true. The block is a frame of its own unless it is inside of
        one. As with any saved-tensor hooks, a parameter comes back as another tensor object.
        """
        check_fraction("fraction", fraction)

        def worth(tensor: torch.Tensor) -> bool:
            if fraction == 0 or not movable(tensor, self.device.type):
                return False
            if tensor.numel() * tensor.element_size() < min_bytes:
                return False
            return keep is None or not keep(tensor)

        def move(tensor: torch.Tensor) -> Moved:
            if _dense(tensor):
                return self.move(tensor.detach(), fraction, shared=True)
            count = tensor.untyped_storage().nbytes() // tensor.element_size()
            if count > _SLICE * tensor.numel() and not self._known.find(tensor, (0, count)):
                return Moved(tensor, None)
            staying = count - math.ceil(fraction * count)
            return self._moved(tensor.detach(), (0, count), staying, True, self._frame_now())

        with self.frame() if not self._order.stack() else nullcontext(), hooks(move, worth):
            yield

    def drain(self) -> None:
        """What the caller does next comes after all copies out: for measurements, which a copy that
        still waits for the link would disturb. On CUDA the current stream waits.
        """
        with self._traffic.alone():
            self._pending.drain()

    def frame(self) -> HostFrame:
        """What one layer leaves: `with host.frame(): ...`. In backward the first `get` of anything
        moved inside fetches all of it, and the frame that comes next.
        """
        return HostFrame(self._order)

    def call(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        move: Callable[[torch.Tensor], Moved],
    ) -> Arguments:
        """`function(*args)`, whose arguments go through `move` when it is called first."""
        return Arguments(function, args, move)

    def _moved(
        self,
        tensor: torch.Tensor,
        span: tuple[int, int],
        cut: int,
        shared: bool,
        frame: HostFrame | None,
    ) -> Moved:
        """A handle to a tensor that lies in elements `span` of its storage, all on the host but the
        first `cut`; of a copy that is there, if it may be `shared`, or of a new one.
        """
        with self._traffic.alone():
            found = self._known.find(tensor, span) if shared else None
            if found is not None:
                return Moved(tensor, *found, frame)
            return self._sent(tensor, span, cut, shared, frame)

    def _sent(
        self,
        tensor: torch.Tensor,
        span: tuple[int, int],
        cut: int,
        shared: bool,
        frame: HostFrame | None,
    ) -> Moved:
        """A handle to a copy that begins; to the tensor itself where `spill` took it."""
        with torch.no_grad():
            flat = tensor.detach().as_strided((span[1] - span[0],), (1,), span[0])
        try:
            copy = HostCopy(self._traffic, flat, cut)
        except OutOfHostMemory:
            if self.spill is None:
                raise
            self.spill((len(flat) - cut) * flat.element_size())
            return Moved(tensor, None)
        if shared:
            self._known.add(tensor, span, copy)
        self._pending.add(object() if frame is None else frame, copy)
        return Moved(tensor, copy, span[0], frame)

    def _frame_now(self) -> HostFrame | None:
        stack = self._order.stack()
        return stack[-1] if stack else None

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in this host memory: on a CPU, who counts the tensors of the device
        leaves these out.
        """
        return self._traffic.arena.owns(tensor)

    @property
    def limit(self) -> int:
        """Bytes that may be in use, whole pages."""
        return self._traffic.arena.limit

    @property
    def used(self) -> int:
        """Bytes on the host: the sum over what is there of ceil(fraction * rows) rows."""
        return self._traffic.arena.used

    @property
    def peak(self) -> int:
        """The largest `used` so far."""
        return self._traffic.arena.peak

    @property
    def mapped(self) -> int:
        """Bytes of host memory held, in use or ready to be used again."""
        return self._traffic.arena.mapped

    @property
    def frames(self) -> int:
        """How many frames have something on the host."""
        return self._order.live

    @property
    def bytes_out(self) -> int:
        """Bytes copied to the host so far, counted when a copy begins."""
        return self._traffic.bytes_out

    @property
    def bytes_back(self) -> int:
        """Bytes copied back so far, counted when a copy begins."""
        return self._traffic.bytes_back

    def rates(self) -> CopyRates:
        """Bytes per second of the copies that are over."""
        traffic = self._traffic
        return CopyRates(traffic.out.rate(), traffic.back.rate())


def _dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor fills a run of its storage, each element once, in whatever order of dims."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


BYTES = 64 << 20  # of one copy: long enough for a link's full rate
COPIES = 3  # the first one maps and pins host memory


def copy_rate(host: HostMemory, together: Callable[[], object]) -> float:
    """Bytes per second of the slower direction, of copies out and back.

    together: waits for the others that copy, so that all begin at the same time. No more than a
    quarter of the host memory is used.
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
