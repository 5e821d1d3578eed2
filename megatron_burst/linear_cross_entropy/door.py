"""The public operation: arguments checked, on all ranks alike, and put in order.

Decides what is refused. Must not know how a tile is computed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..merge import accumulation_dtype
from ..once import refuse_transforms
from . import sweep
from .formula import Formula
from .function import LinearCrossEntropy, Sink
from .rows import Columns
from .split import Split
from .tiling import tiling

MODES = ("single_pass", "recompute")
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    loss_mask: torch.Tensor | None = None,
    ignore_index: int = -100,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    vocab_size: int | None = None,
    tile: int | None = None,
    mode: str = "single_pass",
    return_argmax: bool = False,
    sink: Sink | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy of the logits hidden @ weight.T without ever holding all logits.

    hidden [..., d] and weight [v, d] in one of float64, float32, bfloat16; labels [...] integer.
    Returns the loss of each token, shaped like labels, float32 (float64 for float64): 0 where
    the label is `ignore_index`, and *not* multiplied by `loss_mask`.

    loss_mask: shaped like labels, any weights: with mode "single_pass" the gradients are made in
        forward, for the sum of loss_mask * loss. Backward accepts any gradient, but one that is
        no multiple of loss_mask costs a second computation of the logits, and a warning. None:
        ones.
    tp_group: its ranks hold equal slices of the vocabulary, in rank order, and equal labels; the
        call is a collective. sequence_parallel: hidden is this rank's slice of dimension 0, labels
        are those of all tokens; the gradient of hidden is this rank's slice too.
    logit_scale: logits are multiplied by it. logit_softcap: then cap * tanh(logit / cap).
    z_loss: adds z_loss * lse ** 2. label_smoothing: as in torch's cross_entropy, over vocab_size.
    vocab_size: rows of the whole weight from there on are padding: no part of the softmax, no
        gradient. None: all rows count, as in Megatron.
    tile: bytes of logits alive at once; default 128 MiB, 1 GiB on CUDA.
    mode: "single_pass" keeps both gradients from forward on (that of the weight in float32);
        "recompute" keeps a number per token and computes the logits again in backward.
    return_argmax: also return each token's most likely vocabulary row, int64, shaped like labels
        (of equal ones the lowest).
    sink: where the gradient of weight goes instead of weight.grad, see `function.Sink`.

    Labels must be in the vocabulary where their weight is not 0: a ValueError on CPU, a failed
    device-side assertion on CUDA. Raises ValueError on all ranks alike. Cannot be differentiated
    twice. After BurstEngine (arXiv 2509.19836), Algorithm 3.
    """
    refuse_transforms("linear_cross_entropy")
    split = Split(tp_group, sequence_parallel and tp_group is not None)
    choices = _Choices(
        ignore_index, logit_scale, logit_softcap, z_loss, label_smoothing, vocab_size, tile, mode,
        return_argmax, torch.is_grad_enabled(),
    )  # fmt: skip
    try:
        _check(hidden, weight, labels, loss_mask, split, choices)
        facts = _facts(hidden, weight, labels, split, choices)
    except ValueError as error:
        facts = error
    split.agree(facts, hidden.device)

    head = _head(hidden, weight, split, choices)
    tokens = sweep.Tokens(
        hidden.reshape(-1, hidden.shape[-1]).contiguous(),
        weight.contiguous(),
        labels.to(torch.int64).reshape(split.parts, -1),
    )
    weights = _weights(tokens.labels, loss_mask, head)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        single_pass = mode == "single_pass"
        loss, argmax = LinearCrossEntropy.apply(*tokens, weights, head, single_pass, sink)
    else:
        loss, _, argmax = sweep.losses(head, tokens, weights)
    loss = loss.view(labels.shape)
    return loss if argmax is None else (loss, argmax.view(labels.shape))


@dataclass(frozen=True)
class _Choices:
    """The options of a call; all of them must agree over the group."""

    ignore_index: int
    logit_scale: float
    logit_softcap: float | None
    z_loss: float
    label_smoothing: float
    vocab_size: int | None
    tile: int | None
    mode: str
    return_argmax: bool
    grad_enabled: bool


def _check(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    loss_mask: torch.Tensor | None,
    split: Split,
    choices: _Choices,
) -> None:
    _check_tensors(hidden, weight, labels, loss_mask, split)
    _check_choices(choices, len(weight) * split.size)
    count = choices.vocab_size or len(weight) * split.size
    good = (labels == choices.ignore_index) | ((labels >= 0) & (labels < count))
    if loss_mask is not None:
        good |= loss_mask == 0
    if labels.is_cuda:
        torch._assert_async(good.all())
    elif not good.all():
        bad = labels[~good][0].item()
        raise ValueError(
            f"labels must be in [0, {count}) or ignore_index ({choices.ignore_index}) where "
            f"loss_mask is not 0, got {bad}"
        )


def _check_tensors(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    loss_mask: torch.Tensor | None,
    split: Split,
) -> None:
    if hidden.dtype not in DTYPES or weight.dtype != hidden.dtype:
        raise ValueError(
            f"hidden and weight must both be {', '.join(map(str, DTYPES))}, got {hidden.dtype} "
            f"and {weight.dtype}"
        )
    if hidden.dim() < 2 or weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"hidden must be [..., d] and weight [v, d], got {list(hidden.shape)} and "
            f"{list(weight.shape)}"
        )
    expected = [hidden.shape[0] * split.parts, *hidden.shape[1:-1]]
    if list(labels.shape) != expected:
        with_sequence_parallel = f", {split.parts} slices" if split.parts > 1 else ""
        raise ValueError(
            f"labels must be {expected} for hidden {list(hidden.shape)}"
            f"{with_sequence_parallel}, got {list(labels.shape)}"
        )
    if labels.is_floating_point() or labels.dtype in (torch.bool, torch.complex64):
        raise ValueError(f"labels must be integers, got {labels.dtype}")
    if loss_mask is not None and loss_mask.shape != labels.shape:
        raise ValueError(
            f"loss_mask must be shaped like labels, {expected}, got {list(loss_mask.shape)}"
        )
    if loss_mask is not None and loss_mask.requires_grad:
        raise ValueError("loss_mask must not require a gradient: multiply the loss by it instead")
    devices = {str(t.device) for t in (hidden, weight, labels, loss_mask) if t is not None}
    if len(devices) > 1:
        raise ValueError(f"all tensors must be on one device, got {sorted(devices)}")


def _check_choices(choices: _Choices, rows: int) -> None:
    if choices.mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {choices.mode!r}")
    if choices.tile is not None and choices.tile < 1:
        raise ValueError(f"tile must be a positive number of bytes, got {choices.tile}")
    if choices.vocab_size is not None and not 1 <= choices.vocab_size <= rows:
        raise ValueError(
            f"vocab_size must be from 1 to the {rows} rows of the weight, got {choices.vocab_size}"
        )
    if not math.isfinite(choices.logit_scale):
        raise ValueError(f"logit_scale must be finite, got {choices.logit_scale}")
    if choices.logit_softcap is not None and not 0 < choices.logit_softcap < math.inf:
        raise ValueError(f"logit_softcap must be positive, got {choices.logit_softcap}")
    if not 0 <= choices.z_loss < math.inf:
        raise ValueError(f"z_loss must not be negative, got {choices.z_loss}")
    if not 0 <= choices.label_smoothing <= 1:
        raise ValueError(f"label_smoothing must be from 0 to 1, got {choices.label_smoothing}")


def _facts(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    split: Split,
    choices: _Choices,
) -> dict[str, object]:
    """What decides which exchanges a rank takes part in."""
    return {
        "hidden": (tuple(hidden.shape), str(hidden.dtype)),
        "weight": tuple(weight.shape),
        "labels": tuple(labels.shape),
        "gradients of (hidden, weight)": (hidden.requires_grad, weight.requires_grad),
        "sequence_parallel": split.sequence_parallel,
        "options": choices,
    }


def _head(
    hidden: torch.Tensor, weight: torch.Tensor, split: Split, choices: _Choices
) -> sweep.Head:
    count = choices.vocab_size or len(weight) * split.size
    first = split.rank * len(weight)
    return sweep.Head(
        formula=Formula(
            vocab_size=count,
            scale=choices.logit_scale,
            softcap=choices.logit_softcap,
            z_loss=choices.z_loss,
            smoothing=choices.label_smoothing,
        ),
        split=split,
        columns=Columns(first, min(max(count - first, 0), len(weight))),
        ignore_index=choices.ignore_index,
        tile_rows=tiling(hidden, weight, split, choices.tile).rows,
        dtype=accumulation_dtype(hidden.dtype),
        argmax=choices.return_argmax,
    )


def _weights(
    labels: torch.Tensor, loss_mask: torch.Tensor | None, head: sweep.Head
) -> torch.Tensor:
    """[p, n] in the accumulation dtype, 0 where the label is ignored."""
    kept = (labels != head.ignore_index).to(head.dtype)
    return kept if loss_mask is None else kept * loss_mask.reshape(labels.shape).to(head.dtype)
