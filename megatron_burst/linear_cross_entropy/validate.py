# SPDX-License-Identifier: Apache-2.0
"""The public function `linear_cross_entropy`: checks its arguments on all ranks, then computes."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..comm.operation import prepared
from ..kernels.autograd import outside_graphs, refuse_transforms
from ..kernels.online_softmax import accumulation_dtype
from . import checks, tiled_loop
from .checks import LossOperation, LossOptions
from .formula import Formula
from .function import LinearCrossEntropy, Sink
from .rows import Columns
from .split import Split
from .tiled_loop import tiling


@outside_graphs
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
    """Cross entropy of the logits hidden @ weight.T without materializing full logits.

    hidden [..., d] and weight [v, d] in one of float64, float32, bfloat16; labels [...] of any
    signed integer type or uint8, uint16, uint32 (they are compared and used as int64).
    Returns the loss of each token, shaped like labels, float32 (float64 for float64): 0 where
    the label is `ignore_index`, and *not* multiplied by `loss_mask`. A token whose label is ignored
    or whose weight is 0 adds nothing to the gradients, even if its hidden row holds NaN; if such a
    loss is not finite, 0 is returned in its place.

    loss_mask: shaped like labels, any weights: with mode "single_pass" the gradients are made in
        forward, for the sum of loss_mask * loss. Backward accepts any gradient, but one that is
        no multiple of loss_mask costs a second computation of the logits, and a warning. None:
        ones.
    tp_group: its ranks hold equal slices of the vocabulary, in rank order, and equal labels and
        loss_mask (a checksum tells); the call is a collective. sequence_parallel: hidden is this
        rank's slice of dimension 0, labels are those of all tokens; the gradient of hidden is this
        rank's slice too.
    logit_scale: logits are multiplied by it; a number, as all options are. For a learnable one
        scale hidden: hidden * logit_scale. logit_softcap: then cap * tanh(logit / cap).
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
    device-side assertion on CUDA. Raises ValueError, with all reasons, on all ranks alike; inside
    torch.func too. Cannot be differentiated twice: a backward with create_graph=True raises
    RuntimeError. After BurstEngine (arXiv 2509.19836), Algorithm 3.
    """
    refuse_transforms("linear_cross_entropy")
    split = checks.group(tp_group, sequence_parallel)
    options = LossOptions(
        ignore_index, logit_scale, logit_softcap, z_loss, label_smoothing, vocab_size, tile, mode,
        return_argmax, torch.is_grad_enabled(),
    )  # fmt: skip
    operation = LossOperation(
        split=split,
        inputs=checks.LossInputs(hidden, weight, labels, loss_mask, sink),
        options=options,
        sequence_parallel=sequence_parallel,
    )
    plan = prepared(operation)
    (hidden, weight, labels, loss_mask, sink), options = plan.inputs, plan.options

    head = head_of(hidden, weight, split, options)
    tokens = tiled_loop.Tokens(
        hidden.reshape(-1, hidden.shape[-1]).contiguous(),
        weight.contiguous(),
        labels.reshape(split.parts, -1),
    )
    weights = _weights(tokens.labels, loss_mask, head)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        single_pass = mode == "single_pass"
        # A view: by its node backward can tell whether the weight's gradient was asked for.
        tokens = tokens._replace(weight=tokens.weight.view_as(tokens.weight))
        loss, argmax = LinearCrossEntropy.apply(*tokens, weights, head, single_pass, sink)
    else:
        loss, _, argmax = tiled_loop.losses(head, tokens, weights)
    loss = loss.view(labels.shape)
    return loss if argmax is None else (loss, argmax.view(labels.shape))


def head_of(
    hidden: torch.Tensor, weight: torch.Tensor, split: Split, options: LossOptions
) -> tiled_loop.Head:
    count = options.vocab_size or len(weight) * split.size
    first = split.rank * len(weight)
    return tiled_loop.Head(
        formula=Formula(
            vocab_size=count,
            scale=options.logit_scale,
            softcap=options.logit_softcap,
            z_loss=options.z_loss,
            smoothing=options.label_smoothing,
        ),
        split=split,
        columns=Columns(first, min(max(count - first, 0), len(weight))),
        ignore_index=options.ignore_index,
        tile_rows=tiling(hidden, weight, split, options.tile).rows,
        dtype=accumulation_dtype(hidden.dtype),
        argmax=options.return_argmax,
    )


def _weights(
    labels: torch.Tensor, loss_mask: torch.Tensor | None, head: tiled_loop.Head
) -> torch.Tensor:
    """[p, n] in the accumulation dtype, 0 where the label is ignored."""
    kept = (labels != head.ignore_index).to(head.dtype)
    return kept if loss_mask is None else kept * loss_mask.reshape(labels.shape)
