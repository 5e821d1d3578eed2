# SPDX-License-Identifier: Apache-2.0
"""The public operation: linear attention over a sequence that is split over ranks.

Finds or makes the plan of a call; a kernel sums up each piece, the scan carries states from piece
to piece, and the kernel makes outputs of the states that enter. What is refused is `request`'s.

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
from .scan import following
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
    """Causal linear attention over a sequence that is split over ranks.

    A state S [d, w] per batch and value head takes every token t of a document, in order:
    S_t = D_t S_{t-1} + k_t v_t^T or, with beta, S_t = D_t S_{t-1} + beta_t k_t (v_t -
    (D_t S_{t-1})^T k_t)^T (the delta rule), with D_t = exp(decay_t); out_t = scale * S_t^T q_t.

    q, k [s, b, g, d]; v [s, b, h, w]: this rank's shard, s rows of the positions that `layout`
    gives it; g divides h. decay: logarithms, [s, b, h] (retention, Mamba-2), [s, b, h, d]
    (gated linear attention, KDA), [h] for a constant (lightning attention), or None; positive
    ones, which make states grow, are warned of on the CPU. beta [s, b, h] or None. Returns out
    [s, b, h, w] in the dtype of v; with return_final_state also the states after all documents,
    [documents, b, h, d, w], the same on all ranks. initial_state: those before them, as many,
    the same on all ranks; zero if None.

    form: "auto" (the default: what decay and beta say), "linear", "scalar_decay", "vector_decay",
    "delta_rule", "gated_delta_rule" or "kda". scale: default d ** -0.5. cu_seqlens: cumulative
    lengths of documents. layout: a name (default "zigzag") or one that `mb.layout.make` made, but
    striped. tree: in place of cu_seqlens, a prefix tree (what `mb.trees.pack` returns, or a
    `masks.Tree`): a row continues the row before it on its path, without initial and final states;
    rows of padding are documents of their own. algorithm, rates: which carries states between
    ranks, as of `mb.state_scan`. kernel: "auto", "torch" (chunks, in torch's operators),
    "reference" (the recurrence), or that of an installed package. plan: made by
    `mb.prepare_linear`, in place of these and groups; without one the call is a collective of the
    host too. With one, initial_state and return_final_state must be the same on all ranks. label:
    as of `mb.attention`.

    States and their gradients travel and add up in float32 (float64 for float64). The loss is the
    sum of the ranks' losses: the gradient of initial_state is whole on the rank with a document's
    first row, and zero on others. Cannot be differentiated twice, and either all ranks run its
    backward or none. Raises ValueError for unsupported arguments, RuntimeError naming the exchange
    if a peer died or is out of step.
    """
    refuse_transforms("mb.linear_attention")
    given = {"groups": groups, "layout": layout, "form": form, "cu_seqlens": cu_seqlens,
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
        check_alone(plan, given)
        check_final(return_final_state)
        if plan.local is None:
            raise ValueError("plan: made for mb.state_scan or mb.short_convolution alone")
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
    # In backward every rank takes part in the scan, and before its inputs get their gradients: also
    # one whose pieces all end documents, so that none of its maps is anything but a constant.
    increment = following(maps.increment, *(t for t in tensors.values() if t is not None))
    entering, finals = scanned(plan, maps.transition, increment, initial, final, label)
    return run.outputs(entering), finals
