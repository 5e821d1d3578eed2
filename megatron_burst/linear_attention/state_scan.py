# SPDX-License-Identifier: Apache-2.0
"""Public operation `state_scan`: the state that enters each piece, for the pieces of every rank.

A piece is a run of consecutive positions of one document on one rank. The operation makes a plan
if none is given, and runs the scan as an autograd function.

Shape letters: p pieces of this rank, b batch, h heads, d rows (keys), w columns (values).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..comm.groups import Groups, check_groups
from ..comm.operation import prepared
from ..kernels.autograd import outside_graphs, refuse_transforms
from ..kernels.online_softmax import accumulation_dtype
from ..layout.layouts import integer
from .maps import LETTERS, shape_of
from .plan import ChainOperation, LinearPlan
from .program import States, chains_of
from .request import (
    ChainRequest,
    Options,
    check_device,
    check_final,
    check_initial,
    check_tensor,
    check_together,
    check_tree,
    request_of,
    sequence_of,
)
from .scan import StateScan
from .tree_scan import along_tree


@outside_graphs
def state_scan(
    decay: Any,
    increment: Any,
    *,
    groups: Groups | None = None,
    layout: Any = None,
    seq_len: int | None = None,
    cu_seqlens: Any = None,
    tree: Any = None,
    initial_state: Any = None,
    return_final_state: bool = False,
    algorithm: str | None = None,
    rates: Any = None,
    plan: LinearPlan | None = None,
    label: object = None,
) -> Any:
    """Return the state that enters each piece of this rank.

    Each piece maps a state S to decay S + increment. A piece is a run of rows of one rank with
    consecutive positions of one document (see `mb.layout.chains`).

    Gradients are computed for the sum of the losses of all ranks. The rank with the first piece of
    a document has the complete gradient of its initial_state, and the other ranks have zero. The
    result cannot be differentiated twice. Either all ranks run backward, or none does.

    Args:
        decay: Decays of this rank's pieces, in the order of the rank's rows: a factor per state [p,
            b, h], a factor per row of the state [p, b, h, d], a matrix [p, b, h, d, d], or None for
            no decay.
        increment: Increments of this rank's pieces [p, b, h, d, w].
        groups: Groups of the ranks, if no plan is given.
        layout: Positions of each rank: a name (default "zigzag") or a layout of `mb.layout.make`,
            but not striped.
        seq_len: Number of positions over all ranks.
        cu_seqlens: Cumulative lengths of the documents, or None for one document.
        tree: Prefix tree instead of cu_seqlens. A segment begins with the state after the segment
            that it continues. Trees require algorithm "all_gather" or "auto", without initial and
            final states.
        initial_state: States before the documents [documents, b, h, d, w], the same on all ranks;
            None for zero.
        return_final_state: Also return the states after all documents.
        algorithm: "all_gather" (LASP-2, arXiv 2502.07563), "scan" (All-Scan of ZeCO, arXiv
            2507.01004), "two_level", "ring" (LASP, arXiv 2404.02882), or "auto" (default), the
            algorithm with the shortest predicted time at `rates`.
        rates: `mb.Rates` for "auto"; None means nominal rates.
        plan: Plan of `mb.prepare_linear`, in place of groups, layout, seq_len, cu_seqlens, tree,
            algorithm and rates. Without a plan, each call makes a plan, for which all ranks
            exchange messages between their CPUs. With a plan, initial_state and return_final_state
            must be the same on all ranks.
        label: Same as in `mb.attention`.

    Returns:
        The entering states [p, b, h, d, w] in float32 (float64 for float64). The entering state of
        a piece that begins a document is the initial state of the document, or zero. If
        `return_final_state` is True: the entering states and the states after all documents
        [documents, b, h, d, w], which are the same on all ranks.

    Raises:
        ValueError: An argument is not supported.
        RuntimeError: A rank died or is out of step. The message names the exchange.
    """
    refuse_transforms("mb.state_scan")
    keywords = {"groups": groups, "layout": layout, "seq_len": seq_len, "cu_seqlens": cu_seqlens,
                "tree": tree, "algorithm": algorithm, "rates": rates}  # fmt: skip
    if plan is None:
        options = Options.of(layout, cu_seqlens, algorithm, rates, tree)
        check_groups(groups)
        assert groups is not None
        operation = StateScanOperation(
            groups=groups, options=options, label=label, decay=decay, increment=increment,
            initial_state=initial_state, seq_len=seq_len, return_final_state=return_final_state,
        )  # fmt: skip
        plan = prepared(operation)
    else:
        check_alone(plan, keywords)
        check_forward(plan, "mb.state_scan")
        check_final(return_final_state)
    _check_states(plan, decay, increment)
    entering, final = scanned(plan, decay, increment, initial_state, return_final_state, label)
    return (entering, final) if return_final_state else entering


@dataclass(frozen=True, kw_only=True)
class StateScanOperation(ChainOperation):
    """Call of `state_scan` on one rank, with its arguments."""

    decay: Any
    increment: Any
    initial_state: Any
    seq_len: int | None
    return_final_state: bool

    def request(self) -> ChainRequest:
        decay, increment, groups = self.decay, self.increment, self.groups
        length = integer("seq_len", self.seq_len)
        sequence = sequence_of(groups, self.options, length)
        pieces = len(chains_of(groups, sequence).of(groups.rank))
        check_tensor("increment", increment, {"p, b, h, d, w": (pieces, *(None,) * 4)})
        _, batch, heads, width, columns = increment.shape
        check_device(groups, "increment", increment)
        kind = "none"
        if decay is not None:
            of_one = {k: shape_of(k, batch, (heads, width, columns)) or () for k in LETTERS}
            check_tensor("decay", decay, {LETTERS[k]: (pieces, *of_one[k]) for k in LETTERS})
            kind = list(LETTERS)[decay.dim() - 3]
            check_together({"increment": increment, "decay": decay}, dtype=False)
        states = States(batch, (heads, width, columns), kind, accumulation_dtype(increment.dtype))
        named = {"decay": decay, "increment": increment, "initial_state": self.initial_state}
        final = self.return_final_state
        return request_of(groups, sequence, named, states, None, self.options, {}, final)


def scanned(
    plan: LinearPlan,
    decay: torch.Tensor | None,
    increment: torch.Tensor,
    initial: Any,
    leaving: bool,
    label: object,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the entering states, and the final states or None.

    Args:
        plan: Plan of the call.
        decay: Decays of this rank's pieces.
        increment: Increments of this rank's pieces.
        initial: Initial states, or None.
        leaving: True if final states are needed.
        label: Label of the call.
    """
    plan.groups.check()
    check_tree(plan.sequence, plan.algorithm, initial, leaving)
    if plan.job is not None:
        check_initial(initial, plan.chains.documents, plan.job.finals.shape, plan.device)
    if plan.sequence.tree is not None:
        return along_tree(plan, decay, increment, label), None
    call = plan.begin(label, initial is not None, leaving)
    results: Any = StateScan.apply(call, decay, increment, initial)
    return results if leaving else (results, None)


def check_alone(plan: object, keywords: dict[str, object]) -> None:
    """Raise ValueError unless `plan` is a `LinearPlan` and all `keywords` are None."""
    if not isinstance(plan, LinearPlan):
        raise ValueError(f"plan must be made by mb.prepare_linear, got {plan!r:.100}")
    present = sorted(name for name, value in keywords.items() if value is not None)
    if present:
        raise ValueError(
            f"plan cannot be combined with {present}; pass a plan, or the keywords that make one"
        )


def check_forward(plan: LinearPlan, operation: str) -> None:
    """Raise ValueError if `plan` was made with `reverse`, which `operation` does not support."""
    if plan.sequence.reverse:
        raise ValueError(
            f"plan was made with reverse={plan.sequence.reverse!r}, but {operation} computes only "
            "the forward direction; make a plan without reverse"
        )


def _check_states(plan: LinearPlan, decay: Any, increment: Any) -> None:
    """Raise ValueError unless the plan was made for maps of these shapes and this precision."""
    states, pieces = plan.states, len(plan.chains.of(plan.groups.rank))
    if states is None:
        raise ValueError(
            "plan was made for a convolution and sends no states; make a plan with "
            "mb.prepare_linear"
        )
    batch, sizes = states.batch, states.sizes
    check_tensor("increment", increment, {"p, b, h, d, w": (pieces, batch, *sizes)})
    if accumulation_dtype(increment.dtype) != states.dtype:
        raise ValueError(
            f"increment: the plan has states in {states.dtype}, which {increment.dtype} does not "
            "fit; call mb.prepare_linear for tensors of this dtype"
        )
    if increment.device != plan.device:
        raise ValueError(
            f"increment must be on {plan.device}, the device of the plan, got {increment.device}"
        )
    shape = shape_of(states.form, batch, sizes)
    if shape is not None:
        check_tensor("decay", decay, {LETTERS[states.form]: (pieces, *shape)})
        check_together({"increment": increment, "decay": decay}, dtype=False)
    elif decay is not None:
        raise ValueError(
            "decay must be None: the plan was made for maps without decay; got a "
            f"{type(decay).__name__}"
        )
