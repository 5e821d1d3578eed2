"""Recompute everything but attention: frames, in which attention finds what it kept.

A frame belongs to one checkpointed call. The first time its function runs, every attention call
leaves the results of some rows there (`store` says which); when it runs again, in backward, they
are taken from there and only the others are recomputed. Frames are found through the one
ContextVar of this package, entries by their order within the call, so that several calls may be
in flight, be run again in any order, more than once, or never; a frame goes when its call's graph
does. Source: LoongTrain (selective checkpoint++), BurstEngine
section 3.2 (its sequence-level half).
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ..layout import check_fraction

T = TypeVar("T")
Entry = tuple[torch.Tensor, ...]
Kept = tuple[object, Entry, tuple[int, ...]]  # what for, and the tensors with their versions

_current: ContextVar[Frame | None] = ContextVar("megatron_burst_frame", default=None)


@dataclass
class Frame:
    """What the attention calls of one checkpointed call keep: for each, tensors of some rows."""

    keep: float | None  # None: as the plan of each call says
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
        self.entries.append((what, entry, _versions(entry)))

    def get(self, what: object) -> Entry:
        """What the next attention call kept. ValueError if it was another call, RuntimeError if
        its result was changed in place since: where all rows are kept it is what is kept."""
        index, self.position = self.position, self.position + 1
        if index >= len(self.entries) or self.entries[index][0] != what:
            raise ValueError(
                f"checkpoint: attention call {index} of the recompute is not the one of the first "
                "run; the checkpointed function must do the same each time"
            )
        _, entry, versions = self.entries[index]
        if _versions(entry) != versions:
            raise RuntimeError(
                "checkpoint: the result of attention was changed in place between forward and "
                "recompute, and with it what was kept; make a new tensor (out * 2, not out.mul_(2))"
            )
        return entry

    @property
    def bytes(self) -> int:
        """Memory of what is kept."""
        return sum(t.numel() * t.element_size() for _, entry, _ in self.entries for t in entry)


class Framed:
    """A function that runs in a frame of its own, each time it is called in the same one."""

    def __init__(self, function: Callable[..., Any], keep: float | None):
        self.function = function
        self.frame = Frame(keep)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        token = _current.set(self.frame)
        self.frame.begin()
        try:
            result = self.function(*args, **kwargs)
            self.frame.filled = True
        finally:
            _current.reset(token)
        return result


def _versions(entry: Entry) -> tuple[int, ...]:
    return tuple(t._version for t in entry)


def current() -> Frame | None:
    """The frame of the checkpointed call that is running, if one is."""
    return _current.get()


def framed(function: Callable[..., T], keep: float | None = None) -> Callable[..., T]:
    """`function`, to be handed to a checkpoint, so that its attention keeps `keep` of its rows;
    None: as many as the plan of each call says (`mb.prepare(..., store=)`).

    The function itself where there is nothing to keep: no backward will come, or keep is 0.
    """
    if keep is not None:
        check_fraction("keep", keep)
    if keep == 0 or not torch.is_grad_enabled():
        return function
    return Framed(function, keep)


def checkpoint(fn: Callable[..., T], *args: Any, keep: float = 0.5) -> T:
    """Run `fn(*args)`, saving only its arguments, and run it again in backward.

    keep: the fraction of positions whose attention results are kept between the two (out and the
    log-sum-exp: 2 w + 4 bytes per row and head in bf16), the most expensive rows first; 1.0
    recomputes no attention, 0.5 a quarter of it for a causal mask, 0.0 all. `fn` must do the same
    each time; plans used in it are made by `mb.prepare(..., store=keep)`. Gradients are those of
    `fn`.
    """
    return torch_checkpoint(framed(fn, keep), *args, use_reentrant=False)  # pyright: ignore[reportReturnType]
