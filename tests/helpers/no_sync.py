"""Host synchronisation and launches, found by a dispatch mode: no GPU is needed for either.

`NoSync` raises at the first operator that makes the host wait for a device: reading a value
(`.item()`, `.tolist()`, `.cpu()`), shapes that depend on values (nonzero, a boolean index), and
copies between host and device, except asynchronous ones of pinned memory. `Launches` counts the
operators that do work on a device. Both are meant for fake tensors on "cuda" (`fake_cuda`), and
serve on real ones.
"""

import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import megatron_burst

PACKAGE = str(Path(megatron_burst.__file__).parent)
TRANSPORT = f"{PACKAGE}/plugins/testing/local.py"  # what it copies, NCCL would send
# Their results have a size, or are a number, that only the device knows.
READ = {
    "_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "unique",
    "_unique", "_unique2", "unique_consecutive", "unique_dim", "bincount", "histc",
    "allclose",
}  # fmt: skip
INDEXING = {"index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_"}
# What allocates or looks at memory, and starts nothing.
FREE = {
    "empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "_unsafe_view",
    "_reshape_alias", "detach", "lift_fresh", "is_pinned", "record_stream", "set_", "device",
}  # fmt: skip
COPIES = {"_to_copy", "copy_"}


class HostSync(AssertionError):
    """An operator for which the host waits."""


class NoSync(TorchDispatchMode):
    """Raises `HostSync` where the host waits for the device of `kind`.

    uploads: how many asynchronous copies from pinned memory were made; see `pinning`.
    downloads: how many asynchronous copies to the host were made. The caller reads them after an
    event, which this mode cannot check, so they are errors without `downloads=True`.
    """

    def __init__(self, kind="cuda", downloads=False):
        super().__init__()
        self.kind, self.uploads = kind, 0
        self.downloads = 0 if downloads else None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        complaint = None if is_free(func) else self._complaint(func, args, kwargs)
        if complaint:
            raise HostSync(f"{func}: {complaint}")
        return func(*args, **kwargs)

    def _complaint(self, func, args, kwargs):
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        there = [x for x in tensors if x.device.type == self.kind]
        name = func.overloadpacket.__name__
        if name in COPIES:
            return self._copied(name, args, kwargs)
        if not there:
            return None
        if name in READ or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            return "its result is read on the host"
        if name in INDEXING and any(x.dtype in (torch.bool, torch.uint8) for x in _indices(args)):
            return "a boolean index is counted on the host"
        # An operator takes a number of the host from a tensor of no dimensions without waiting.
        if any(x.device.type == "cpu" and x.dim() for x in tensors):
            return "copies a tensor of the host, which is not pinned"
        return None

    def _copied(self, name, args, kwargs):
        """copy_(target, source, non_blocking) or _to_copy(source, device=, non_blocking=)."""
        if name == "_to_copy":
            source, target = args[0].device.type, kwargs.get("device")
            target = source if target is None else torch.device(target).type
            what, wait = args[0], not kwargs.get("non_blocking", False)
        else:
            target, source, what = args[0].device.type, args[1].device.type, args[1]
            wait = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        if (source == self.kind) == (target == self.kind):
            return None
        if source == self.kind and name == "_to_copy" and not wait and self.downloads is not None:
            self.downloads += 1  # torch allocates pinned memory
            return None
        if source == self.kind:
            return "copies from the device to the host"
        if wait:
            return "the host waits for a copy to the device (non_blocking is False)"
        if not is_pinned(what):
            return "copies pageable memory to the device"
        self.uploads += 1
        return None


def is_free(func):
    """Does an operator start nothing, so that nobody can wait for it either?"""
    return func.is_view or func.overloadpacket.__name__ in FREE


def _caller():
    """The file of the package whose code called the operator; None if it was none of it."""
    frame = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    return None if frame is None else frame.f_code.co_filename


def _indices(args):
    return [x for x in (args[1] or ()) if isinstance(x, torch.Tensor)]


class Launches(TorchDispatchMode):
    """Counts operators that do work on `kind`, by name; what one operator launches inside counts
    once, and what ranks of one process send each other does not count. `of` also takes what
    dispatch does not see, as the launches of Triton."""

    def __init__(self, kind="cuda"):
        super().__init__()
        self.kind, self.of = kind, Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not is_free(func):
            leaves = tree_leaves((args, kwargs, result))
            tensors = [x for x in leaves if isinstance(x, torch.Tensor) and x.numel()]
            there = any(x.device.type == self.kind for x in tensors)
            if there and _caller() != TRANSPORT:
                self.of[func.overloadpacket.__name__] += 1
        return result

    @property
    def total(self):
        return sum(self.of.values())


def is_pinned(x):
    """Real tensors know it; of the others, `pinning` does."""
    return getattr(x, "_pinned_here", False) or (torch.cuda.is_available() and x.is_pinned())


@contextmanager
def pinning():
    """`Tensor.pin_memory` where no driver could pin anything: it returns a marked copy."""

    def pin_memory(self, device=None):
        assert self.device.type == "cpu"
        pinned = self.clone()
        pinned._pinned_here = True
        return pinned

    with mock.patch.object(torch.Tensor, "pin_memory", pin_memory):
        yield
