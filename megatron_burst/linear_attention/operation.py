# SPDX-License-Identifier: Apache-2.0
"""Public operation `linear_attention` over a sequence that is split over ranks.

A piece is a run of consecutive positions of one document on one rank. A kernel first reduces each
piece to a map: the effect of the piece on the state. The scan then passes states from piece to
piece, and the kernel computes the outputs from the entering states. `request` checks the arguments.

Shape letters: s local rows, b batch, g query/key heads, h value heads, d width of keys, w width of
values.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from ..comm.groups import Groups, check_groups
from ..comm.operation import prepared
from ..kernels.autograd import outside_graphs, refuse_transforms
from .kernels import registry
from .kernels.base import LinearInputs, Maps
from .plan import INPUTS, LinearAttentionOperation, LinearPlan
from .program import Reverse
from .request import Options, check_final, default, spread
from .scan import scan_before
from .state_scan import check_alone, scanned


@outside_graphs
def linear_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    decay: Any = None,
    beta: Any = None,
    form: str | None = None,
    cu_seqlens: Any = None,
    initial_state: Any = None,
    return_final_state: bool = False,
    scale: float | None = None,
    algorithm: str | None = None,
    kernel: str | None = None,
    groups: Groups | None = None,
    layout: Any = None,
    tree: Any = None,
    reverse: bool | Literal["both"] | None = None,
    reverse_decay: Any = None,
    reverse_beta: Any = None,
    rates: Any = None,
    plan: LinearPlan | None = None,
    label: object = None,
) -> Any:
    """Compute linear attention over a sequence that is split over ranks.

    A state S [d, w] per batch entry and value head changes with every token t of a document, in
    order: S_t = D_t S_{t-1} + k_t v_t^T, or with beta S_t = D_t S_{t-1} + beta_t k_t (v_t - (D_t
    S_{t-1})^T k_t)^T (the delta rule). Here D_t = exp(decay_t). The output is out_t = scale * S_t^T
    q_t.

    With `reverse`, the recurrence runs from the last token of a document to its first token: S_t is
    computed from S_{t+1}. With reverse="both" (ViG, arXiv 2405.18425), out_t = scale * ((F_t + R_t)
    / 2)^T q_t, with the state F_t of the forward recurrence and the state R_t of the reverse
    recurrence. Token t writes its key and value into both F_t and R_t. Therefore, without beta,
    out_t contains k_t v_t^T with weight 1, and the pairs of other tokens with weight 1/2 times
    their decay.

    States and their gradients are sent and summed in float32 (float64 for float64). Gradients are
    computed for the sum of the losses of all ranks. The rank with the first row of a document has
    the complete gradient of its initial_state; with reverse, the rank with the last row. Other
    ranks have zero. The result cannot be differentiated twice. Either all ranks run backward, or
    none does.

    Args:
        q: Queries of this rank's shard [s, b, g, d].
        k: Keys of this rank's shard [s, b, g, d].
        v: Values of this rank's shard [s, b, h, w]; g divides h.
        decay: Logarithms of the decay: [s, b, h] (retention, Mamba-2), [s, b, h, d] (gated linear
            attention, KDA), [h] for a constant (lightning attention), or None. Positive logarithms
            make states grow; on the CPU they cause a warning.
        beta: Write strengths [s, b, h] of delta rules, or None.
        form: "linear", "scalar_decay", "vector_decay", "delta_rule", "gated_delta_rule", "kda", or
            "auto" (default), which selects the form by decay and beta.
        cu_seqlens: Cumulative lengths of the documents, or None for one document.
        initial_state: States before the documents [documents, b, h, d, w], the same on all ranks;
            None for zero. In reverse, a document starts with this state at its last token. For
            reverse="both", [2 documents, b, h, d, w]: the states of the forward recurrence, then
            the states of the reverse recurrence.
        return_final_state: Also return the states after all documents. In reverse, these are the
            states at the first tokens.
        scale: Factor of the outputs, default d ** -0.5.
        algorithm: Algorithm that passes states between ranks; same as in `mb.state_scan`.
        kernel: "auto", "torch" (chunks, with torch operators), "reference" (the recurrence), or a
            kernel of an installed package: "fla" or "mamba_ssm".
        groups: Groups of the ranks, if no plan is given.
        layout: Positions of each rank: a name (default "zigzag") or a layout of `mb.layout.make`,
            but not striped.
        tree: Prefix tree instead of cu_seqlens: a result of `mb.trees.pack` or a `masks.Tree`. A
            row continues the previous row on its path. Initial and final states are not supported.
            Rows of padding are separate documents. With reverse, no segment may continue another
            segment; each segment is then a document, with initial and final states.
        reverse: False (default), True for the reverse recurrence, or "both" for the mean of the
            forward and the reverse recurrence in one scan. True keeps a copy of q, k, v, decay and
            beta until backward; "both" keeps two copies.
        reverse_decay: For reverse="both": decay of the reverse recurrence in the shape of decay;
            None for the same decay.
        reverse_beta: For reverse="both": write strengths of the reverse recurrence; None for the
            same write strengths.
        rates: Rates for algorithm "auto"; same as in `mb.state_scan`.
        plan: Plan of `mb.prepare_linear` for these tensors, in place of groups and all keywords
            that are not tensors, except return_final_state and label. Without a plan, each call
            makes a plan, for which all ranks exchange messages between their CPUs. With a plan,
            initial_state and return_final_state must be the same on all ranks.
        label: Same as in `mb.attention`.

    Returns:
        The output [s, b, h, w] in the dtype of v. If `return_final_state` is True: the output and
        the states after all documents [documents, b, h, d, w], which are the same on all ranks.
        With reverse="both", the states are [2 documents, b, h, d, w], in the order of
        initial_state.

    Raises:
        ValueError: An argument is not supported.
        RuntimeError: A rank died or is out of step. The message names the exchange.
    """
    refuse_transforms("mb.linear_attention")
    keywords = {"groups": groups, "layout": layout, "form": form, "cu_seqlens": cu_seqlens,
             "tree": tree, "scale": scale, "algorithm": algorithm, "kernel": kernel,
             "reverse": reverse, "rates": rates}  # fmt: skip
    tensors = {
        "q": q, "k": k, "v": v, "decay": decay, "beta": beta, "reverse_decay": reverse_decay,
        "reverse_beta": reverse_beta,
    }  # fmt: skip
    if plan is None:
        options = Options.of(layout, cu_seqlens, algorithm, rates, tree, reverse)
        check_groups(groups)
        assert groups is not None
        operation = LinearAttentionOperation(
            groups=groups, options=options, label=label,
            tensors=tensors | {"initial_state": initial_state}, form=default(form, "auto"),
            kernel=default(kernel, "auto"), scale=scale, return_final_state=return_final_state,
        )  # fmt: skip
        plan = prepared(operation)
    else:
        check_alone(plan, keywords)
        check_final(return_final_state)
        if plan.local is None:
            raise ValueError(
                "plan was made without q, k and v; make a plan with mb.prepare_linear(q, k, v)"
            )
        plan.check(tensors)
    out, final = _run(plan, tensors, initial_state, return_final_state, label)
    return (out, final) if return_final_state else out


def _run(
    plan: LinearPlan, tensors: dict[str, Any], initial: Any, final: bool, label: object
) -> tuple[Any, Any]:
    """Return the output, and the final states or None."""
    local = plan.local
    assert local is not None
    reverse = plan.sequence.reverse
    inputs = _in_scan_order(reverse, tensors, local.scale)
    run = registry.run(local.form, local.kernel, inputs, plan.cut(final))
    maps: Maps = run.maps
    # In backward every rank must take part in the scan before its inputs get their gradients. This
    # also holds for a rank whose pieces all end documents. Nothing uses the final states of these
    # pieces, so their maps are constant zeros.
    increment = scan_before(maps.increment, *(t for t in tensors.values() if t is not None))
    entering, finals = scanned(plan, maps.transition, increment, initial, final, label)
    return _in_row_order(reverse, run.outputs(entering)), finals


def _in_scan_order(reverse: Reverse, tensors: dict[str, Any], scale: float) -> LinearInputs:
    """Return the inputs with rows in the order of the recurrence.

    With reverse="both", the result has 2 s rows: the rows in their order, then the reversed rows.
    The scale is halved.
    """
    v = tensors["v"]
    inputs: dict[str, Any] = {name: tensors[name] for name in INPUTS[:5]}
    inputs["decay"] = spread(inputs["decay"], v)
    if reverse == "both":
        gates = {"decay": spread(tensors["reverse_decay"], v), "beta": tensors["reverse_beta"]}
        backward = inputs | {name: gate for name, gate in gates.items() if gate is not None}
        inputs = {
            name: None if t is None else torch.cat([t, backward[name].flip(0)])
            for name, t in inputs.items()
        }
        scale = scale / 2
    elif reverse:
        inputs = {name: None if t is None else t.flip(0) for name, t in inputs.items()}
    return LinearInputs(**inputs, scale=scale)


def _in_row_order(reverse: Reverse, out: torch.Tensor) -> torch.Tensor:
    """Convert outputs in the order of the recurrence to the outputs [s, b, h, w] of the rows."""
    if reverse == "both":
        forward, backward = out.chunk(2)
        return forward + backward.flip(0)
    return out.flip(0) if reverse else out
