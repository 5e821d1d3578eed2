# SPDX-License-Identifier: Apache-2.0
"""Changes that make a run fit which does not fit.

A change costs no GPU and little time, or it takes more GPUs. Single changes are tried first, then
several together. The groups of more GPUs come from `search_space.groups_of`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from .....autotune.clusters import Cluster
from .....units import byte_size
from ..account.memory import Account, account, fit, least_bytes
from ..account.rings import remembering
from ..settings import Settings, flag_of
from ..shapes.model import Model
from .search_space import TrainingGoal, groups_of

MOST = 3  # changes that are named
DOUBLINGS = 6  # of the number of GPUs
TRIED = 12  # groups of a number of GPUs, those with the fewest changes
BUSY = 64  # micro-batches for each GPU, which all numbers of data-parallel ranks divide
IMPLIED = ("cp", "intra")  # fields that follow from the others
LARGEST = 1024  # context-parallel ranks; schedules of more ranks take minutes
Held = Callable[[Settings], Account]  # returns the account of a run


class Remedy(NamedTuple):
    """A change of a run.

    Attributes:
        run: The run after the change.
        fields: The fields that the user has to change, with their values.
        gpus: Number of GPUs if the change needs more.
    """

    run: Settings
    fields: dict[str, Any]
    gpus: int | None = None

    @property
    def said(self) -> str:
        """The flags to add, and the number of GPUs."""
        flags = " ".join(map(flag_said, self.fields, self.fields.values()))
        if not self.gpus:
            return flags
        return f"with {self.gpus} GPUs and {flags}" if flags else f"with {self.gpus} GPUs"


def flag_said(name: str, value: Any) -> str:
    """Return a field of `Settings` as its flag with a value; None: without it."""
    if value is True:
        return flag_of(name)
    if value is None:
        return f"without {flag_of(name)}"
    return f"{flag_of(name)} {value:g}" if isinstance(value, float) else f"{flag_of(name)} {value}"


def changes(
    model: Model, cluster: Cluster, run: Settings, held: Held | None = None
) -> list[Remedy]:
    """Return changes, each of which makes a run fit, the cheapest first.

    Args:
        model: The model.
        cluster: The cluster that the run does not fit.
        run: The run.
        held: Returns the account of a run of packed documents; None: sequences.
    """
    steps = list(_steps(run, chunks=held is None and run.cp > 1))
    held = held or partial(account, model, every=False, core_of=remembering())
    alone = [Remedy(replace(run, **step), step) for step in steps]
    found = [change for change in alone if _fits(cluster, change.run, held)]
    together = list(_together(run, steps))
    if not found:
        found = [each for each in together if _fits(cluster, each.run, held)][:1]
    if len(found) < MOST:
        beside = [run] if found else [run, *(each.run for each in together[-1:])]
        more = _more_gpus(model, cluster, run, beside, held)
        found += [more] if more is not None else []
    return found[:MOST]


def does_not_fit(found: Account, cluster: Cluster, held: Held | None = None) -> str:
    """Return the error of a run that does not fit: what it takes, what there is, what would fit."""
    left, run = fit(found, cluster), found.run
    if left.device < 0:
        groups = f"TP {run.tp}" + f" x PP {run.pp}" * (run.pp > 1)
        states = byte_size(sum(found.states.values()))
        what = (
            f"a GPU needs {byte_size(found.peak.bytes)} at {groups}, {states} of it for states, "
            f"and has {byte_size(cluster.room)}"
        )
    else:
        what = (
            f"a GPU needs {byte_size(found.host_bytes)} of host memory, and has "
            f"{byte_size(cluster.host_per_rank)}"
        )
    helps = [change.said for change in changes(found.model, cluster, run, held)]
    if helps:
        helps[0] = ("it fits " if helps[0].startswith("with ") else "add ") + helps[0]
    else:
        helps = ["take a shorter sequence, or many more GPUs"]
    return f"does not fit: {what}; {', or '.join(helps)}"


def _steps(run: Settings, chunks: bool) -> Iterator[dict[str, Any]]:
    """Yield changes that cost no GPU, the cheapest first. chunks: attention can be cut into chunks
    of rows.
    """
    pieces = {"sequence_chunks": 32, "mlp_tiles": 64} if chunks else {"mlp_tiles": 64}
    for step in (
        {"lm_head_loss": "single_pass"} if run.lm_head_loss == "off" else {},
        {"distributed_optimizer": True},
        {"recompute": "full"},
        {"offload": 1.0},
        {} if run.chunked else pieces,
        {"store": 0.0},
        {"optimizer_offload": 1.0},
    ):
        changed = {name: value for name, value in step.items() if getattr(run, name) != value}
        if changed:
            yield changed


def _together(run: Settings, steps: list[dict[str, Any]]) -> Iterator[Remedy]:
    """Yield more and more of the steps together."""
    fields: dict[str, Any] = {}
    for step in steps:
        fields = fields | step
        yield Remedy(replace(run, **fields), fields)


def _more_gpus(
    model: Model, cluster: Cluster, run: Settings, beside: list[Settings], held: Held
) -> Remedy | None:
    """Return the fewest GPUs on which the run fits, in other groups. beside: the run, and the run
    with all that costs little.
    """
    pinned = {"micro_batch": run.micro_batch, "vpp": run.vpp}
    for doubling in range(DOUBLINGS + 1):
        larger = replace(cluster, gpus=cluster.gpus << doubling)
        goal = TrainingGoal(run.seq, BUSY * larger.gpus * run.micro_batch, pinned)
        found = [each for each in groups_of(model, larger, goal)
                 if each.tp >= run.tp and each.pp >= run.pp
                 and each.cp <= max(LARGEST, run.cp)]  # fmt: skip
        for options in beside:
            tried = {each: least_bytes(model, each)
                     for each in (_regrouped(options, groups) for groups in found)}  # fmt: skip
            possible = [each for each, least in tried.items() if least <= larger.room]
            possible.sort(key=lambda each: (len(_changed(run, each)), tried[each]))
            for after in possible[:TRIED]:
                if _fits(larger, after, held):
                    return Remedy(after, _changed(run, after), larger.gpus if doubling else None)
    return None


def _regrouped(run: Settings, groups: Settings) -> Settings:
    """Return a run in other groups."""
    names = ("tp", "pp", "first_layers", "last_layers", "ep", "cp", "dp", "intra")
    return replace(run, **{name: getattr(groups, name) for name in names})


def _changed(run: Settings, after: Settings) -> dict[str, Any]:
    both = ((name, getattr(after, name)) for name in vars(run) if name not in IMPLIED)
    return {name: value for name, value in both if value != getattr(run, name)}


def _fits(cluster: Cluster, run: Settings, held: Held) -> bool:
    try:
        return fit(held(run), cluster).fits
    except ValueError:  # sizes that do not divide each other
        return False
