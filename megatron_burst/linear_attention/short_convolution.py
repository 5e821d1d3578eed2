# SPDX-License-Identifier: Apache-2.0
"""The public operation: a short causal convolution over a sequence that is split over ranks.

Decides that each piece gets the rows before it from the ranks that hold them, in one exchange, and
is then convolved as if the rank had them.

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
from .state_scan import check_alone

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
    """Causal depthwise convolution over a sequence that is split over ranks.

    x [s, b, c]: this rank's rows; weight [c, width], of which the last column is that of the row
    itself; bias [c] or None; before a document there are zeros. Rows come from as many ranks as
    hold some of the width - 1 before a piece. activation: None or "silu". Returns [s, b, c] in the
    dtype of x; it is computed in that of weight where this is wider. Gradients of weight and bias
    are those of this rank's rows: the sum over ranks is that of the sequence.

    groups, layout, cu_seqlens: which positions of which documents the ranks hold; layout a name
    (default "zigzag") or one that `mb.layout.make` made, but striped. tree: in place of cu_seqlens,
    a prefix tree, whose rows take those before them on their paths. plan: made by
    `mb.prepare_linear` for the same rows, in place of these; without one the call is a collective
    of the host too, which compares x, width, activation and whether there is a bias. With one,
    ranks in which these differ are out of step. label: as of `mb.attention`. Raises ValueError for
    unsupported arguments, RuntimeError naming the exchange if a peer died or is out of step.
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
    """A call of `short_convolution` on one rank; its arguments."""

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
        more = {"width": weight.shape[1], "bias": bias is not None, "activation": self.activation}
        request = request_of(self.groups, sequence, {"x": x}, None, None, self.options, more, False)
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
    """One rank's rows, convolved."""
    rows = x if before is None else torch.cat([x, before]).index_select(0, window.order)
    wide = torch.promote_types(x.dtype, weight.dtype)
    kernel = weight.to(wide).unsqueeze(1)
    shift = None if bias is None else bias.to(wide)
    rows = rows.to(wide)
    # Windows that reach from one piece into the rows before the next one are left out.
    rows_out = torch.nn.functional.conv1d(rows.permute(1, 2, 0), kernel, shift, groups=x.shape[2])
    rows_out = rows_out.permute(2, 0, 1).index_select(0, window.ends)
    if activation == "silu":
        rows_out = torch.nn.functional.silu(rows_out)
    return rows_out.to(x.dtype)


def _check_weights(x: Any, weight: Any, bias: Any, activation: object) -> None:
    """Raise ValueError unless they fit x."""
    channels = x.shape[2]
    check_tensor("weight", weight, {"c, width": (channels, None)})
    check_together({"x": x, "weight": weight}, dtype=False)
    if bias is not None:
        check_tensor("bias", bias, {"c": (channels,)})
        check_together({"x": x, "bias": bias}, dtype=False)
    if activation is not None:
        check_name("activation, if not None,", activation, ACTIVATIONS)


def _check_rows(plan: LinearPlan, x: Any) -> None:
    """Raise ValueError unless x has the rows that the plan was made for."""
    rows = plan.sequence.seq_len // plan.groups.size
    check_tensor("x", x, {"s, b, c": (rows, None, None)})
    if x.device != plan.device:
        raise ValueError(f"x: the plan was made for tensors on {plan.device}, got {x.device}")
