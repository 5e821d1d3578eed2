# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing that keeps some attention outputs, in one attention store per call.

An `AttentionStore` belongs to one checkpointed call. In the first run of the function, each
attention call puts the outputs of some rows into the store. In the recomputation in backward, each
attention call reads these rows from the store and recomputes only the other rows.

A ContextVar holds the store of the running call. Entries of a store are in the order of attention
calls. So several checkpointed calls may be in flight, and each may be recomputed in any order, more
than once or never. A store is freed with the autograd graph of the checkpointed call. The entries
of a store and the arguments of the call may be offloaded to host memory.

Source: LoongTrain (selective checkpoint++), BurstEngine section 3.2 (sequence-level selection).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ..layout import check_fraction

T = TypeVar("T")


class OffloadedTensor(Protocol):
    """Handle of a tensor that an `OffloadTarget` may have moved."""

    @property
    def moved(self) -> bool:
        """True if part of the tensor is on the host."""
        ...

    def get(self) -> torch.Tensor:
        """Return the tensor on its device."""
        ...

    @property
    def nbytes(self) -> int: ...


class OffloadedCall(Protocol):
    """Function bound to arguments that an `OffloadTarget` holds until backward."""

    def places(self) -> list[torch.Tensor]:
        """Return one empty tensor per accelerator of the arguments, to pass to a checkpoint.

        The checkpoint then saves the random states of these devices, but not the arguments.
        """
        ...

    def __call__(self, *places: torch.Tensor) -> Any: ...


@runtime_checkable
class OffloadTarget(Protocol):
    """Host memory that receives offloaded tensors; `mb.HostMemory` of `longseq` implements it."""

    def move(
        self, tensor: torch.Tensor, fraction: float, *, shared: bool, framed: bool = True
    ) -> OffloadedTensor:
        """Start to copy a fraction of the rows of a tensor to the host."""
        ...

    def frame(self) -> AbstractContextManager[Any]:
        """Return a context that groups tensors.

        Backward fetches together all tensors that are moved within the context.
        """
        ...

    def saved(
        self,
        fraction: float,
        *,
        min_bytes: int,
        keep: Callable[[torch.Tensor], bool] | None = None,
    ) -> AbstractContextManager[None]:
        """Return a context that moves the tensors that autograd saves for backward.

        Args:
            fraction: Fraction of the rows (dim 0) of each tensor that is moved to the host.
            min_bytes: Smaller tensors stay on the device.
            keep: Returns True for a tensor that stays on the device.
        """
        ...

    def call(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        move: Callable[[torch.Tensor], Any],
    ) -> OffloadedCall:
        """Return `function` bound to `args`, for a checkpoint that calls it again in backward.

        The first call passes each tensor of `args` that requires a gradient to `move`. Later calls
        fetch these tensors from the host.
        """
        ...


Tensors = tuple[torch.Tensor, ...]

_current: ContextVar[AttentionStore | None] = ContextVar(
    "megatron_burst_attention_store", default=None
)
current_store = _current.get  # returns the store of the running checkpointed call, or None


@dataclass(frozen=True)
class StoreOffload:
    """Destination of the tensors that a checkpointed call saves for backward.

    Attributes:
        host: Host memory.
        fraction: Fraction of the rows (dim 0) that is moved to host memory.
        frame: Context of `host`. Backward fetches together all tensors that were moved within this
            context.
    """

    host: OffloadTarget
    fraction: float
    frame: AbstractContextManager[Any]

    def move(self, tensor: torch.Tensor) -> OffloadedTensor:
        """Start to copy `fraction` of the rows of a tensor to the host."""
        with self.frame:
            return self.host.move(tensor, self.fraction, shared=True)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Return a context in which the arguments that a checkpoint saves are moved to host memory.

        Only arguments that require a gradient are moved. Other arguments are masks and tables,
        which all layers share.
        """
        keep = _needs_no_gradient
        with self.frame, self.host.saved(self.fraction, min_bytes=0, keep=keep):
            yield


class StoreEntry(NamedTuple):
    """Outputs of one attention call in a store.

    Attributes:
        key: Identifier of the attention call.
        tensors: Stored tensors, or handles if the tensors are offloaded.
        versions: Autograd version of each stored tensor; empty if the tensors are offloaded.
    """

    key: object
    tensors: Tensors | tuple[OffloadedTensor, ...]
    versions: tuple[int, ...]


@dataclass
class AttentionStore:
    """Outputs of the attention calls of one checkpointed call, kept for the recomputation.

    Attributes:
        fraction: Fraction of the rows that is stored. None means the fraction of each call's plan.
        offload: How the stored tensors are moved to host memory; None if they stay on the device.
        entries: One entry per attention call, in the order of the calls.
        filled: True if the first run of the function has completed.
        position: Index of the entry of the next attention call.
    """

    fraction: float | None
    offload: StoreOffload | None = None
    entries: list[StoreEntry] = field(default_factory=list)
    filled: bool = False
    position: int = 0

    def begin(self) -> None:
        """Prepare for a run of the function, whose first attention call uses the first entry."""
        self.position = 0
        if not self.filled:
            self.entries.clear()

    def put(self, key: object, tensors: Tensors) -> None:
        """Store the tensors of the next attention call; `key` identifies the call."""
        if self.offload is None:
            self.entries.append(StoreEntry(key, tensors, _versions(tensors)))
        else:
            self.entries.append(StoreEntry(key, tuple(map(self.offload.move, tensors)), ()))

    def get(self, key: object) -> Tensors:
        """Return the stored tensors of the next attention call.

        Raises:
            ValueError: The next entry has another key, or there are no more entries.
            RuntimeError: The tensors were changed in place. If all rows are stored, the output of
                attention is the stored tensor.
        """
        index, self.position = self.position, self.position + 1
        if index >= len(self.entries) or self.entries[index].key != key:
            raise ValueError(
                f"checkpoint: attention call {index} of the recomputation differs from the first "
                "run; the checkpointed function must make the same attention calls in every run"
            )
        entry = self.entries[index]
        tensors = tuple(t if isinstance(t, torch.Tensor) else t.get() for t in entry.tensors)
        if self.offload is None and _versions(tensors) != entry.versions:
            raise RuntimeError(
                "checkpoint: the result of attention was changed in place between forward and "
                "recomputation, and the attention store holds the same tensor; make a new tensor "
                "(out * 2, not out.mul_(2))"
            )
        return tensors

    @property
    def nbytes(self) -> int:
        """Size of the stored tensors in bytes."""
        return sum(t.nbytes for entry in self.entries for t in entry.tensors)


class StoringCall:
    """Function with an attention store. The first run fills the store, and later runs read it."""

    def __init__(
        self,
        function: Callable[..., Any],
        fraction: float | None,
        offload: StoreOffload | None = None,
    ):
        self.function = function
        self.store = AttentionStore(fraction, offload)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.store.fraction == 0:  # attention stores nothing
            return self.function(*args, **kwargs)
        token = _current.set(self.store)
        self.store.begin()
        try:
            result = self.function(*args, **kwargs)
            self.store.filled = True
        finally:
            _current.reset(token)
        return result


def in_backward() -> bool:
    """Return whether this thread runs a backward pass; a forward in it is a recomputation."""
    return torch._C._current_graph_task_id() != -1  # private; torch's own checkpoint uses it too


def _needs_no_gradient(tensor: torch.Tensor) -> bool:
    return not tensor.requires_grad


def _versions(tensors: Tensors) -> tuple[int, ...]:
    return tuple(t._version for t in tensors)


def storing(
    function: Callable[..., T],
    keep: float | None = None,
    *,
    offload: float = 0.0,
    host: OffloadTarget | None = None,
) -> Callable[..., T]:
    """Return `function` with an attention store, to be passed to a checkpoint.

    To offload the arguments too, call the checkpoint inside the context `offloaded_arguments(run)`,
    with `run` returned by this function.

    Args:
        function: Function that the checkpoint runs and recomputes.
        keep: Fraction of the rows whose attention outputs are stored. None uses the fraction of
            each call's plan (`mb.prepare(..., store=)`).
        offload: Fraction of the stored rows that is moved to `host`.
        host: Host memory for `offload`.

    Returns:
        A `StoringCall`. `function` itself is returned if nothing can be stored, because gradients
        are disabled or `keep` and `offload` are both 0.

    Raises:
        ValueError: A fraction is outside 0 to 1, or `offload` has no host.
    """
    if keep is not None:
        check_fraction("keep", keep)
    check_fraction("offload", offload)
    if offload and not isinstance(host, OffloadTarget):
        raise ValueError(
            f"offload={offload} needs host, an mb.HostMemory that all layers of a process "
            f"share, got {host!r:.100}"
        )
    if (keep == 0 and not offload) or not torch.is_grad_enabled():
        return function
    if not offload:
        return StoringCall(function, keep)
    assert host is not None
    return StoringCall(function, keep, StoreOffload(host, offload, host.frame()))


@contextmanager
def offloaded_arguments(function: Callable[..., Any]) -> Iterator[None]:
    """Return a context in which a checkpoint of `function` offloads the arguments that it saves.

    The arguments are fetched in backward together with the tensors of the store. The context does
    nothing unless `function` is a `StoringCall` with an offload.
    """
    offload = function.store.offload if isinstance(function, StoringCall) else None
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
    host: OffloadTarget | None = None,
) -> T:
    """Run `fn(*args)` with activation checkpointing that keeps some attention outputs.

    Only the arguments and the kept outputs are saved; backward runs `fn` again. Gradients equal the
    gradients of `fn`. Plans that `fn` uses must be made by `mb.prepare(..., store=keep)`.

    Args:
        fn: Function to checkpoint. It must compute the same in every run.
        *args: Arguments of `fn`.
        keep: Fraction of the positions whose attention outputs (out and log-sum-exp) are kept from
            forward to backward, the most expensive rows first. A kept row needs 2 w + 4 bytes per
            head in bf16, for values of width w. With a causal mask, backward recomputes no
            attention for 1.0, a quarter of it for 0.5 and all of it for 0.0.
        offload: Fraction of the rows (dim 0) of the saved tensors that is moved to `host` until
            backward. Saved tensors are the attention outputs and the arguments that require a
            gradient, except parameters and tensors that `HostMemory.move` leaves on the device.
            Results do not change. An argument that several calls share is copied once. A later
            write that autograd does not track (`x.data.mul_(2)`) does not change the copy.
        host: Host memory for `offload`.

    Returns:
        The result of `fn(*args)`.

    Raises:
        OutOfHostMemory: The tensors do not fit into `host`.
        ValueError: A fraction is outside 0 to 1, or `offload` has no host.

    Source: LoongTrain (selective checkpoint++), BurstEngine section 3.2.
    """
    run = storing(fn, keep, offload=offload, host=host)
    target = run.store.offload if isinstance(run, StoringCall) else None
    if target is None:
        return torch_checkpoint(run, *args, use_reentrant=False)  # pyright: ignore[reportReturnType]
    call = target.host.call(run, args, target.move)
    del args  # otherwise this frame keeps the arguments alive until fn returns
    return torch_checkpoint(call, *call.places(), use_reentrant=False)  # pyright: ignore[reportReturnType]
