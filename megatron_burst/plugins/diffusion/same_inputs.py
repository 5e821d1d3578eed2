# SPDX-License-Identifier: Apache-2.0
"""Comparison of the inputs of a training step over context-parallel ranks.

Every rank reads the batch and draws the noise of whole sequences, then selects its rows. The result
is correct only if all ranks have the same values. Bridge seeds the ranks of a sequence with the
same number, but code that draws random numbers on only one rank would change the noise of that
rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ...megatron.data.slicing import context_group

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def check_same(model: str, **inputs: torch.Tensor | None) -> None:
    """Raise an error unless all context-parallel ranks have the same inputs.

    This is a collective call. Ranks exchange 4 integers per input, and wait for their devices.

    Args:
        model: The name of the model, for the message.
        inputs: Tensors of any shape on one device; None if an input is absent on all ranks.

    Raises:
        ValueError: Ranks have different inputs; the message names them. All ranks raise the error.
    """
    present = {name: x for name, x in inputs.items() if x is not None}
    sums = torch.stack([_checksum(x) for x in present.values()])
    extremes = torch.stack([sums, -sums])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=context_group())
    same = (extremes[0] == -extremes[1]).all(1).tolist()
    differing = [name for name, equal in zip(present, same, strict=True) if not equal]
    if differing:
        raise ValueError(
            f"{', '.join(differing)} of {model}: context-parallel ranks have different values; "
            "these ranks must read the same batch and draw the same noise, so use the same seed "
            "(rng.seed) and draw no random numbers on one of the ranks only"
        )


def _checksum(x: torch.Tensor) -> torch.Tensor:
    """Return the number of elements of a tensor and the sum of their bits, int64 [2]."""
    bits = x.detach().view(_INTEGERS[x.itemsize])
    return torch.stack(
        [bits.new_tensor(bits.numel(), dtype=torch.int64), bits.sum(dtype=torch.int64)]
    )
