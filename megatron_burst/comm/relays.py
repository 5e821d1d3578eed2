# SPDX-License-Identifier: Apache-2.0
"""The relay stream: hops that pass rows on do not wait for the computation of their rank.

A CUDA operation waits for all earlier operations of its stream. A rank that passes rows on in the
stream of its computation therefore sends them only after its kernels. With a relay stream, the rank
starts a chain of transfers before it launches these kernels: each transfer waits for the transfers
whose rows it sends, and for nothing else. Received partial results are added on the relay stream
too. The computing stream waits for a boundary of the chain when it needs the rows.

Rules for memory, which make `record_stream` unnecessary:

- The relay stream waits at the start of a chain for all earlier work of the computing stream. No
  kernel is launched between this wait and the last operation of the chain. So a buffer that the
  chain takes is not in use by a kernel.
- The chain takes message buffers from its own pool (`Buffers.beside`), which the computing stream
  does not use. Memory comes from the allocator's pool of the computing stream.
- Sums that exist at the start of a chain are kept until the pass ends (`Ring`), because the chain
  may read them while kernels run.
- The computing stream waits for the end of the chain before the buffers of the pass are freed.

All transfers of a chain use the communicators of the pass, in the order of its boundaries. So the
order on each communicator is equal on all ranks, as without a relay stream.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch

from .waits import WaitClock


def one_queue() -> bool:
    """Return True if CUDA has one hardware queue, in which streams wait for each other.

    Passes on CUDA then use no relay stream: a kernel could not start before an earlier launched
    transfer that waits.
    """
    return os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"


class Relays(Protocol):
    """The relay stream, as one pass of one rank uses it.

    `start` runs `work`, whose device operations are a chain on the relay stream. `work` calls
    `mark` when the operations of a boundary are complete. `wait` makes later operations of the
    current stream wait for the mark of a boundary, if there is one. In `work`, memory is allocated
    in the context `memory`. After an error, `abandon` lets later operations of the computing stream
    wait for the relay stream, because they may reuse the memory of its buffers.
    """

    def start(self, work: Callable[[], None]) -> None: ...

    def mark(self, boundary: int) -> None: ...

    def wait(self, boundary: int) -> None: ...

    def memory(self) -> AbstractContextManager[object]: ...

    def abandon(self) -> None: ...


class InOrder:
    """Relays without a stream: the chain ends before the computation continues, as on a CPU."""

    def start(self, work: Callable[[], None]) -> None:
        work()

    def mark(self, boundary: int) -> None:
        pass

    def wait(self, boundary: int) -> None:
        pass

    def memory(self) -> AbstractContextManager[object]:
        return nullcontext()

    def abandon(self) -> None:
        pass


@dataclass
class StreamRelays:
    """Relays on a CUDA stream.

    Attributes:
        stream: The relay stream.
        clock: Clock that measures how long the computing stream waits, or None.
    """

    stream: torch.cuda.Stream
    clock: WaitClock | None = None
    _computing: torch.cuda.Stream | None = None
    _marks: dict[int, torch.cuda.Event] = field(default_factory=dict)

    def start(self, work: Callable[[], None]) -> None:
        self._computing = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(self._computing)
        clock_off = nullcontext() if self.clock is None else self.clock.off()
        with torch.cuda.stream(self.stream), clock_off:
            work()

    def mark(self, boundary: int) -> None:
        self._marks[boundary] = mark = torch.cuda.Event()
        mark.record(self.stream)

    def wait(self, boundary: int) -> None:
        mark = self._marks.pop(boundary, None)
        if mark is not None and self.clock is not None:
            self.clock.wait_on_stream(mark)
        elif mark is not None:
            mark.wait()

    def memory(self) -> AbstractContextManager[object]:
        assert self._computing is not None
        return torch.cuda.stream(self._computing)

    def abandon(self) -> None:
        if self._computing is not None:
            self._computing.wait_stream(self.stream)
