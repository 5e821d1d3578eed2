# SPDX-License-Identifier: Apache-2.0
"""Public function `linear_cross_entropy`, which first checks its arguments on all ranks."""

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
    """Return the cross entropy of the logits hidden @ weight.T without materializing all logits.

    The returned loss of a token is not multiplied by `loss_mask`. A token with an ignored label or
    weight 0 adds nothing to the gradients, even if its hidden row contains NaN. If the loss of such
    a token is not finite, 0 is returned instead. Double backward is not supported.

    Args:
        hidden: Hidden states [..., d] in float64, float32 or bfloat16.
        weight: Weight [v, d] in the dtype of hidden.
        labels: Labels [...] of any signed integer type, uint8, uint16 or uint32. They are used as
            int64. A label must be in the vocabulary unless it is ignored or its weight is 0.
        loss_mask: Weights of the tokens, shaped like labels; None means ones. With "single_pass"
            forward computes the gradients of sum(loss_mask * loss). Backward accepts any incoming
            gradient, but if it is not a multiple of loss_mask, backward computes the logits again
            and warns.
        ignore_index: Label of tokens without a loss.
        tp_group: Tensor-parallel group. Each rank holds a slice of the vocabulary rows; slices have
            equal sizes and are in rank order. All ranks must pass the same labels and loss_mask,
            which a checksum verifies. The call is a collective.
        sequence_parallel: True if hidden is this rank's slice of dimension 0. Labels and loss_mask
            must cover all tokens. The gradient of hidden is also this rank's slice.
        logit_scale: Factor of the logits, a number. For a learnable factor pass hidden *
            logit_scale.
        logit_softcap: Cap of the logits: cap * tanh(logit / cap), after the scale.
        z_loss: Coefficient of lse ** 2, which is added to the loss.
        label_smoothing: Label smoothing over vocab_size, as in torch's cross_entropy.
        vocab_size: Number of rows of the complete weight that take part in the softmax. Later rows
            are padding and get no gradient. None uses all rows, as Megatron does.
        tile: Limit of the bytes of logits in memory; default 128 MiB, and 1 GiB on CUDA.
        mode: "single_pass" computes both gradients in forward and keeps them for backward, the
            weight gradient in float32. "recompute" keeps one number per token and computes the
            logits again in backward.
        return_argmax: Also return the most likely vocabulary row of each token.
        sink: Buffer that receives the weight gradient in place of weight.grad; see `function.Sink`.

    Returns:
        The loss of each token, shaped like labels, in float32 (float64 for float64). It is 0 if the
        label is `ignore_index`. If `return_argmax` is True: the loss, and the most likely
        vocabulary row of each token in int64, shaped like labels. Among equal logits the lowest row
        is returned.

    Raises:
        ValueError: Arguments are invalid or differ between ranks, or the call is inside torch.func.
            The message lists all problems, and all ranks raise the error. A label outside the
            vocabulary raises the error on CPU and fails a device-side assertion on CUDA.
        RuntimeError: Backward with create_graph=True.

    Source: BurstEngine (arXiv 2509.19836), Algorithm 3.
    """
    refuse_transforms("linear_cross_entropy")
    split = checks.split_of(tp_group, sequence_parallel)
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
        # Backward uses the node of this view to detect if the weight's gradient is needed.
        tokens = tokens._replace(weight=tokens.weight.view_as(tokens.weight))
        loss, argmax = LinearCrossEntropy.apply(*tokens, weights, head, single_pass, sink)
    else:
        loss, _, argmax = tiled_loop.losses(head, tokens, weights)
    loss = loss.view(labels.shape)
    return loss if argmax is None else (loss, argmax.view(labels.shape))


def head_of(
    hidden: torch.Tensor, weight: torch.Tensor, split: Split, options: LossOptions
) -> tiled_loop.Head:
    """Return the `Head` of a call: its options and sizes on this rank.

    Args:
        hidden: Hidden states [..., d].
        weight: Slice of the weight [v, d] on this rank.
        split: Distribution of vocabulary and tokens.
        options: Checked options.
    """
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
    """Return the weights [p, n] of tokens in the accumulation dtype; 0 for ignored labels.

    Args:
        labels: Labels [p, n].
        loss_mask: Weights of the tokens, shaped like the labels of the call; None for ones.
        head: Options and sizes of the call.
    """
    labelled = (labels != head.ignore_index).to(head.dtype)
    return labelled if loss_mask is None else labelled * loss_mask.reshape(labels.shape)
