# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction: average losses over whole sequences instead of over each rank's tokens.

Megatron divides the loss of an MTP head by the token count of one rank and then averages over
ranks. With uneven masks the loss and its gradient depend on how a sequence is split. Even a mask of
ones becomes uneven: the shift masks the last token, which only one rank holds. This module replaces
the counts of a rank by the counts of the context-parallel group, so the result equals the result of
one rank with the whole sequence. If Megatron itself counts over the group (see `_counts_groups`),
this module changes nothing.

Shape letters: s tokens of this context-parallel rank, b batch.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.models.gpt import gpt_model
from megatron.core.transformer import multi_token_prediction as mtp

from .. import patching
from ..attention.plan_book import splits_attention
from ..data.slicing import rolls_lists
from ..patching import bound_to, given_to, require_function


def patch(patches: patching.PatchSet) -> None:
    """Wrap Megatron's MTP loss, so that it uses the token counts of context-parallel groups."""
    if not hasattr(mtp, "process_mtp_loss"):  # up to 0.16 this code is in GPTModel
        roll = require_function(gpt_model, "roll_tensor", ["tensor", "cp_group"])
        patches.replace(gpt_model, "roll_tensor", functools.partial(_counting, roll))
        return
    names = ["labels", "loss_mask", "compute_language_model_loss", "config", "cp_group",
             "packed_seq_params"]  # fmt: skip
    patches.wrap(mtp, "process_mtp_loss", names, _normalized)


def head_masks(
    mask: torch.Tensor, times: int, group: Any, packed: Any, inputs: torch.Tensor | None = None
) -> Iterator[torch.Tensor]:
    """Yield the loss masks [b, s] of MTP heads; each step communicates.

    Args:
        mask: the loss mask of the model; each head gets the mask shifted by one more token.
        times: number of heads.
        group: the ranks that hold the sequence.
        packed: a `PackedSeqParams`, or None.
        inputs: `mtp_input_mask` [b, s] of Megatron-LM after 0.20, the tokens that a head may read.
            Head k reads the next k tokens; its mask is 1 only where all of them are valid.

    Yields:
        The masks.
    """
    valid = None
    for _ in range(times):
        mask = _next(mask, group, packed)
        if inputs is None:
            yield mask
            continue
        inputs = _next(inputs, group, packed)
        valid = inputs if valid is None else valid * inputs
        yield mask * valid


def _next(mask: torch.Tensor, group: Any, packed: Any) -> torch.Tensor:
    """Return a mask [b, s] shifted by one token."""
    rolled: Any = [mask] if rolls_lists() else mask
    return mtp.roll_tensor(rolled, shifts=-1, dims=-1, cp_group=group, packed_seq_params=packed)[0]


def _normalized(original: Callable, *args: Any, **named: Any) -> Any:
    """Run process_mtp_loss with token counts of the context-parallel group.

    Megatron divides each head's loss by the rank's own count, clamped to 1. The factor (rank's
    count / group's count) replaces this division, and the factor (group size) undoes the average
    over ranks. With `calculate_per_token_loss` Megatron also multiplies by the rank's count before
    the shift, which may be 0 when the count after the shift is not 0. Megatron therefore gets a
    configuration without this option, and the scaling factor contains the group's count.

    The factors are fp64 scalars, so that they do not round the losses of fp64 models. Losses keep
    their own dtype.
    """
    bound = bound_to(original, args, named)
    arguments = bound.arguments
    config, group = arguments["config"], arguments.get("cp_group")
    labels = arguments["labels"] if arguments["labels"] is not None else arguments.get("input_ids")
    if group is None or group.size() == 1 or not splits_attention(group) or labels is None:
        return original(*args, **named)
    if _counts_groups(original, arguments, group):
        return original(*args, **named)
    mask = arguments.get("loss_mask")
    mask = torch.ones_like(labels) if mask is None else mask
    packed = arguments.get("packed_seq_params")
    if arguments["labels"] is None:  # labels are the next inputs, and the last token has none
        mask = _next(mask, group, packed)
    inputs = arguments.get("mtp_input_mask")
    inputs = None if inputs is None else inputs.to(mask.dtype)
    masks = [mask, *head_masks(mask, config.mtp_num_layers, group, packed, inputs)]
    local_counts = torch.stack([mask.sum() for mask in masks]).double()
    group_counts = local_counts.clone()
    torch.distributed.all_reduce(group_counts, group=group)
    factors = iter(group.size() * local_counts[1:].clamp(min=1) / group_counts[1:].clamp(min=1))
    loss = arguments["compute_language_model_loss"]
    arguments["compute_language_model_loss"] = lambda *args: loss(*args) * next(factors)
    if config.calculate_per_token_loss:
        arguments["config"] = config = copy.copy(config)
        config.calculate_per_token_loss = False
        config.mtp_loss_scaling_factor = (
            config.mtp_loss_scaling_factor * group_counts[0] / group.size()
        )
    return original(*bound.args, **bound.kwargs)


def _counts_groups(original: Callable, arguments: dict[str, Any], group: Any) -> bool:
    """Return whether process_mtp_loss itself divides by token counts of the group.

    The first call for a group is a collective. This call runs process_mtp_loss with a mask of two
    tokens on the first rank and of one token on other ranks. If process_mtp_loss divides by the
    count of the rank, the sum of the gradients is the same on every rank.

    This test is necessary, because no method of setting the counts works in every version. Counts
    that `roll_tensor` returns are ignored if heads also have an input mask, and versions that
    reduce counts over the group would sum them twice (pull request 7498). A replacement of
    `process_mtp_loss` would omit loss terms and logging of later versions. Version numbers do not
    identify a branch or a patched copy.
    """
    results = patching.run_state().mtp_counts
    for probed, counts_groups in results:
        if probed is group:
            return counts_groups
    counted, device = 2 if group.rank() == 0 else 1, arguments["hidden_states"].device
    # 4 rows for the model, 4 for the head
    hidden = torch.zeros(8, 1, 1, device=device, requires_grad=True)
    mask = (torch.arange(4, device=device) < counted).float()[None]
    config = copy.copy(arguments["config"])
    config.mtp_num_layers, config.mtp_loss_scaling_factor = 1, 1.0
    config.calculate_per_token_loss = config.mtp_detach_heads = False
    config.cross_entropy_loss_fusion = False
    probe = {
        **dict.fromkeys(arguments), "hidden_states": hidden, "config": config, "cp_group": group,
        "labels": torch.zeros(1, 4, dtype=torch.long, device=device), "loss_mask": mask,
        "output_layer": lambda x, **_: (x, None), "is_training": False,
        "compute_language_model_loss": lambda labels, x: x[:, :, 0].T,
    }  # fmt: skip
    home: Any = mtp
    roll = home.roll_tensor
    try:
        home.roll_tensor = _unmoved
        with torch.enable_grad():
            out = original(**probe)
    finally:
        home.roll_tensor = roll
    (grad,) = torch.autograd.grad(out.sum(), hidden)
    total = grad[4:].sum()
    ends = torch.stack([total, -total])
    torch.distributed.all_reduce(ends, torch.distributed.ReduceOp.MAX, group=group)
    largest, smallest = ends[0].item(), -ends[1].item()
    counts_groups = largest - smallest > 0.1 * largest
    results.append((group, counts_groups))
    return counts_groups


def _unmoved(tensor: Any, *args: Any, **named: Any) -> Any:
    """Replace `roll_tensor` without a shift: return (tensor, sum), or a list unchanged."""
    return (tensor, tensor.sum()) if isinstance(tensor, torch.Tensor) else tensor


def _counting(original: Callable, *args: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `roll_tensor`; return (shifted tensor, mean of the counts of the group's ranks)."""
    # Looked up in the module, because `slicing_patches` replaces it.
    moved, count = mtp.roll_tensor(*args, **named)
    group = given_to(original, args, named).get("cp_group")
    if group is None or group.size() == 1 or not splits_attention(group):
        return moved, count
    count = count.double()
    torch.distributed.all_reduce(count, group=group)
    return moved, count / group.size()
