# SPDX-License-Identifier: Apache-2.0
"""Recompute everything but attention: frames, in which attention finds what it kept.

A frame belongs to one checkpointed call. The first time its function runs, every attention call
leaves the results of some rows there (`store` says which); when it runs again, in backward, they
are taken from there and only the others are recomputed. Frames are found through the one
ContextVar of this package, entries by their order within the call, so that several calls may be
in flight, be run again in any order, more than once, or never; a frame goes when its call's graph
does. What a frame holds, and the arguments of its call, may be in a `HostMemory`. Source:
LoongTrain (selective checkpoint++), BurstEngine section 3.2 (its sequence-level half).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ..layout import check_fraction

T = TypeVar("T")


class Moved(Protocol):
    """A tensor that a `HostMemory` took."""

    @property
    def moved(self) -> bool: ...

    def get(self) -> torch.Tensor: ...

    @property
    def nbytes(self) -> int: ...


class MovedCall(Protocol):
    """A function with its arguments, which a `HostMemory` holds until backward."""

    def places(self) -> list[torch.Tensor]:
        """An empty tensor on each device of the arguments."""
        ...

    def __call__(self, *places: torch.Tensor) -> Any: ...


@runtime_checkable
class HostMemory(Protocol):
    """Host memory as checkpoints use it; `mb.HostMemory`, of the plugin `longseq`, is one."""

    def move(
        self, tensor: torch.Tensor, fraction: float, *, shared: bool, framed: bool = True
    ) -> Moved:
        """Copy a fraction of the rows of a tensor to the host."""
        ...

    def frame(self) -> AbstractContextManager[Any]:
        """What is moved inside belongs together in backward."""
        ...

    def saved(
        self,
        fraction: float,
        *,
        min_bytes: int,
        keep: Callable[[torch.Tensor], bool] | None = None,
    ) -> AbstractContextManager[None]:
        """Inside, what autograd saves is moved."""
        ...

    def call(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        move: Callable[[torch.Tensor], Any],
    ) -> MovedCall:
        """`function(*args)`, whose arguments go through `move` when it is called first."""
        ...


Entry = tuple[torch.Tensor, ...]
# What for, and the tensors with their versions, or what moved them.
Kept = tuple[object, "Entry | tuple[Moved, ...]", tuple[int, ...]]

_current: ContextVar[Frame | None] = ContextVar("megatron_burst_frame", default=None)
current = _current.get  # the frame of the checkpointed call that is running, or None


@dataclass(frozen=True)
class Offload:
    """Where what a checkpointed call leaves goes: this fraction of its rows, as one frame."""

    host: HostMemory
    fraction: float
    frame: AbstractContextManager[Any]

    def move(self, tensor: torch.Tensor) -> Moved:
        with self.frame:
            return self.host.move(tensor, self.fraction, shared=True)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """The arguments that a checkpoint saves through autograd go there too: those that require
        a gradient, the others are masks and tables of all layers.
        """
        keep = _needs_no_gradient
        with self.frame, self.host.saved(self.fraction, min_bytes=0, keep=keep):
            yield


@dataclass
class Frame:
    """What the attention calls of one checkpointed call keep: for each, tensors of some rows."""

    keep: float | None  # None: as the plan of each call says
    offload: Offload | None = None
    entries: list[Kept] = field(default_factory=list)
    filled: bool = False  # the function has run once to its end
    position: int = 0

    def begin(self) -> None:
        """The function starts, for the first time or again."""
        self.position = 0
        if not self.filled:
            self.entries.clear()

    def put(self, what: object, entry: Entry) -> None:
        """Keep the tensors of the next attention call; `what` identifies it."""
        if self.offload is None:
            self.entries.append((what, entry, _versions(entry)))
        else:
            self.entries.append((what, tuple(map(self.offload.move, entry)), ()))

    def get(self, what: object) -> Entry:
        """What the next attention call kept. ValueError if it was another call, RuntimeError if
        its result was changed in place since: where all rows are kept it is what is kept.
        """
        index, self.position = self.position, self.position + 1
        if index >= len(self.entries) or self.entries[index][0] != what:
            raise ValueError(
                f"checkpoint: attention call {index} of the recompute is not the one of the first "
                "run; the checkpointed function must do the same each time"
            )
        _, kept, versions = self.entries[index]
        entry = tuple(t if isinstance(t, torch.Tensor) else t.get() for t in kept)
        if self.offload is None and _versions(entry) != versions:
            raise RuntimeError(
                "checkpoint: the result of attention was changed in place between forward and "
                "recompute, and with it what was kept; make a new tensor (out * 2, not out.mul_(2))"
            )
        return entry

    @property
    def bytes(self) -> int:
        """Memory of what is kept."""
        return sum(t.nbytes for _, entry, _ in self.entries for t in entry)


class Framed:
    """A function that runs in a frame of its own, each time it is called in the same one."""

    def __init__(
        self, function: Callable[..., Any], keep: float | None, offload: Offload | None = None
    ):
        self.function = function
        self.frame = Frame(keep, offload)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.frame.keep == 0:  # attention keeps nothing
            return self.function(*args, **kwargs)
        token = _current.set(self.frame)
        self.frame.begin()
        try:
            result = self.function(*args, **kwargs)
            self.frame.filled = True
        finally:
            _current.reset(token)
        return result


def in_backward() -> bool:
    """Whether this thread is inside a backward, so that a forward runs again."""
    return torch._C._current_graph_task_id() != -1  # private, and what torch's own checkpoint asks


def _needs_no_gradient(tensor: torch.Tensor) -> bool:
    return not tensor.requires_grad


def _versions(entry: Entry) -> tuple[int, ...]:
    return tuple(t._version for t in entry)


def framed(
    function: Callable[..., T],
    keep: float | None = None,
    *,
    offload: float = 0.0,
    host: HostMemory | None = None,
) -> Callable[..., T]:
    """`function`, to be handed to a checkpoint, so that its attention keeps `keep` of its rows;
    None: as many as the plan of each call says (`mb.prepare(..., store=)`). Of what is kept,
    `offload` of the rows are moved to `host`; run the checkpoint inside `saving(result)`, and its
    arguments are too.

    The function itself where there is nothing to keep: no backward will come, or both are 0.
    Raises ValueError for fractions outside 0 to 1, or offload without a host.
    """
    if keep is not None:
        check_fraction("keep", keep)
    check_fraction("offload", offload)
    if offload and not isinstance(host, HostMemory):
        raise ValueError(
            f"offload={offload} needs host, an mb.HostMemory that all layers of a process "
            f"share, got {host!r:.100}"
        )
    if (keep == 0 and not offload) or not torch.is_grad_enabled():
        return function
    if not offload:
        return Framed(function, keep)
    assert host is not None
    return Framed(function, keep, Offload(host, offload, host.frame()))


@contextmanager
def saving(function: Callable[..., Any]) -> Iterator[None]:
    """Around a checkpoint of what `framed` returned: the arguments that the checkpoint saves
    through autograd belong to its frame, and are moved with it.
    """
    offload = function.frame.offload if isinstance(function, Framed) else None
    if offload is None:
        yield
    else:
        with offload.saving():
            yield


def checkpoint(
    fn: Callable[..., T],
    *args: Any,
    keep: float = 0.5,
    offload: float = 0.0,
    host: HostMemory | None = None,
) -> T:
    """Run `fn(*args)`, saving only its arguments, and run it again in backward.

    keep: the fraction of positions whose attention results are kept between the two (out and the
    log-sum-exp: 2 w + 4 bytes per row and head in bf16), the most expensive rows first; 1.0
    recomputes no attention, 0.5 a quarter of it for a causal mask, 0.0 all. `fn` must do the same
    each time; plans used in it are made by `mb.prepare(..., store=keep)`. Gradients are those of
    `fn`.

    offload: the fraction of the rows (dim 0) of what is saved that is moved to `host` until then:
    arguments that require a gradient, but for parameters and what `HostMemory.move` leaves, and the
    attention results. The bits are the same. Arguments that several calls share travel once, so
    writes that autograd does not see (`x.data.mul_(2)`) are not seen here. Raises OutOfHostMemory.
    """
    run = framed(fn, keep, offload=offload, host=host)
    away = run.frame.offload if isinstance(run, Framed) else None
    if away is None:
        return torch_checkpoint(run, *args, use_reentrant=False)  # pyright: ignore[reportReturnType]
    call = away.host.call(run, args, away.move)
    del args  # or they would be held until fn returns
    return torch_checkpoint(call, *call.places(), use_reentrant=False)  # pyright: ignore[reportReturnType]
