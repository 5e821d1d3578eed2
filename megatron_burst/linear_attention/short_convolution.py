# SPDX-License-Identifier: Apache-2.0
"""Public operation `short_convolution`: a causal convolution over a sequence split over ranks.

A piece is a run of consecutive positions of one document on one rank. In one exchange, each rank
receives the rows before its pieces. Each piece is then convolved with these rows before it.

Shape letters: s local rows, b batch, c channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..comm.groups import Groups, check_groups, check_label
from ..comm.operation import prepared
from ..comm.rows import exchange_rows, longest
from ..kernels.autograd import outside_graphs, refuse_transforms
from .plan import ChainOperation, LinearPlan
from .program import ConvolutionWindow
from .request import (
    ChainRequest,
    Options,
    check_device,
    check_name,
    check_tensor,
    check_together,
    request_of,
    sequence_of_rows,
)
from .state_scan import check_alone, check_forward

ACTIVATIONS = ("silu",)


@outside_graphs
def short_convolution(
    x: Any,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    groups: Groups | None = None,
    layout: Any = None,
    cu_seqlens: Any = None,
    tree: Any = None,
    plan: LinearPlan | None = None,
    label: object = None,
) -> Any:
    """Compute a causal depthwise convolution over a sequence that is split over ranks.

    The rows before a document are zeros. A rank receives the width - 1 rows before each of its
    pieces (runs of consecutive positions) from the ranks that hold them. The gradients of weight
    and bias are from this rank's rows only. The sum over ranks is the gradient of the whole
    sequence.

    Args:
        x: Rows of this rank [s, b, c].
        weight: Weight [c, width]. The last column applies to the row itself.
        bias: Bias [c], or None.
        activation: None or "silu".
        groups: Groups of the ranks, if no plan is given.
        layout: Positions of each rank: a name (default "zigzag") or a layout of `mb.layout.make`,
            but not striped.
        cu_seqlens: Cumulative lengths of the documents, or None for one document.
        tree: Prefix tree instead of cu_seqlens. A row follows the previous rows on its path.
        plan: Plan of `mb.prepare_linear` for the same rows, in place of groups, layout, cu_seqlens
            and tree. Without a plan, each call makes a plan, for which all ranks exchange messages
            between their CPUs. The ranks then compare the shape and dtype of x, the width, the
            activation and whether there is a bias. With a plan, the caller must ensure that these
            are the same on all ranks.
        label: Same as in `mb.attention`.

    Returns:
        The result [s, b, c] in the dtype of x. It is computed in the wider of the dtypes of x and
        weight.

    Raises:
        ValueError: An argument is not supported.
        RuntimeError: A rank died or is out of step. The message names the exchange.
    """
    refuse_transforms("mb.short_convolution")
    if plan is None:
        options = Options.of(layout, cu_seqlens, tree=tree)
        check_groups(groups)
        assert groups is not None
        operation = ConvolutionOperation(
            groups=groups, options=options, label=label, x=x, weight=weight, bias=bias,
            activation=activation,
        )  # fmt: skip
        plan = prepared(operation)
    else:
        keywords = {"groups": groups, "layout": layout, "cu_seqlens": cu_seqlens, "tree": tree}
        check_alone(plan, keywords)
        check_forward(plan, "mb.short_convolution")
        check_label(label)
    _check_rows(plan, x)
    _check_weights(x, weight, bias, activation)
    width = weight.shape[1]
    window, before = plan.window(width), None
    if width > 1:
        kind = width, bias is not None, activation, tuple(x.shape[1:]), str(x.dtype)
        plan.groups.expect(longest(window.longest, [x]))
        (before,) = exchange_rows([x], window.paths, plan.groups, plan.identity, (kind, label))
    return _convolved(x, before, window, weight, bias, activation)


@dataclass(frozen=True, kw_only=True)
class ConvolutionOperation(ChainOperation):
    """Call of `short_convolution` on one rank, with its arguments."""

    x: Any
    weight: Any
    bias: Any
    activation: str | None

    def request(self) -> ChainRequest:
        x, weight, bias = self.x, self.weight, self.bias
        check_tensor("weight", weight, {"c, width": (None, None)})
        check_tensor("x", x, {"s, b, c": (None,) * 3})
        check_device(self.groups, "x", x)
        sequence = sequence_of_rows(self.groups, x, self.options)
        extra = {"width": weight.shape[1], "bias": bias is not None, "activation": self.activation}
        request = request_of(
            self.groups, sequence, {"x": x}, None, None, self.options, extra, False
        )
        _check_weights(x, weight, bias, self.activation)
        return request


def _convolved(
    x: torch.Tensor,
    before: torch.Tensor | None,
    window: ConvolutionWindow,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
) -> torch.Tensor:
    rows = x if before is None else torch.cat([x, before]).index_select(0, window.order)
    wide = torch.promote_types(x.dtype, weight.dtype)
    kernel = weight.to(wide).unsqueeze(1)
    shift = None if bias is None else bias.to(wide)
    rows = rows.to(wide)
    # Skip windows that extend from one piece into the rows before the next piece.
    rows_out = torch.nn.functional.conv1d(rows.permute(1, 2, 0), kernel, shift, groups=x.shape[2])
    rows_out = rows_out.permute(2, 0, 1).index_select(0, window.ends)
    if activation == "silu":
        rows_out = torch.nn.functional.silu(rows_out)
    return rows_out.to(x.dtype)


def _check_weights(x: Any, weight: Any, bias: Any, activation: object) -> None:
    """Raise ValueError unless weight, bias and activation fit x."""
    channels = x.shape[2]
    check_tensor("weight", weight, {"c, width": (channels, None)})
    check_together({"x": x, "weight": weight}, dtype=False)
    if bias is not None:
        check_tensor("bias", bias, {"c": (channels,)})
        check_together({"x": x, "bias": bias}, dtype=False)
    if activation is not None:
        check_name("activation, if not None,", activation, ACTIVATIONS)


def _check_rows(plan: LinearPlan, x: Any) -> None:
    """Raise ValueError unless x has the rows for which the plan was made."""
    rows = plan.sequence.seq_len // plan.groups.size
    check_tensor("x", x, {"s, b, c": (rows, None, None)})
    if x.device != plan.device:
        raise ValueError(f"x must be on {plan.device}, the device of the plan, got {x.device}")
