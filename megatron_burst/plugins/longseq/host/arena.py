# SPDX-License-Identifier: Apache-2.0
"""Allocator of host memory: slabs of whole pages, cut into blocks of any length.

Allocation is best fit: a block gets the smallest gap that is large enough. A freed block merges
with neighbouring gaps, so that packed batches of varying lengths reuse the same memory. A block is
freed when its Python object is destroyed, on any thread, even during a garbage collection. The next
block in this memory waits for pending copies of the freed block.

Torch's own allocator of pinned memory (`CachingHostAllocator.h`) is not suitable. It rounds every
request up to a power of two, never splits or merges blocks, and has no limit.
`pinned_max_round_threshold_mb` disables the rounding, but for the whole process, including data
loaders that pin memory. With this setting, torch up to 2.13 returns any cached block between the
same two powers of two, even if the block is smaller than the request; torch 2.15 returns only
blocks that are large enough.
"""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ....units import byte_size

ALIGN = 512  # bytes; blocks start and end at multiples of this number
# Minimum bytes of a slab, if the limit permits. A slab also has at least a 16th of the bytes that
# are already mapped, so that one terabyte needs about 150 slabs.
SLAB = 64 * 2**20
_POISON = 0xFF  # a NaN in every floating-point format, -1 in integers


class OutOfHostMemory(RuntimeError):
    """Raised if a block does not fit within the limit of host memory."""


class Event(Protocol):
    """Handle to a copy in progress."""

    def done(self) -> bool:
        """Return whether the copy is complete, without waiting."""
        ...

    def wait(self) -> None:
        """Make later work of the caller wait for the copy.

        On a CPU the calling thread blocks; on CUDA only the current stream waits.
        """
        ...

    def settle(self) -> None:
        """Block the calling thread until the copy is complete, on a CPU and on CUDA."""
        ...


@dataclass
class _Gap:
    start: int
    size: int
    after: tuple[Event, ...] = ()  # copies that may still read or write this memory


@dataclass(eq=False)
class Slab:
    """Mapped host memory of whole pages. If `unpin` is set, it is called before the unmapping."""

    memory: mmap.mmap
    address: int
    size: int
    gaps: list[_Gap] = field(default_factory=list)
    unpin: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self.unpin is not None:
            self.unpin()


@dataclass(eq=False)
class Block:
    """Range of a slab (memory that is mapped in one call), allocated for one tensor.

    The range is freed when this object is destroyed.

    Attributes:
        slab: Slab that contains the block.
        start: Offset in the slab, in bytes.
        size: Bytes of the slab that the block occupies.
        nbytes: Requested bytes.
        after: Copies that read or write the block. The first writer must wait for the copies that
            are pending at allocation.
        freed: Queue of destroyed blocks, whose memory the arena reuses.
    """

    slab: Slab
    start: int
    size: int
    nbytes: int
    after: list[Event]
    freed: deque[tuple[Slab, int, int, int, list[Event]]]

    def bytes(self) -> torch.Tensor:
        """Return the memory as a uint8 tensor [nbytes].

        `torch.frombuffer` bypasses torch's dispatcher, so that code which counts live device
        tensors does not count this memory.
        """
        count, start = self.nbytes, self.start
        return torch.frombuffer(self.slab.memory, dtype=torch.uint8, count=count, offset=start)

    def __del__(self) -> None:
        # One atomic operation: a garbage collection may run it while the arena holds its lock.
        self.freed.append((self.slab, self.start, self.size, self.nbytes, self.after))


class Arena:
    """Allocator of blocks in host memory, up to a total number of bytes.

    Args:
        limit: Maximum bytes of host memory to map, rounded down to whole pages.
        pin: Function of (address, bytes) that pins mapped memory and returns a function that unpins
            it.
        ranks: Number of processes that share the node's limit; used in messages only.
        strict: True to fill memory with NaN when it is freed.
    """

    def __init__(
        self,
        limit: int,
        *,
        pin: Callable[[int, int], Callable[[], None]] | None = None,
        ranks: int = 1,
        strict: bool = False,
    ):
        self.limit = limit // mmap.PAGESIZE * mmap.PAGESIZE
        self._pin, self._ranks, self._strict = pin, ranks, strict
        self._slabs: list[Slab] = []
        self._freed: deque[tuple[Slab, int, int, int, list[Event]]] = deque()
        self._lock = threading.Lock()
        self._used = self.peak = 0

    @property
    def used(self) -> int:
        """Bytes of blocks in use."""
        with self._lock:
            self._collect()
            return self._used

    @property
    def mapped(self) -> int:
        """Bytes of mapped memory, in use or free."""
        return sum(slab.size for slab in self._slabs)

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return whether the memory of a tensor belongs to this arena."""
        address = tensor.data_ptr() if tensor.device.type == "cpu" else 0
        return any(slab.address <= address < slab.address + slab.size for slab in self._slabs)

    def take(self, nbytes: int) -> Block:
        """Allocate a block.

        Args:
            nbytes: Bytes of the block.

        Raises:
            OutOfHostMemory: The block does not fit within the limit.
        """
        size = max(1, -(-nbytes // ALIGN)) * ALIGN
        with self._lock:
            self._collect()
            fit = self._best_fit(size)
            if fit is None:
                self._grow(size)
                fit = self._best_fit(size)
            assert fit is not None
            slab, gap = fit
            block = Block(slab, gap.start, size, nbytes, _pending(gap.after), self._freed)
            gap.start, gap.size = gap.start + size, gap.size - size
            if not gap.size:
                slab.gaps.remove(gap)
            self._used += nbytes
            self.peak = max(self.peak, self._used)
        return block

    def _best_fit(self, size: int) -> tuple[Slab, _Gap] | None:
        """Return the smallest free range of at least `size` bytes, with its slab, or None.

        If several ranges have this size, return the first one.
        """
        fitting = [(slab, gap) for slab in self._slabs for gap in slab.gaps if gap.size >= size]
        return min(fitting, key=lambda fit: fit[1].size, default=None)

    def _collect(self) -> None:
        """Return the memory of destroyed blocks to their slabs, as free ranges."""
        while self._freed:
            slab, start, size, nbytes, after = self._freed.popleft()
            self._used -= nbytes
            if self._strict:
                for event in after:
                    event.settle()
                memory = slab.memory
                torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=start).fill_(_POISON)
            _give_back(slab.gaps, _Gap(start, size, tuple(_pending(after))))

    def _grow(self, size: int) -> None:
        """Map a slab of at least `size` bytes; unmap idle slabs first if the limit requires it."""
        if self.limit - self.mapped < size:
            self._slabs = [slab for slab in self._slabs if not _idle(slab)]
        room = self.limit - self.mapped
        if room < size:
            raise OutOfHostMemory(self._message(size))
        length = max(size, min(room, max(SLAB, self.mapped // 16)))
        length = -(-length // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = mmap.mmap(-1, length)
        address = torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()
        slab = Slab(memory, address, length, [_Gap(0, length)])
        if self._pin is not None:
            slab.unpin = self._pin(address, length)
        self._slabs.append(slab)

    def _message(self, size: int) -> str:
        longest = max((gap.size for slab in self._slabs for gap in slab.gaps), default=0)
        enough = (self.mapped + size) * self._ranks
        per_rank = "" if self._ranks == 1 else f", 1/{self._ranks} of the node's limit"
        return (
            f"host memory: a block of {byte_size(size)} does not fit: {byte_size(self._used)} of "
            f"the {byte_size(self.limit)} of this rank{per_rank} are in use, and the largest free "
            f"block has {byte_size(longest)}. Set --burst-host-memory {enough} or more (bytes per "
            "node; later layers may need more), or lower --burst-offload"
        )


def _pending(after: Sequence[Event]) -> list[Event]:
    return [event for event in after if not event.done()]


def _idle(slab: Slab) -> bool:
    """Return True if no block and no pending copy uses the slab."""
    [*gaps] = slab.gaps
    return len(gaps) == 1 and gaps[0].size == slab.size and not _pending(gaps[0].after)


def _give_back(gaps: list[_Gap], new: _Gap) -> None:
    """Insert a free range into a slab's list of free ranges, and merge adjacent ranges.

    The list is sorted by address.
    """
    index = sum(gap.start < new.start for gap in gaps)
    if index < len(gaps) and new.start + new.size == gaps[index].start:
        right = gaps.pop(index)
        new = _Gap(new.start, new.size + right.size, new.after + tuple(_pending(right.after)))
    if index and gaps[index - 1].start + gaps[index - 1].size == new.start:
        left = gaps.pop(index - 1)
        new = _Gap(left.start, left.size + new.size, tuple(_pending(left.after)) + new.after)
        index -= 1
    gaps.insert(index, new)
