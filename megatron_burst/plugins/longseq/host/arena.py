# SPDX-License-Identifier: Apache-2.0
"""Host memory in pieces of any length: slabs of whole pages, cut into blocks.

Decides where a block lies: in the smallest gap that holds it, whose neighbours it joins when it is
free again, so that packed batches of changing lengths use the same memory. Blocks are freed by
dropping them, on any thread, also inside a garbage collection; the next owner of the memory waits
for the copies that the last one had under way.

Torch's own allocator of pinned memory does not serve here (`CachingHostAllocator.h`). It rounds
every request up to a power of two, never cuts a block nor joins two, and has no limit.
`pinned_max_round_threshold_mb` ends the rounding, but it is a setting of the whole process, with
effect on every loader that pins memory, and with it releases up to 2.13 hand out any cached block
between the same two powers of two, also one that is smaller than the request; 2.15 looks for one
that is large enough.
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

ALIGN = 512  # bytes; blocks start and end at multiples
# Bytes of a slab, where more are allowed, or a 16th of what is there if that is more: so much is
# mapped without use at most, and a terabyte takes about 150 slabs.
SLAB = 64 * 2**20
_POISON = 0xFF  # a NaN in every floating-point format, -1 in integers


class OutOfHostMemory(RuntimeError):
    """The limit of host memory does not hold what should be moved there."""


class Event(Protocol):
    """The end of a copy."""

    def done(self) -> bool:
        """Whether it is over; does not wait."""
        ...

    def wait(self) -> None:
        """What the caller does next comes after the copy: a thread of the host waits, a stream of a
        device is told to wait.
        """
        ...

    def settle(self) -> None:
        """The host waits, and nothing else changes."""
        ...


@dataclass
class _Gap:
    start: int
    size: int
    after: tuple[Event, ...] = ()  # copies that may still be under way in it


@dataclass(eq=False)
class Slab:
    """Memory of whole pages; `unpin`, if it is pinned, is called before it is unmapped."""

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
    """A piece of host memory, until it is dropped. after: copies that read or write it; who writes
    into it first has to wait for those that it comes with.
    """

    slab: Slab
    start: int
    size: int
    nbytes: int
    after: list[Event]
    freed: deque[tuple[Slab, int, int, int, list[Event]]]

    def bytes(self) -> torch.Tensor:
        """uint8 [nbytes]: its memory. Made outside torch's dispatcher, so that who counts the
        tensors that live on the device does not meet it.
        """
        count, start = self.nbytes, self.start
        return torch.frombuffer(self.slab.memory, dtype=torch.uint8, count=count, offset=start)

    def __del__(self) -> None:
        # Atomic, because a garbage collection may call it while the arena is at work.
        self.freed.append((self.slab, self.start, self.size, self.nbytes, self.after))


class Arena:
    """Blocks of at most `limit` bytes together. pin: makes copies of a slab (address, bytes)
    possible without an intermediate one, and returns what undoes it. ranks: how many processes of
    this node have an arena like this one, for messages. strict: memory is filled with NaN when it
    is freed.
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
        """Bytes of the blocks that are in use."""
        with self._lock:
            self._collect()
            return self._used

    @property
    def mapped(self) -> int:
        """Bytes of memory that the arena holds, in use or not."""
        return sum(slab.size for slab in self._slabs)

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in this memory."""
        place = tensor.data_ptr() if tensor.device.type == "cpu" else 0
        return any(slab.address <= place < slab.address + slab.size for slab in self._slabs)

    def take(self, nbytes: int) -> Block:
        """A block of `nbytes` bytes. Raises OutOfHostMemory."""
        size = max(1, -(-nbytes // ALIGN)) * ALIGN
        with self._lock:
            self._collect()
            found = self._smallest(size)
            if found is None:
                self._grow(size)
                found = self._smallest(size)
            assert found is not None
            slab, gap = found
            block = Block(slab, gap.start, size, nbytes, _pending(gap.after), self._freed)
            gap.start, gap.size = gap.start + size, gap.size - size
            if not gap.size:
                slab.gaps.remove(gap)
            self._used += nbytes
            self.peak = max(self.peak, self._used)
        return block

    def _smallest(self, size: int) -> tuple[Slab, _Gap] | None:
        """The smallest gap that holds `size` bytes; of equal ones the first."""
        fitting = [(slab, gap) for slab in self._slabs for gap in slab.gaps if gap.size >= size]
        return min(fitting, key=lambda each: each[1].size, default=None)

    def _collect(self) -> None:
        """Put the blocks that were dropped back into their slabs."""
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
        """Map a slab of at least `size` bytes, after unmapping idle ones if room is short."""
        if self.limit - self.mapped < size:
            self._slabs = [slab for slab in self._slabs if not _idle(slab)]
        room = self.limit - self.mapped
        if room < size:
            raise OutOfHostMemory(self._told(size))
        wanted = max(size, min(room, max(SLAB, self.mapped // 16)))
        wanted = -(-wanted // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = mmap.mmap(-1, wanted)
        address = torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()
        slab = Slab(memory, address, wanted, [_Gap(0, wanted)])
        if self._pin is not None:
            slab.unpin = self._pin(address, wanted)
        self._slabs.append(slab)

    def _told(self, size: int) -> str:
        """What is needed, what is there, and what would do."""
        longest = max((gap.size for slab in self._slabs for gap in slab.gaps), default=0)
        enough = (self.mapped + size) * self._ranks
        per_rank = "" if self._ranks == 1 else f", one {self._ranks}th of the node's"
        return (
            f"host memory: {byte_size(size)} more is needed, and {byte_size(self._used)} of the "
            f"{byte_size(self.limit)} of this rank{per_rank} is in use (longest free piece: "
            f"{byte_size(longest)}). --burst-host-memory {enough} (bytes per node) holds it, what "
            "is moved later may need more; or lower --burst-offload"
        )


def _pending(after: Sequence[Event]) -> list[Event]:
    return [event for event in after if not event.done()]


def _idle(slab: Slab) -> bool:
    """Whether nothing of a slab is in use, nor about to be read or written."""
    [*gaps] = slab.gaps
    return len(gaps) == 1 and gaps[0].size == slab.size and not _pending(gaps[0].after)


def _give_back(gaps: list[_Gap], new: _Gap) -> None:
    """Add a gap in its place, joined with those that it touches."""
    index = sum(gap.start < new.start for gap in gaps)
    if index < len(gaps) and new.start + new.size == gaps[index].start:
        right = gaps.pop(index)
        new = _Gap(new.start, new.size + right.size, new.after + tuple(_pending(right.after)))
    if index and gaps[index - 1].start + gaps[index - 1].size == new.start:
        left = gaps.pop(index - 1)
        new = _Gap(left.start, left.size + new.size, tuple(_pending(left.after)) + new.after)
        index -= 1
    gaps.insert(index, new)
