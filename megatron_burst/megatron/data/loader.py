# SPDX-License-Identifier: Apache-2.0
"""Document lengths that the host records before a batch is sent to a device.

A script sends a batch to the GPU. If the host read the cumulative lengths back from the GPU, it
would wait for all queued work. It would then make its plan while the GPU is idle. Therefore the
`cu_seqlens` tensors of batches record their values when the script sends them to a device.
`Packs.values` returns the recorded values for the device tensors and for views of them. Other
tensors are read from the device: tensors that a script computes, and tensors that other
tensor-parallel ranks receive by broadcast. Module `next_pack` sends these ranks the documents of
the next batch, from which their plans are made in advance.

The host also reads loss masks, and warns once if gradients depend on the number of context-parallel
ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from megatron.core.utils import get_model_config

from .. import patching
from ..checks.cuda_graphs import graphs_asked
from ..selection import burst_of, splits_with_burst
from .entries import documents_of, entries_to_cut
from .packed import Pack, packs

_LENGTHS = ("cu_seqlens", "cu_seqlens_padded")
_OWN_GROUP = "local_cp_size", "hybrid_cp_group"
_WARNED = "uneven loss masks"
UNEVEN = (
    "warning: a loss mask excludes tokens, and without --calculate-per-token-loss each rank "
    "divides its loss by the number of its own tokens: gradients depend on "
    "--context-parallel-size and on the layout, as in Megatron itself; add "
    "--calculate-per-token-loss, unless your loss function divides by the tokens of all ranks"
)


class HostLengths(torch.Tensor):
    """A CPU tensor that records its values for each copy that `cuda` or `to` makes.

    The host can later read the values without a transfer from the device (`Packs.values`). All
    other operators return a plain tensor.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    def cuda(self, *args: Any, **named: Any) -> torch.Tensor:
        """See `torch.Tensor.cuda`."""
        return self._noted(self.as_subclass(torch.Tensor).cuda(*args, **named))

    def to(self, *args: Any, **named: Any) -> torch.Tensor:
        """See `torch.Tensor.to`."""
        return self._noted(self.as_subclass(torch.Tensor).to(*args, **named))

    def _noted(self, copy: torch.Tensor) -> torch.Tensor:
        if copy.device.type != "cpu" and copy.dtype == self.dtype and copy.is_contiguous():
            packs().note_values(copy, self)
        return copy


class BatchIterator:
    """An iterator over the batches of a data loader, with cumulative lengths as `HostLengths`.

    If the batches are packed, the iterator reads one batch ahead, so that the plan book can start
    the plans of the next micro-batch. It never reads ahead beyond the step's `count` batches.

    Args:
        batches: the iterator of the data loader.
        warns: whether to warn of the first loss mask that excludes tokens.
        count: number of batches that the step reads.
        ahead: result of `unused` of the previous iterator over the same data loader.
    """

    def __init__(
        self, batches: Any, warns: bool = False, count: int = 0, ahead: Iterable[Any] = ()
    ) -> None:
        self._batches, self._warns = batches, warns
        self._ahead = list(ahead)  # at most one batch, or the exception of the data loader
        self._left = count - len(self._ahead)  # number of batches that the step still reads

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        patching.run_state().next_pack = None
        batch = self._ahead.pop() if self._ahead else self._read()
        if isinstance(batch, Exception):
            raise batch
        if not isinstance(batch, dict):
            return batch
        if self._warns:
            self._warns = not _warned_of(batch.get("loss_mask"))
        if self._left > 0 and documents_of(batch) is not None:
            self._read_ahead()
        length_entries = {name: batch.get(name) for name in _LENGTHS}
        return batch | {
            name: lengths.as_subclass(HostLengths)
            for name, lengths in length_entries.items()
            if type(lengths) is torch.Tensor and lengths.device.type == "cpu"
        }

    def _read(self) -> Any:
        self._left -= 1
        return next(self._batches)

    def _read_ahead(self) -> None:
        """Read the next batch, and start the plans for its documents."""
        try:
            batch = self._read()
        except Exception as error:  # raised when the step reads this batch
            batch = error
        self._ahead.append(batch)
        if isinstance(batch, dict):
            patching.run_state().next_pack = plan_ahead(batch)

    def unused(self) -> list[tuple[Any, Any]]:
        """Return [(data loader, batch)] of a batch that was read ahead but not used; else []."""
        return [(self._batches, batch) for batch in self._ahead]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


def plan_ahead(batch: dict[str, Any]) -> Pack | None:
    """Start to make the plans of attention for a packed batch on the host, for a later forward.

    A batch with its own context-parallel group is skipped.

    Args:
        batch: the entries of the whole sequence, by name.

    Returns:
        The documents of the batch; None if they are not used.
    """
    lengths = documents_of(batch)
    if lengths is None or any(batch.get(name) is not None for name in _OWN_GROUP):
        return None
    if any(x is not None and x.device.type != "cpu" for x in lengths):
        return None
    with contextlib.suppress(ValueError):  # the step raises the error when it uses the batch
        pack = packs().of(entries_to_cut(batch, packed=True).length, *lengths)
        for book in patching.run_state().plan_books.values():
            book.plan_ahead(pack)
        return pack
    return None


def patch(patches: patching.PatchSet) -> None:
    """Wrap Megatron's schedules, so that data iterators return `HostLengths`.

    Call this before `packing.step.patch`: the wrapper that is added last is called first, so this
    wrapper receives the packed batches.
    """
    patching.wrap_steps(patches, _noting)


def _warned_of(mask: Any) -> bool:
    """Warn once in a run if a loss mask on the host excludes tokens; return True if it does.

    A mask on a device is not read: the host would wait for the device.
    """
    if not isinstance(mask, torch.Tensor) or mask.device.type != "cpu" or bool((mask != 0).all()):
        return False
    if _WARNED not in patching.run_state().logged:
        patching.run_state().logged.add(_WARNED)
        patching.log(patching.user_text(UNEVEN))
    return True


def _uneven(model: Any) -> bool:
    """Return whether to look for loss masks that change gradients.

    Gradients change if ranks have unequal numbers of loss tokens and the loss is not computed per
    token. The result is False after the warning was logged.
    """
    config = _config_of(model)
    burst = burst_of(config)
    if not splits_with_burst(config, burst) or config.calculate_per_token_loss:
        return False
    return _WARNED not in patching.run_state().logged


def _config_of(model: Any) -> Any:
    """Return the `TransformerConfig` of a model, or of the first of several model chunks."""
    return get_model_config(model[0] if isinstance(model, list) else model)


def _noting(run: Callable, named: dict[str, Any]) -> Any:
    iterators = named["data_iterator"]
    several = isinstance(iterators, list)
    warns = not named.get("forward_only", False) and _uneven(named["model"])
    state = patching.run_state()
    unused, state.read_ahead = state.read_ahead, []
    # The thread that makes plans allocates memory, which may end the capture of a CUDA graph.
    config = _config_of(named["model"])
    _, graphs = graphs_asked(config)
    count = named["num_microbatches"] if graphs == "none" else 0

    def wrapped(batches: Any) -> BatchIterator:
        ahead = [batch for owner, batch in unused if owner is batches]
        return BatchIterator(batches, warns, count, ahead)

    wrappers = [
        None if iterator is None else wrapped(iterator)
        for iterator in (iterators if several else [iterators])
    ]
    # These values are equal on all ranks, so either all ranks share packs or none does.
    state.shares_packs = graphs == "none" and splits_with_burst(config, burst_of(config))
    try:
        result = run(**named | {"data_iterator": wrappers if several else wrappers[0]})
    finally:
        state.next_pack, state.shares_packs = None, False
    state.read_ahead = [entry for x in wrappers if x is not None for entry in x.unused()]
    return result
