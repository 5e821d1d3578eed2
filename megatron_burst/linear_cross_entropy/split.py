# SPDX-License-Identifier: Apache-2.0
"""The tensor-parallel group: who holds which vocabulary rows and tokens, and what they exchange.

With a group every rank holds an equal slice of the vocabulary, in rank order, and all labels.
With sequence parallelism it also holds only its slice of the tokens: the rows of a tile are then
the same rows of every slice, so that one all-gather brings a tile and one reduce-scatter returns
its gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..comm.consensus import Facts, agree
from .formula import Stats, merge

LABEL = "exchange failed: LM head"
# Collective -> its names in torch.distributed, the newest first.
CALLS = {
    "all_gather": ("all_gather_single", "all_gather_into_tensor"),
    "reduce_scatter": ("reduce_scatter_single", "reduce_scatter_tensor"),
    "all_reduce": ("all_reduce",),
}


@dataclass(frozen=True)
class InFlight:
    """A tensor that an exchange is filling; `wait` returns it filled."""

    tensor: torch.Tensor
    work: dist.Work | None = None

    def wait(self) -> torch.Tensor:
        """The tensor, once it is filled; RuntimeError where the exchange failed."""
        if self.work is not None:
            _guarded(self.work.wait)
        return self.tensor


@dataclass(frozen=True)
class Answer:
    """A flag on its way to the host."""

    flag: torch.Tensor
    ready: torch.cuda.Event | None = None

    def read(self) -> bool:
        """The flag; waits for what the device was given before the question, nothing later."""
        if self.ready is not None:
            self.ready.synchronize()
        return bool(self.flag)


@dataclass(frozen=True)
class Split:
    """`group` None: one rank holds everything, and nothing is exchanged."""

    group: dist.ProcessGroup | None = None
    sequence_parallel: bool = False

    @property
    def size(self) -> int:
        """How many ranks divide the vocabulary."""
        return 1 if self.group is None else self.group.size()

    @property
    def rank(self) -> int:
        """The index of this rank's slice of the vocabulary."""
        return 0 if self.group is None else self.group.rank()

    @property
    def parts(self) -> int:
        """In how many slices the ranks hold the tokens."""
        return self.size if self.sequence_parallel else 1

    @property
    def _device(self) -> torch.device:
        """Where headers travel: the same on every rank, whatever tensors (if any) it was given."""
        assert self.group is not None
        kinds = {device.type for device in self.group._device_types}  # pyright: ignore[reportAttributeAccessIssue]
        return torch.device("cpu") if "cpu" in kinds else torch.empty(0, device=min(kinds)).device

    def gather(self, rows: torch.Tensor) -> InFlight:
        """Start to bring together these rows [n, d] of every slice: [parts * n, d]."""
        if self.parts == 1:
            return InFlight(rows)
        out = rows.new_empty((self.parts * len(rows), rows.shape[1]))
        return InFlight(out, _start("all_gather", out, rows, group=self.group))

    def reduce(self, partial: torch.Tensor) -> InFlight:
        """Start to sum [parts * n, d] over the ranks; of the sum this rank gets its slice's rows.

        `partial` must stay untouched until what is returned has been waited for.
        """
        if self.size == 1:
            return InFlight(partial)
        if not self.sequence_parallel:
            return InFlight(partial, _start("all_reduce", partial, group=self.group))
        out = partial.new_empty((len(partial) // self.parts, partial.shape[1]))
        return InFlight(out, _start("reduce_scatter", out, partial, group=self.group))

    def merge(self, stats: Stats) -> Stats:
        """The statistics over the vocabulary of all ranks; one exchange of a few numbers a row."""
        if self.size == 1:
            return stats
        known = stats._replace(peak=None)._asdict().items()
        names = [name for name, value in known if value is not None]
        pieces = self.every(torch.stack([getattr(stats, name) for name in names]))
        return merge([Stats(**dict(zip(names, piece, strict=True))) for piece in pieces])

    def total(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum over the vocabulary of all ranks, in place."""
        if self.size > 1:
            InFlight(partial, _start("all_reduce", partial, group=self.group)).wait()
        return partial

    def every(self, own: torch.Tensor) -> torch.Tensor:
        """[size, ...]: what every rank has."""
        if self.size == 1:
            return own[None]
        found = own.new_empty((self.size * len(own), *own.shape[1:]))
        InFlight(found, _start("all_gather", found, own.contiguous(), group=self.group)).wait()
        return found.view(self.size, *own.shape)

    def everywhere(self, flag: torch.Tensor) -> Answer:
        """Start to ask whether this 0-d flag is true on every rank."""
        all_ranks = flag.to(torch.int32)
        if self.size > 1:
            found = _start("all_reduce", all_ranks, op=dist.ReduceOp.MIN, group=self.group)
            InFlight(all_ranks, found).wait()
        if not flag.is_cuda:
            return Answer(all_ranks)
        host = all_ranks.to("cpu", non_blocking=True)  # torch takes pinned memory for it
        ready = torch.cuda.Event()
        ready.record()
        return Answer(host, ready)

    def agree(self, facts: Facts | ValueError) -> None:
        """Raise the same ValueError on all ranks unless all state the same facts."""
        agree(facts, self._gather_headers)

    def _gather_headers(self, header: torch.Tensor) -> list[torch.Tensor]:
        if self.size == 1:
            return [header]
        return list(self.every(header.to(self._device)).cpu())


def _start(kind: str, *tensors: torch.Tensor, **options: object) -> dist.Work:
    call = next(getattr(dist, name) for name in CALLS[kind] if hasattr(dist, name))
    return _guarded(lambda: call(*tensors, **options, async_op=True))


def _guarded(call: Callable):
    try:
        return call()
    except RuntimeError as error:
        raise RuntimeError(f"{LABEL}: {error}") from error
