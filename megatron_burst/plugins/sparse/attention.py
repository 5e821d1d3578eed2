# SPDX-License-Identifier: Apache-2.0
"""Public operation `mb.sparse_attention`: exact attention over selected keys, across ranks.

The operation runs the loop of `mb.attention` with a kernel that reads only selected keys. Forward
sends keys, and backward sends keys and their gradients. Queries and their selection stay on their
rank.

Shape letters: s local rows of the queries, t local rows of the keys, b batch, h query heads, k
key/value heads, d width, w value width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import or_
from typing import Any

import torch

from ...comm.groups import Groups
from ...execution.function import Attention, RankCall
from ...execution.rank_plan import RankPlan
from ...kernels.autograd import outside_graphs, refuse_transforms
from ...options import AttentionOptions
from ...planning.plan import Plan
from ...planning.validate import Request, check_shapes
from .kernels import SelectedKernel
from .pairs import PairKernel
from .plans import SelectedOperation, SparseSetting, plan_of, setting
from .registry import KERNELS, kernel_name
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
    """Compute exact attention of every query to the keys that were selected for it.

    Inside `mb.checkpoint` the attention store keeps out and lse, same as in `mb.attention`. The
    result cannot be differentiated twice. The selection has no gradient.

    Args:
        q: Queries of this rank's shard [s, b, h, d].
        k: Keys of this rank's shard [t, b, k, d]. The number of key heads must divide h. t is s
            unless the selection has a `key_layout`.
        v: Values of this rank's shard [t, b, k, w]. If None, the first `value_width` columns of k
            are the values, as in absorbed latent attention. Ranks then send these columns once.
        selection: Result of `mb.select`, or a `Selection` that the caller makes. The call uses the
            layout and the mask of the selection.
        value_width: Number of columns of k that are values, less than d; requires v=None. If both
            are None, all columns are values.
        scale: Factor of the scores. If None, the call uses the factor of `plan`. Without a plan, or
            if the plan was made for queries of another width, the factor is d ** -0.5.
        sink: Extra logit [h] in the softmax of every row, without a value; or None. The gradient of
            the sink is the sum over this rank's rows.
        kernel: "triton" (CUDA), "aten" (gathers keys for a tile of rows at a time), "reference"
            (dense), or "auto": "triton" if it supports these tensors, otherwise "aten".
        plan: Same as in `mb.select`.
        groups: Same as in `mb.select`.
        algorithm: Same as in `mb.select`.
        label: Same as in `mb.attention`.
        return_lse: Also return the log-sum-exp, for `mb.indexer_loss`.

    Returns:
        The output [s, b, h, w] in the dtype of q, differentiable in q, k, v and sink. If
        `return_lse` is True: the output and lse [s, b, h], the log-sum-exp of each row's scores and
        sink. lse is float32 (float64 for float64 tensors) and has no gradient.

    Raises:
        ValueError: An argument is not supported; see `mb.select`.
        RuntimeError: A rank died or is out of step. The message names the exchange.
    """
    refuse_transforms("mb.sparse_attention")
    at = selected_setting(selection, plan, groups, algorithm)
    options = replace(at.options, softmax_scale=at.scale(q, scale), store=at.store)
    chosen = plan_of(_operation(at, options, q, k, v, selection, sink, kernel, value_width))
    stored = at.stored(("sparse attention", chosen.call), label)
    tag = at.groups.calls.forward(chosen.identity, label, sink is not None)
    rank_plan = replace(chosen.rank_plan, kernel=kernel_for(chosen, selection))
    recomputes = stored is not None and stored.store.filled
    call = RankCall(
        operation="mb.sparse_attention",
        groups=at.groups,
        rank_plan=rank_plan,
        tag=tag,
        store_entry=stored,
        recompute_plan=_recompute_plan(rank_plan) if recomputes else None,
        return_lse=return_lse,
    )
    if v is None and value_width is None:
        return Attention.apply(call, sink, q, k)
    if v is None:
        k, v = k[..., value_width:], k[..., :value_width]
    return Attention.apply(call, sink, q, k, v)


def selected_plan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    selection: Selection,
    *,
    plan: Plan,
    scale: float | None = None,
    sink: torch.Tensor | None = None,
    kernel: str = "auto",
) -> Plan:
    """Return the plan of one call with a selection, for `mb.joint_attention`.

    Args:
        q: Queries of this rank's shard [s, b, h, d].
        k: Keys of this rank's shard [t, b, k, d].
        v: Values of this rank's shard [t, b, k, w], or None if values are the keys.
        selection: Same as in `mb.sparse_attention`.
        plan: Plan of `mb.prepare` for the keys of the selection. The result computes the same
            gradients as this plan, even if the tensors need none (under `torch.no_grad`).
        scale: Same as in `mb.sparse_attention`.
        sink: Sink that the caller will pass to `mb.joint_attention`, or None.
        kernel: Same as in `mb.sparse_attention`.

    Returns:
        The plan, valid for one call with these tensors and this selection.

    Raises:
        ValueError: An argument is not supported; see `mb.select`.
    """
    at = selected_setting(selection, plan, None, None)
    options = replace(at.options, softmax_scale=at.scale(q, scale), store=at.store)
    operation = _operation(at, options, q, k, v, selection, sink, kernel)
    needs_grad = tuple(map(or_, operation.needs_grad, plan.needs_grad))  # plans of a call share q
    made = plan_of(replace(operation, needs_grad=needs_grad))
    return made.with_kernel(kernel_for(made, selection))


def _operation(
    at: SparseSetting,
    options: AttentionOptions,
    q: Any,
    k: Any,
    v: Any,
    selection: Any,
    sink: torch.Tensor | None,
    kernel: str,
    value_width: int | None = None,
) -> SparseAttentionOperation:
    return SparseAttentionOperation(
        groups=at.groups,
        made=at.made,
        options=options,
        sink=sink,
        needs_grad=(_needs_grad(q), _needs_grad(k), _needs_grad(k if v is None else v)),
        selection=selection,
        kernel=kernel,
        value_width=value_width,
        q=q,
        k=k,
        v=v,
    )


def _recompute_plan(rank_plan: RankPlan) -> RankPlan:
    """Return the plan with a kernel that computes only rows that the attention store lacks."""
    assert isinstance(rank_plan.kernel, SelectedKernel)
    partial = rank_plan.chunks[0].recompute
    assert partial is not None
    return replace(rank_plan, kernel=rank_plan.kernel.of_rows(partial.missing))


def selected_setting(
    selection: object, plan: Plan | None, groups: Groups | None, algorithm: str | None
) -> SparseSetting:
    """Return groups, options and attention store of a call that has a selection.

    Without a plan, the options have the layouts and the mask of the selection.
    """
    at = setting(plan, groups, None, None, algorithm)
    if plan is None and isinstance(selection, Selection):
        options = replace(
            at.options, layout=selection.layout, key_layout=selection.key_layout,
            mask=selection.mask,
        )  # fmt: skip
        return replace(at, options=options)
    return at


def _needs_grad(tensor: object) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.requires_grad


@dataclass(frozen=True, kw_only=True)
class SparseAttentionOperation(SelectedOperation):
    """One call of `mb.sparse_attention` on one rank, with its arguments as fields."""

    q: Any
    k: Any
    v: Any
    selection: Any
    kernel: str
    value_width: int | None

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        q, k, v, columns = self.q, self.k, self.v, self.value_width
        check_selection(self.selection)
        check_shapes(q, k, k if v is None else v, self.selection.key_layout is not None)
        _check_width(columns, v is None, k.shape[-1])
        if v is None and columns is not None:
            q, k, v = q[..., columns:], k[..., columns:], k[..., :columns]
        return q, k, v

    def adapted(self, request: Request) -> Request:
        kernel = kernel_name(self.kernel, *request.tensors)
        return over_selection(request, self.selection, kernel, latent=self.value_width is not None)


def check_selection(selection: object) -> None:
    """Raise ValueError unless `selection` is an `mb.Selection`."""
    if not isinstance(selection, Selection):
        raise ValueError(f"selection must be an mb.Selection, got {selection!r:.100}")


def _check_width(value_width: int | None, latent: bool, width: int) -> None:
    if not latent:
        if value_width is not None:
            raise ValueError(
                f"value_width requires v=None, got value_width={value_width!r} and v; remove one"
            )
    elif value_width is not None and (type(value_width) is not int or not 0 < value_width < width):
        raise ValueError(
            f"value_width: with v=None it must be None or a number of columns of k below its width "
            f"{width}, got {value_width!r}"
        )


def over_selection(request: Request, selection: Selection, kernel: str, latent: bool) -> Request:
    """Add the kernel of a call that has a selection to the checked arguments of the ring.

    Also add the selection's shape and the kernel's name to `facts`, the values that must be equal
    on all ranks.

    Args:
        request: Checked arguments of the ring.
        selection: Selection of the call.
        kernel: Name of the kernel, a key of `KERNELS`.
        latent: True if values are columns of the keys.

    Returns:
        A changed copy of `request`.

    Raises:
        ValueError: The selection and the request have different layouts or masks, or the selection
            does not fit the tensors.
    """
    q, k, _ = request.tensors
    for name in ("layout", "key_layout", "mask"):
        made_for, requested = getattr(selection, name), getattr(request, name)
        if made_for != requested:
            raise ValueError(
                f"selection: made for {name} {made_for!r:.200}, but this call has "
                f"{requested!r:.200}; select and attend with the same plan"
            )
    selection.check(q, k.shape[2], request.key_len)
    ids, block = selection.ids.shape, selection.block
    pairs = PairKernel(KERNELS[kernel], None, ids[2], ids[3], ids[3] * block, latent)
    pairs.name = f"sparse {kernel}"  # name in the plan's description
    facts = {"selection": (ids, block), "sparse kernel": kernel, "latent": latent}
    return replace(request, kernel=pairs, facts=request.facts | facts)


def kernel_for(plan: Plan, selection: Selection) -> SelectedKernel:
    """Return the kernel for this selection, which replaces the placeholder in the plan."""
    pairs = plan.kernel
    assert isinstance(pairs, PairKernel)
    return pairs.by(selection, pairs.latent)
