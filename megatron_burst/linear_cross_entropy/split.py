# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel group of the LM head: distribution of vocabulary and tokens, and collectives.

With a group, every rank holds an equal slice of the vocabulary, in rank order, and all labels. With
sequence parallelism, a rank also holds only its slice of the tokens. A tile then contains equal
ranges of rows from every slice. Therefore one all-gather collects a tile, and one reduce-scatter
returns the gradient of the tile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..comm.consensus import Facts, agree
from .formula import Stats, merge

LABEL = "exchange failed: LM head"
# Collective -> names of the function in torch.distributed, newest first.
CALLS = {
    "all_gather": ("all_gather_single", "all_gather_into_tensor"),
    "reduce_scatter": ("reduce_scatter_single", "reduce_scatter_tensor"),
    "all_reduce": ("all_reduce",),
}


@dataclass(frozen=True)
class InFlight:
    """Result of a collective that may still be running."""

    tensor: torch.Tensor
    work: dist.Work | None = None

    def wait(self) -> torch.Tensor:
        """Wait for the collective and return the tensor.

        Raises:
            RuntimeError: The collective failed.
        """
        if self.work is not None:
            _guarded(self.work.wait)
        return self.tensor


@dataclass(frozen=True)
class PendingFlag:
    """Flag on the device whose copy to the host may still be running."""

    flag: torch.Tensor
    ready: torch.cuda.Event | None = None

    def read(self) -> bool:
        """Wait for the copy to the host, and return the flag.

        The host waits only for work that was launched before the copy.
        """
        if self.ready is not None:
            self.ready.synchronize()
        return bool(self.flag)


@dataclass(frozen=True)
class Split:
    """Distribution of vocabulary and tokens over a tensor-parallel group.

    Attributes:
        group: Process group. If None, one rank holds everything and nothing is exchanged.
        sequence_parallel: True if each rank holds a slice of the tokens.
    """

    group: dist.ProcessGroup | None = None
    sequence_parallel: bool = False

    @property
    def size(self) -> int:
        """Number of ranks that share the vocabulary."""
        return 1 if self.group is None else self.group.size()

    @property
    def rank(self) -> int:
        """Index of this rank's slice of the vocabulary."""
        return 0 if self.group is None else self.group.rank()

    @property
    def parts(self) -> int:
        """Number of slices into which the tokens are split."""
        return self.size if self.sequence_parallel else 1

    @property
    def _device(self) -> torch.device:
        """Device of the tensors that ranks exchange to compare their arguments.

        The device is the same on every rank, even if ranks have tensors on different devices.
        """
        assert self.group is not None
        kinds = {device.type for device in self.group._device_types}  # pyright: ignore[reportAttributeAccessIssue]
        return torch.device("cpu") if "cpu" in kinds else torch.empty(0, device=min(kinds)).device

    def gather(self, rows: torch.Tensor) -> InFlight:
        """Start an all-gather of the rows of a tile from every slice.

        Args:
            rows: Rows [n, d] of this rank's slice.

        Returns:
            `InFlight` with the rows of all slices [parts * n, d].
        """
        if self.parts == 1:
            return InFlight(rows)
        out = rows.new_empty((self.parts * len(rows), rows.shape[1]))
        return InFlight(out, _start("all_gather", out, rows, group=self.group))

    def reduce(self, partial: torch.Tensor) -> InFlight:
        """Start a reduction that sums rows over the ranks.

        Args:
            partial: Summands [parts * n, d], which must not be changed before `InFlight.wait`.

        Returns:
            `InFlight` with the sums of the rows of this rank's slice [n, d].
        """
        if self.size == 1:
            return InFlight(partial)
        if not self.sequence_parallel:
            return InFlight(partial, _start("all_reduce", partial, group=self.group))
        out = partial.new_empty((len(partial) // self.parts, partial.shape[1]))
        return InFlight(out, _start("reduce_scatter", out, partial, group=self.group))

    def merge(self, stats: Stats) -> Stats:
        """Merge the statistics of all ranks into statistics over the whole vocabulary.

        This is a collective call: one small all-gather.
        """
        if self.size == 1:
            return stats
        present = stats._replace(peak=None)._asdict().items()
        names = [name for name, value in present if value is not None]
        pieces = self.all_gather(torch.stack([getattr(stats, name) for name in names]))
        return merge([Stats(**dict(zip(names, piece, strict=True))) for piece in pieces])

    def total(self, partial: torch.Tensor) -> torch.Tensor:
        """Sum `partial` over the ranks in place, and return it."""
        if self.size > 1:
            InFlight(partial, _start("all_reduce", partial, group=self.group)).wait()
        return partial

    def all_gather(self, own: torch.Tensor) -> torch.Tensor:
        """Return the tensors `own` of all ranks as one tensor [size, ...]."""
        if self.size == 1:
            return own[None]
        gathered = own.new_empty((self.size * len(own), *own.shape[1:]))
        InFlight(
            gathered, _start("all_gather", gathered, own.contiguous(), group=self.group)
        ).wait()
        return gathered.view(self.size, *own.shape)

    def all_true(self, flag: torch.Tensor) -> PendingFlag:
        """Compute the logical AND of a 0-d flag over all ranks, and start its copy to the host."""
        all_ranks = flag.to(torch.int32)
        if self.size > 1:
            work = _start("all_reduce", all_ranks, op=dist.ReduceOp.MIN, group=self.group)
            InFlight(all_ranks, work).wait()
        if not flag.is_cuda:
            return PendingFlag(all_ranks)
        host = all_ranks.to("cpu", non_blocking=True)  # torch allocates pinned memory
        ready = torch.cuda.Event()
        ready.record()
        return PendingFlag(host, ready)

    def agree(self, facts: Facts | ValueError) -> None:
        """Compare facts, the values that must be the same on all ranks.

        Raises:
            ValueError: The facts differ, or a rank passed an error. The message is the same on all
                ranks.
        """
        agree(facts, self._gather_headers)

    def _gather_headers(self, header: torch.Tensor) -> list[torch.Tensor]:
        if self.size == 1:
            return [header]
        return list(self.all_gather(header.to(self._device)).cpu())


def _start(kind: str, *tensors: torch.Tensor, **options: object) -> dist.Work:
    call = next(getattr(dist, name) for name in CALLS[kind] if hasattr(dist, name))
    return _guarded(lambda: call(*tensors, **options, async_op=True))


def _guarded(call: Callable):
    try:
        return call()
    except RuntimeError as error:
        raise RuntimeError(f"{LABEL}: {error}") from error
