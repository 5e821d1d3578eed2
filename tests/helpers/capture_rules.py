"""CUDA graphs without a GPU: what a capture forbids is refused, and what a graph does is replayed.

`capturing` is for fake CUDA tensors (`fake_cuda`). In it every operator is refused that waits for
the device, reads the host's memory or draws random numbers, and so are streams, events, pinned
memory and exchanges between hosts; every transfer that was started has to be waited for inside, as
a side stream of a capture has to be joined. It notes what runs, so that two calls can be compared,
and what it allocates, which belongs to the graph's pool and nothing may keep.

`Graph` is for tensors of the CPU. It notes the operators of a call and runs the same ones on the
same memory again, without any of the Python around them: what Python decided is what it was.
"""

import gc
import weakref
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from no_sync import FREE, READ, HostSync, NoSync, is_free
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from megatron_burst.plugins.testing.local import LocalEndpoint, RankSwitch

# Of the host, or on streams that no capture knows.
FORBIDDEN = {
    torch.cuda: (
        "synchronize", "Stream", "ExternalStream", "Event", "default_stream", "set_stream",
        "mem_get_info", "empty_cache", "get_rng_state", "set_rng_state", "manual_seed",
    ),
    torch.Tensor: ("pin_memory", "record_stream", "share_memory_"),
    dist: ("all_gather", "all_gather_object", "broadcast", "broadcast_object_list", "all_reduce",
           "barrier", "new_group", "monitored_barrier"),
    RankSwitch: ("all_gather",),
}  # fmt: skip


class NotCapturable(HostSync):
    """What a capture forbids."""


class Rules(NoSync):
    """ran: every operator that does something on the device, with shapes, strides, dtypes and
    numbers of its arguments; made: the tensors that came into being."""

    def __init__(self):
        super().__init__()
        self.ran, self._made = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        result = super().__torch_dispatch__(func, types, args, kwargs)
        results = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        if any(x.device.type == self.kind for x in (*given, *results)):
            if torch.Tag.nondeterministic_seeded in func.tags and _dropout(func, args, kwargs) != 0:
                raise NotCapturable(f"{func}: draws random numbers")
            if self.uploads:
                raise NotCapturable(f"{func}: copies the host's memory, whatever is in it by then")
            if not is_free(func):
                self.ran.append((str(func), *map(_shown, tree_leaves((args, kwargs)))))
            owned = {id(x) for x in given}
            self._made += [weakref.ref(x) for x in results if id(x) not in owned]
        return result

    def kept(self):
        """Tensors made inside that something still holds."""
        gc.collect()
        return [tuple(x.shape) for x in (ref() for ref in self._made) if x is not None]


@contextmanager
def capturing():
    """As the captured part of a graph; yields the `Rules`, and checks at the end that everything
    that was started was waited for."""
    waiting = []
    with ExitStack() as stack:
        for home, names in FORBIDDEN.items():
            for name in names:
                stack.enter_context(mock.patch.object(home, name, _refused(home, name)))
        exchange = LocalEndpoint.exchange

        def started(self, *given):
            waiting.append(flight := _Flight(exchange(self, *given), given[-1]))
            return flight

        stack.enter_context(mock.patch.object(LocalEndpoint, "exchange", started))
        stack.enter_context(
            mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True)
        )
        yield stack.enter_context(Rules())
        for flight in waiting:
            if not flight.joined:
                raise NotCapturable(f"nobody waited for {flight.label}")


class _Flight:
    def __init__(self, pending, label):
        self.pending, self.label, self.joined = pending, str(label), False

    def wait(self):
        self.pending.wait()
        self.joined = True


def _dropout(func, args, kwargs):
    """The probability that an operator is given, in which case 0 draws nothing; None without."""
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | (kwargs or {})
    return given.get("dropout_p", 0.0 if "dropout_p" in names else None)


def _refused(home, name):
    def refuse(*given, **named):
        raise NotCapturable(f"{getattr(home, '__name__', home)}.{name} inside of a capture")

    return refuse


def _shown(x):
    if isinstance(x, torch.Tensor):
        return tuple(x.shape), x.stride(), x.storage_offset(), x.dtype, x.device.type
    return x if isinstance(x, (int, float, bool, str, type(None))) else str(x)


class Graph(TorchDispatchMode):
    """The operators of what runs inside, to be run again by `replay`."""

    def __init__(self):
        super().__init__()
        self._ran = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not (func.is_view or name in FREE or name in READ):
            # Arguments may be changed as objects (resized, detached), their memory may not.
            self._ran.append((func, tree_map(_alias, (args, kwargs or {})), _tensors(result)))
        return result

    @torch.no_grad()
    def replay(self):
        for func, (args, kwargs), old in self._ran:
            inside = {x.untyped_storage().data_ptr() for x in _tensors((args, kwargs))}
            for was, now in zip(old, _tensors(func(*args, **kwargs)), strict=True):
                if was.untyped_storage().data_ptr() not in inside:
                    was.detach().copy_(now)


def _alias(x):
    return x.detach() if isinstance(x, torch.Tensor) else x


def _tensors(tree):
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]
