# SPDX-License-Identifier: Apache-2.0
"""`mb.sparse_attention`: exact attention over a selection, over ranks.

Runs in the loop of `mb.attention` with a kernel that knows the selection: keys travel, in backward
with their gradients, and queries stay where their selection is.

Shape letters: s local rows, b batch, h query heads, k key/value heads, d width, w value width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ...comm.groups import Groups
from ...execution.function import Attention, RankCall
from ...execution.rank_plan import RankPlan
from ...kernels.autograd import outside_graphs, refuse_transforms
from ...planning.plan import Plan
from ...planning.validate import QKV, Request, check_shapes
from .kernels import Selected
from .pairs import PairKernel
from .plans import SelectedOperation, Setting, plan_of, setting
from .registry import KERNELS, named
from .selection import Selection


@outside_graphs
def sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    selection: Selection,
    *,
    value_width: int | None = None,
    scale: float | None = None,
    sink: torch.Tensor | None = None,
    kernel: str = "auto",
    plan: Plan | None = None,
    groups: Groups | None = None,
    algorithm: str | None = None,
    label: object = None,
    return_lse: bool = False,
) -> Any:
    """Exact attention of every query to the keys that were selected for it, over ranks.

    q [s, b, h, d]; k [s, b, k, d]; v [s, b, k, w]: this rank's shard; k divides h. v None, with
    value_width below d: values are the first value_width columns of the keys, as in absorbed latent
    attention, and travel once. Returns out [s, b, h, w] in the dtype of q, with gradients of q, k,
    v and sink; none of the selection.

    selection: of `mb.select`, or made by hand; layout and mask are its own. scale: of the scores;
    None: the plan's if its queries are as wide, else d ** -0.5. sink: [h], a logit in every softmax
    that has no value; its gradient is that of this rank's rows. kernel: "triton" (CUDA), "aten",
    which gathers keys for some rows at a time, "reference", dense, or "auto": "triton" where it
    serves these tensors, else "aten". plan, groups, algorithm, label: as of `mb.select`.
    return_lse: return (out, lse), lse [s, b, h] the log-sum-exp of every row's scores and its sink,
    float32 (float64 for float64 tensors), without a gradient: what `mb.indexer_loss` takes.

    Inside `mb.checkpoint` the store keeps out and lse as of `mb.attention`. Cannot be
    differentiated twice. Raises ValueError for unsupported arguments, as `mb.select` does;
    RuntimeError naming the exchange if a peer died or is out of step.
    """
    refuse_transforms("mb.sparse_attention")
    at = selected_setting(selection, plan, groups, algorithm)
    latent = v is None
    operation = AttendSelected(
        groups=at.groups,
        made=at.made,
        options=replace(at.options, softmax_scale=at.scale(q, scale), store=at.store),
        sink=sink,
        needs_grad=(_needs_grad(q), _needs_grad(k), _needs_grad(k if latent else v)),
        selection=selection,
        kernel=kernel,
        value_width=value_width,
        q=q,
        k=k,
        v=v,
    )
    chosen = plan_of(operation)
    kept = at.kept(("sparse attention", chosen.call), label)
    tag = at.groups.calls.forward(chosen.identity, label, sink is not None)
    rank_plan = replace(chosen.rank_plan, kernel=kernel_for(chosen, selection))
    recomputes = kept is not None and kept.store.filled
    call = RankCall(
        operation="mb.sparse_attention",
        groups=at.groups,
        rank_plan=rank_plan,
        tag=tag,
        store_entry=kept,
        recompute_plan=_of_the_rest(rank_plan) if recomputes else None,
        return_lse=return_lse,
    )
    if v is None:
        k, v = k[..., value_width:], k[..., :value_width]
    return Attention.apply(call, sink, q, k, v)


def _of_the_rest(rank_plan: RankPlan) -> RankPlan:
    """Return the rank_plan with the kernel for the rows that a recompute computes again."""
    assert isinstance(rank_plan.kernel, Selected)
    again = rank_plan.chunks[0].recompute
    assert again is not None
    return replace(rank_plan, kernel=rank_plan.kernel.of_rows(again.missing))


def selected_setting(
    selection: object, plan: Plan | None, groups: Groups | None, algorithm: str | None
) -> Setting:
    """Return where a call over a selection runs."""
    at = setting(plan, groups, None, None, algorithm)
    if plan is None and isinstance(selection, Selection):
        options = replace(at.options, layout=selection.layout, mask=selection.mask)
        return replace(at, options=options)
    return at


def _needs_grad(tensor: object) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.requires_grad


@dataclass(frozen=True, kw_only=True)
class AttendSelected(SelectedOperation):
    """A call of `mb.sparse_attention` on one rank; its arguments."""

    q: Any
    k: Any
    v: Any
    selection: Any
    kernel: str
    value_width: int | None

    def tensors(self) -> QKV:
        q, k, v, columns = self.q, self.k, self.v, self.value_width
        check_shapes(q, k, k if v is None else v)
        _check_width(columns, v is None, k.shape[-1])
        check_selection(self.selection)
        if v is None:
            q, k, v = q[..., columns:], k[..., columns:], k[..., :columns]
        return q, k, v

    def adapted(self, request: Request) -> Request:
        kernel = named(self.kernel, *request.tensors)
        return over_selection(request, self.selection, kernel, latent=self.v is None)


def check_selection(selection: object) -> None:
    """Raise ValueError unless it is an `mb.Selection`."""
    if not isinstance(selection, Selection):
        raise ValueError(f"selection must be an mb.Selection, got {selection!r:.100}")


def _check_width(value_width: int | None, latent: bool, width: int) -> None:
    if not latent:
        if value_width is not None:
            raise ValueError(f"value_width is for v=None, got {value_width!r} beside v")
    elif type(value_width) is not int or not 0 < value_width < width:
        raise ValueError(
            f"value_width: with v=None it must be a number of columns of k below its width {width},"
            f" got {value_width!r}"
        )


def over_selection(request: Request, selection: Selection, kernel: str, latent: bool) -> Request:
    """Return the request of a call over a selection, which must have its layout and mask."""
    q, k, _ = request.tensors
    for name in ("layout", "mask"):
        made_for, here = getattr(selection, name), getattr(request, name)
        if made_for != here:
            raise ValueError(
                f"selection: made for {name} {made_for!r:.200}, and this call has {here!r:.200}; "
                "select and attend with the same plan"
            )
    selection.check(q, k.shape[2], q.shape[0] * request.layout.cp_size)
    ids, block = selection.ids.shape, selection.block
    pairs = PairKernel(KERNELS[kernel], None, ids[2], ids[3], ids[3] * block, latent)
    pairs.name = f"sparse {kernel}"  # as the plan's description has it
    facts = {"selection": (ids, block), "sparse kernel": kernel, "latent": latent}
    return replace(request, kernel=pairs, facts=request.facts | facts)


def kernel_for(plan: Plan, selection: Selection) -> Selected:
    """Return the kernel of this plan that knows the selection."""
    pairs = plan.kernel
    assert isinstance(pairs, PairKernel)
    return pairs.by(selection, pairs.latent)
