# SPDX-License-Identifier: Apache-2.0
"""Public operation `linear_attention` over a sequence that is split over ranks.

A kernel reduces each piece to a map of states, the scan carries states from piece to piece, and the
kernel computes the outputs from the entering states. `request` checks the arguments.

Shape letters: s local rows, b batch, g query/key heads, h value heads, d width of keys, w width of
values.
"""

from __future__ import annotations

from typing import Any

from ..comm.groups import Groups, check_groups
from ..comm.operation import prepared
from ..kernels.autograd import outside_graphs, refuse_transforms
from .kernels import registry
from .kernels.base import LinearInputs, Maps
from .plan import LinearAttentionOperation, LinearPlan
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
    rates: Any = None,
    plan: LinearPlan | None = None,
    label: object = None,
) -> Any:
    """Compute causal linear attention over a sequence that is split over ranks.

    A state S [d, w] per batch entry and value head changes with every token t of a document, in
    order: S_t = D_t S_{t-1} + k_t v_t^T, or with beta S_t = D_t S_{t-1} + beta_t k_t (v_t - (D_t
    S_{t-1})^T k_t)^T (the delta rule). Here D_t = exp(decay_t). The output is out_t = scale * S_t^T
    q_t.

    States and their gradients are sent and summed in float32 (float64 for float64). Gradients are
    those of the sum of all ranks' losses. The rank with the first row of a document has the
    complete gradient of its initial_state, and the other ranks have zero. The result cannot be
    differentiated twice. Either all ranks run backward, or none does.

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
            None for zero.
        return_final_state: Also return the states after all documents.
        scale: Factor of the outputs, default d ** -0.5.
        algorithm: Algorithm that carries states between ranks, as for `mb.state_scan`.
        kernel: "auto", "torch" (chunks, with torch operators), "reference" (the recurrence), or the
            name of an installed package's kernel.
        groups: Groups of the ranks, if no plan is given.
        layout: Positions of each rank: a name (default "zigzag") or a layout of `mb.layout.make`,
            but not striped.
        tree: Prefix tree instead of cu_seqlens: a result of `mb.trees.pack` or a `masks.Tree`. A
            row continues the previous row on its path. Initial and final states are not supported.
            Rows of padding are separate documents.
        rates: Rates for algorithm "auto", as for `mb.state_scan`.
        plan: Plan of `mb.prepare_linear`, which replaces the other keywords and groups. Without a
            plan, each call makes a plan, for which all ranks exchange messages between their CPUs.
            With a plan, initial_state and return_final_state must be the same on all ranks.
        label: Same as in `mb.attention`.

    Returns:
        The output [s, b, h, w] in the dtype of v. With `return_final_state` a pair of the output
        and the states after all documents [documents, b, h, d, w], the same on all ranks.

    Raises:
        ValueError: An argument is not supported.
        RuntimeError: A rank died or is out of step. The message names the exchange.
    """
    refuse_transforms("mb.linear_attention")
    keywords = {"groups": groups, "layout": layout, "form": form, "cu_seqlens": cu_seqlens,
             "tree": tree, "scale": scale, "algorithm": algorithm, "kernel": kernel,
             "rates": rates}  # fmt: skip
    tensors = {"q": q, "k": k, "v": v, "decay": decay, "beta": beta}
    if plan is None:
        options = Options.of(layout, cu_seqlens, algorithm, rates, tree)
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
    inputs = LinearInputs(
        tensors["q"], tensors["k"], tensors["v"], spread(tensors["decay"], tensors["v"]),
        tensors["beta"], local.scale,
    )  # fmt: skip
    run = registry.run(local.form, local.kernel, inputs, plan.cut(final))
    maps: Maps = run.maps
    # In backward every rank must take part in the scan before its inputs get their gradients. This
    # includes a rank whose pieces all end documents: nothing uses their final states, so their maps
    # are constant zeros.
    increment = scan_before(maps.increment, *(t for t in tensors.values() if t is not None))
    entering, finals = scanned(plan, maps.transition, increment, initial, final, label)
    return run.outputs(entering), finals
