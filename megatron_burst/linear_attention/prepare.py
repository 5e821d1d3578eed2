"""From one rank's request to a plan that every rank agrees on, for operations on chains.

Makes the ranks agree, by one gather on the host, and resolves algorithm "auto". What is refused is
`request`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from ..comm import packing
from ..comm.calls import CALLS, check_label
from ..comm.consensus import Facts, agree, attempt, identity
from ..comm.groups import Groups, InProcessGroups
from ..comm.rows import GRID
from ..schedule.scans.blocks import Blocks, cut
from .executor import Scan
from .finals import Finals
from .function import ScanJob
from .plan import InProcessLinearPlan, LinearPlan
from .program import longest_message
from .request import Options, Request, default, of_attention
from .tables import Directions, chains_of, choice_of, directions


def prepare_linear(
    q: Any,
    k: Any,
    v: Any,
    *,
    decay: Any = None,
    beta: Any = None,
    form: str | None = None,
    cu_seqlens: Any = None,
    scale: float | None = None,
    algorithm: str | None = None,
    kernel: str | None = None,
    groups: Groups | InProcessGroups | None,
    layout: Any = None,
    rates: Any = None,
) -> LinearPlan:
    """Check the arguments of `linear_attention`, on all ranks alike, and resolve every "auto".

    The plan serves `mb.linear_attention` on tensors like these, and on the same rows, documents and
    layout `mb.short_convolution` and, with states of the same shapes, `mb.state_scan`. With
    `Groups.in_process` it is that of all ranks. Collective: every rank of `groups` must call it
    (one all-gather of 1.2 KB per rank on the host; the first makes a process group of all ranks).
    Make one per micro-batch and use it in every layer of the same shapes.

    q, k, v, decay, beta: as `linear_attention` takes them; only shapes, dtypes, device and
    `requires_grad` are read. form, cu_seqlens, scale, algorithm, kernel, layout, rates: as there.
    Raises the same ValueError on every rank.
    """
    options = Options.of(layout, cu_seqlens, algorithm, rates)
    asked = partial(of_attention, options=options, form=default(form, "auto"),
                    kernel=default(kernel, "auto"), scale=scale)  # fmt: skip
    named = {"q": q, "k": k, "v": v, "decay": shared(groups, decay), "beta": beta}
    return prepared(groups, named, lambda group, tensors: asked(group, tensors))


def prepared(
    groups: Any,
    named: dict[str, Any],
    request: Callable[[Groups, dict[str, Any]], Request],
    label: object = None,
) -> Any:
    """The plan of a request. named: the tensors of this rank by name or, in process, lists of one
    per rank; request: of one rank's tensors; label: of the call that it is made for."""
    if not isinstance(groups, (Groups, InProcessGroups)):
        raise ValueError(f"groups: make them with mb.Groups, got {groups!r:.100}")
    if isinstance(groups, InProcessGroups):
        shards = per_rank(groups, named)
        plans = groups.run(partial(_prepare, request, label), groups.ranks, shards)
        return InProcessLinearPlan(groups, plans)
    return _prepare(request, label, groups, named)


def per_rank(groups: InProcessGroups, named: dict[str, Any]) -> list[dict[str, Any]]:
    """The tensors of each rank by name, from a list of each; None is None for all."""
    lists = {}
    for name, given in named.items():
        if given is None:
            each = [None] * groups.size
        else:
            each = list(given) if isinstance(given, (list, tuple)) else [given]
        if len(each) != groups.size:
            listed = isinstance(given, (list, tuple))
            told = f"{len(each)} in a list" if listed else f"{given!r:.60}"
            raise ValueError(
                f"{name}: groups hold {groups.size} ranks in this process; give a list with a "
                f"tensor of each, got {told}"
            )
        lists[name] = each
    return [{name: each[rank] for name, each in lists.items()} for rank in range(groups.size)]


def shared(groups: Any, decay: Any) -> Any:
    """The decay of each rank in this process, where one [h] is that of all."""
    if isinstance(groups, InProcessGroups) and isinstance(decay, torch.Tensor) and decay.dim() == 1:
        return [decay] * groups.size
    return decay


def of_ranks(plan: Any, named: dict[str, Any]) -> tuple[list[LinearPlan], list[dict[str, Any]]]:
    """The plans, and the tensors by name, of each rank of this process."""
    if isinstance(plan, InProcessLinearPlan):
        return list(plan.ranks), per_rank(plan.groups, named)
    return [plan], [named]


def _prepare(
    request: Callable[[Groups, dict[str, Any]], Request],
    label: object,
    groups: Groups,
    tensors: dict[str, Any],
) -> LinearPlan:
    """One rank's plan. Every rank takes part in the comparison, whatever it found."""

    def make() -> tuple[Request, tuple[str, str, Blocks, Directions] | None, dict[str, Any]]:
        groups.check()
        check_label(label)
        found = request(groups, tensors)
        if found.states is None:
            return found, None, found.facts
        made = _tables(found, groups)
        name, _, blocks, both = made
        chosen = {"algorithm and blocks": (name, blocks.number), "digest of tables": both.digest}
        return found, made, found.facts | chosen

    made = attempt(make)
    so_far: Facts = {CALLS: groups.calls}
    agree(made if isinstance(made, ValueError) else made[2] | so_far, groups.gather)
    assert not isinstance(made, ValueError)
    found, tables, facts = made
    name, why, job = found.options.algorithm, "", None
    if tables is not None:
        name, why, _, both = tables
        job = _job(found, groups, both)
        groups.expect(_longest(found, job, both))
    groups.connect([GRID], found.device)
    return LinearPlan(
        groups, found.sequence, found.device, found.signature, found.states, found.local, name, why,
        job, identity(facts),
    )  # fmt: skip


def _tables(request: Request, groups: Groups) -> tuple[str, str, Blocks, Directions]:
    """Algorithm, why it was chosen, blocks, and the tables."""
    name, why, number = _chosen(request, groups)
    assert request.states is not None
    blocks = cut(number, *request.states.sizes, request.states.form == "matrix")
    return name, why, blocks, directions(groups, request.sequence, name, blocks)


def _job(request: Request, groups: Groups, both: Directions) -> ScanJob:
    states, device = request.states, request.device
    assert states is not None
    there, back = (
        Scan(groups, one, states, device, name)
        for one, name in zip(both.programs, ("forward", "backward"), strict=True)
    )
    chains = chains_of(groups, request.sequence)
    last = np.flatnonzero(chains.ends)
    holder = dict(zip(chains.document[last].tolist(), chains.rank[last].tolist(), strict=True))
    holders = tuple(holder.get(document) for document in range(chains.documents))
    return ScanJob(groups, there, back, Finals(groups, holders, states, device))


def _longest(request: Request, job: ScanJob, both: Directions) -> int:
    """Bytes of the longest message that any rank sends, envelope and alignment included."""
    assert request.states is not None
    blocks = job.forward.program.blocks
    found = [longest_message(hops, blocks, request.states) for hops in both.hops]
    found.append((job.finals.message, len(job.finals.holders)))
    return max(size + count * packing.ALIGNMENT for size, count in found) + packing.ENVELOPE


def _chosen(request: Request, groups: Groups) -> tuple[str, str, int]:
    """Algorithm, why, and number of blocks."""
    name, rates, states = request.options.algorithm, request.options.rates, request.states
    assert states is not None
    found = choice_of(groups, request.sequence, states.bytes, name, rates)
    if isinstance(found, int):
        return name, "", found
    at = "nominal rates" if rates is None else "given rates"
    return found.algorithm, f"auto: {found.describe()}; at {at}", found.blocks
