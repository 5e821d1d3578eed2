# SPDX-License-Identifier: Apache-2.0
"""Lengths of documents, read where a data loader made them: on the host.

A script sends a batch to the GPU, and from there on only the GPU knows its cumulative lengths: to
read them back, the host would wait for all that it has queued, and plan beside an idle GPU. So the
batches that Megatron's schedules hand to a script have `cu_seqlens` which note what they said when
they are sent to a device. The script's own tensors, and views of them, are then known
(`Packs.values`); others are read from the device as before: those a script computes anew, and what
tensor-parallel ranks but the first get by broadcast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from .. import patching
from .packed import packs

_LENGTHS = ("cu_seqlens", "cu_seqlens_padded")


class HostLengths(torch.Tensor):
    """A tensor on the CPU whose copy on a device is known to have its values; what other operators
    make of it is a plain tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    def cuda(self, *args: Any, **named: Any) -> torch.Tensor:
        """As `torch.Tensor.cuda`."""
        return self._noted(self.as_subclass(torch.Tensor).cuda(*args, **named))

    def to(self, *args: Any, **named: Any) -> torch.Tensor:
        """As `torch.Tensor.to`."""
        return self._noted(self.as_subclass(torch.Tensor).to(*args, **named))

    def _noted(self, copy: torch.Tensor) -> torch.Tensor:
        if copy.device.type != "cpu" and copy.dtype == self.dtype and copy.is_contiguous():
            packs().note_values(copy, self)
        return copy


class Batches:
    """An iterator over the batches of a data loader, whose lengths are `HostLengths`."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        if not isinstance(batch, dict):
            return batch
        known = {name: batch.get(name) for name in _LENGTHS}
        return batch | {
            name: lengths.as_subclass(HostLengths)
            for name, lengths in known.items()
            if type(lengths) is torch.Tensor and lengths.device.type == "cpu"
        }

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


def patch(patches: patching.PatchSet) -> None:
    """Add to a set of patches what gives scripts such batches.

    Before that of packed batches, which are made of a data loader's.
    """
    patching.wrap_steps(patches, _noting)


def _noting(run: Callable, named: dict[str, Any]) -> Any:
    given = named["data_iterator"]
    several = isinstance(given, list)
    found = [one if one is None else Batches(one) for one in (given if several else [given])]
    return run(**named | {"data_iterator": found if several else found[0]})
