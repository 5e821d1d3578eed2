# SPDX-License-Identifier: Apache-2.0
"""The public operation: linear attention over a sequence that is split over ranks.

Finds or makes the plan of a call; a kernel sums up each piece, the scan carries states from piece
to piece, and the kernel makes outputs of the states that enter. What is refused is `request`'s.

Shape letters: s local rows, b batch, g query/key heads, h value heads, d width of keys, w width of
values.
"""

from __future__ import annotations

from typing import Any

from ..comm.groups import Groups, InProcessGroups, check_groups
from ..kernels.autograd import outside_graphs, refuse_transforms
from .kernels import registry
from .kernels.base import LinearInputs, Maps
from .plan import (
    InProcessLinearPlan,
    LinearAttentionOperation,
    LinearPlan,
    plan_ranks,
    shared,
)
from .request import Options, check_final, default, spread
from .scan import following
from .state_scan import check_alone, scanned, spread_initial


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
    groups: Groups | InProcessGroups | None = None,
    layout: Any = None,
    tree: Any = None,
    rates: Any = None,
    plan: LinearPlan | InProcessLinearPlan | None = None,
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
    the same on all ranks; zero if None. With `Groups.in_process` q, k, v, decay and beta are
    lists, one tensor per rank, and so are out and the final states.

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
    home = groups if plan is None else getattr(plan, "groups", None)
    named = {"q": q, "k": k, "v": v, "decay": shared(home, decay), "beta": beta}
    if plan is None:
        options = Options.of(layout, cu_seqlens, algorithm, rates, tree)
        check_groups(groups)
        assert groups is not None
        every = groups.per_rank(**named, initial_state=spread_initial(groups, initial_state))
        operations = [
            LinearAttentionOperation(
                groups=rank, options=options, label=label, tensors=tensors,
                form=default(form, "auto"), kernel=default(kernel, "auto"), scale=scale,
                return_final_state=return_final_state,
            )
            for rank, tensors in zip(groups.ranks, every, strict=True)
        ]  # fmt: skip
        plan = plan_ranks(groups, operations)
        assert plan is not None
        shards = plan.groups.per_rank(**named)
    else:
        check_alone(plan, given)
        check_final(return_final_state)
        shards = plan.groups.per_rank(**named)
        for one, shard in zip(plan.ranks, shards, strict=True):
            if one.local is None:
                raise ValueError("plan: made for mb.state_scan or mb.short_convolution alone")
            one.check(shard)
    outs, finals = _run(plan, shards, initial_state, return_final_state, label)
    if not plan.groups.together:
        outs, finals = outs[0], finals and finals[0]
    return (outs, finals) if return_final_state else outs


def _run(
    plan: LinearPlan | InProcessLinearPlan,
    shards: list[dict[str, Any]],
    initial: Any,
    final: bool,
    label: object,
) -> tuple[Any, Any]:
    """Outputs, and final states or None, of each rank of this process."""
    runs = []
    for one, given in zip(plan.ranks, shards, strict=True):
        local = one.local
        assert local is not None
        inputs = LinearInputs(
            given["q"], given["k"], given["v"], spread(given["decay"], given["v"]), given["beta"],
            local.scale,
        )  # fmt: skip
        runs.append(registry.run(local.form, local.kernel, inputs, one.cut(final)))
    maps: list[Maps] = [run.maps for run in runs]
    # In backward every rank takes part in the scan, and before its inputs get their gradients: also
    # one whose pieces all end documents, so that none of its maps is anything but a constant.
    states = [
        (each.transition, following(each.increment, *(t for t in given.values() if t is not None)))
        for each, given in zip(maps, shards, strict=True)
    ]
    entering, finals = scanned(plan, states, initial, final, label)
    return [run.outputs(state) for run, state in zip(runs, entering, strict=True)], finals
