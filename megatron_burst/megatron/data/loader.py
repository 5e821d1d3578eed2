# SPDX-License-Identifier: Apache-2.0
"""Lengths of documents, read where a data loader made them: on the host.

A script sends a batch to the GPU, and from there on only the GPU knows its cumulative lengths: to
read them back, the host would wait for all that it has queued, and plan beside an idle GPU. So the
batches that Megatron's schedules hand to a script have `cu_seqlens` which note what they said when
they are sent to a device. The script's own tensors, and views of them, are then known
(`Packs.values`); others are read from the device as before: those a script computes anew, and what
tensor-parallel ranks but the first get by broadcast.

The host also reads loss masks there, to warn once of masks whose gradients depend on the number of
context-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.utils import get_model_config

from ...config import OFF
from .. import patching
from ..checks.splitting import splits
from .packed import packs

_LENGTHS = ("cu_seqlens", "cu_seqlens_padded")
_WARNED = "warned of loss masks"
UNEVEN = (
    "warning: a loss mask leaves out tokens, and without --calculate-per-token-loss each rank "
    "divides its loss by the number of its own tokens: gradients depend on "
    "--context-parallel-size and on the layout, as in Megatron itself; add "
    "--calculate-per-token-loss, unless your loss function already divides by the tokens of all "
    "ranks"
)


class HostLengths(torch.Tensor):
    """A tensor on the CPU whose copy on a device is known to have its values; what other operators
    make of it is a plain tensor.
    """

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
    """An iterator over the batches of a data loader, whose lengths are `HostLengths`.

    warns: Whether to warn of the first loss mask that leaves out tokens.
    """

    def __init__(self, batches: Any, warns: bool = False) -> None:
        self._batches, self._warns = batches, warns

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        if not isinstance(batch, dict):
            return batch
        if self._warns:
            self._warns = not _warned_of(batch.get("loss_mask"))
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


def _warned_of(mask: Any) -> bool:
    """Warn once in a run if a loss mask on the host leaves out tokens; return whether it did.

    A mask on a device is not read: the host would wait for the device.
    """
    if not isinstance(mask, torch.Tensor) or mask.device.type != "cpu" or bool((mask != 0).all()):
        return False
    if not patching.notes().get(_WARNED):
        patching.notes()[_WARNED] = True
        patching.log(patching.user_text(UNEVEN))
    return True


def _uneven(model: Any) -> bool:
    """Return whether gradients of a model depend on how many tokens each rank counts."""
    config: Any = get_model_config(model[0] if isinstance(model, list) else model)
    burst = getattr(config, "burst", None)
    ours = burst is not None and burst.algorithm != OFF and splits(config)
    return ours and not config.calculate_per_token_loss and not patching.notes().get(_WARNED)


def _noting(run: Callable, named: dict[str, Any]) -> Any:
    given = named["data_iterator"]
    several = isinstance(given, list)
    warns = not named.get("forward_only", False) and _uneven(named["model"])
    found = [one if one is None else Batches(one, warns) for one in (given if several else [given])]
    return run(**named | {"data_iterator": found if several else found[0]})
