"""Which memory there are copies of, so that tensors that share it travel once."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .copies import HostCopy

Span = tuple[int, int]  # elements of a storage, from and to


class _Known(NamedTuple):
    """A copy, and the memory it is of, as long as that is not changed."""

    storage: StorageWeakRef  # while it is held, no other storage has this address
    version: int
    dtype: torch.dtype
    span: Span
    copy: weakref.ref[HostCopy]


class Known:
    """Copies by storage; those that are gone are forgotten."""

    def __init__(self) -> None:
        self._of: dict[int, list[_Known]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def find(self, tensor: torch.Tensor, span: Span) -> tuple[HostCopy, int] | None:
        """A copy with these elements of the tensor's storage, and at which one it begins."""
        for known in self._of.get(tensor.untyped_storage()._cdata, ()):
            same = (known.version, known.dtype) == (tensor._version, tensor.dtype)
            if same and known.span[0] <= span[0] and span[1] <= known.span[1]:
                copy = known.copy()
                if copy is not None:
                    return copy, known.span[0]
        return None

    def add(self, tensor: torch.Tensor, span: Span, copy: HostCopy) -> None:
        """A copy of these elements of the tensor's storage."""
        storage = StorageWeakRef(tensor.untyped_storage())

        def forget(ref: object, table: dict[int, list[_Known]] = self._of) -> None:
            left = [known for known in table.pop(storage.cdata, []) if known.copy is not ref]
            if left:
                table[storage.cdata] = left

        known = _Known(storage, tensor._version, tensor.dtype, span, weakref.ref(copy, forget))
        self._of.setdefault(storage.cdata, []).append(known)
