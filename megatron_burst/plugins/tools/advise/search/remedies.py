# SPDX-License-Identifier: Apache-2.0
"""Changes of settings that make a run fit into memory, for error messages.

Changes on the same GPUs that cost little time are tried first: single changes, then several changes
together. Then more GPUs are tried, with parallel sizes from `search_space.groups_of`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from .....autotune.clusters import Cluster
from .....units import byte_size
from ..account.memory import Account, account, fit, least_bytes
from ..account.rings import cached_core_of
from ..settings import Settings, flag_of
from ..shapes.model import Model
from .search_space import TrainingGoal, groups_of

MOST = 3  # maximum number of changes in a message
DOUBLINGS = 6  # maximum number of times that the number of GPUs is doubled
TRIALS = 12  # choices of parallel sizes to try per number of GPUs, the fewest changes first
BUSY = 64  # micro-batches per GPU; the total is a multiple of all data-parallel sizes
IMPLIED = ("intra",)  # fields that follow from other fields
LARGEST = 1024  # context-parallel ranks; schedules of more ranks take minutes
AccountOf = Callable[[Settings], Account]  # from the settings of a run to its memory account


class Remedy(NamedTuple):
    """Change of settings that makes a run fit.

    Attributes:
        run: Settings after the change.
        fields: Name of a field of `Settings` that the user must change -> new value.
        gpus: Required number of GPUs; None if it does not change.
    """

    run: Settings
    fields: dict[str, Any]
    gpus: int | None = None

    @property
    def text(self) -> str:
        """Text with the flags to add, and the number of GPUs."""
        flags = " ".join(map(flag_text, self.fields, self.fields.values()))
        if not self.gpus:
            return flags
        return f"with {self.gpus} GPUs and {flags}" if flags else f"with {self.gpus} GPUs"


def flag_text(name: str, value: Any) -> str:
    """Return the flag that sets a field, such as "--tp 8"; "without --tp" if the value is None."""
    if value is True:
        return flag_of(name)
    if value is None:
        return f"without {flag_of(name)}"
    return f"{flag_of(name)} {value:g}" if isinstance(value, float) else f"{flag_of(name)} {value}"


def changes(
    model: Model, cluster: Cluster, run: Settings, account_of: AccountOf | None = None
) -> list[Remedy]:
    """Return up to `MOST` changes, the cheapest first. Each of them makes the run fit.

    Args:
        model: Shape of the model.
        cluster: Cluster whose memory the run exceeds.
        run: Settings of the run.
        account_of: Function that returns the memory account of a run with packed documents; None
            without packed documents.
    """
    steps = list(_steps(run, chunks=account_of is None and run.cp > 1))
    core_of = cached_core_of()

    def of_sequences(run: Settings) -> Account:
        return account(model, run, every=False, core_of=core_of)

    account_of = account_of or of_sequences
    alone = [Remedy(replace(run, **step), step) for step in steps]
    remedies = [change for change in alone if _fits(cluster, change.run, account_of)]
    together = list(_together(run, steps))
    if not remedies:
        remedies = [remedy for remedy in together if _fits(cluster, remedy.run, account_of)][:1]
    if len(remedies) < MOST:
        beside = [run] if remedies else [run, *(remedy.run for remedy in together[-1:])]
        larger = _more_gpus(model, cluster, run, beside, account_of)
        remedies += [larger] if larger is not None else []
    return remedies[:MOST]


def does_not_fit(
    rank_account: Account, cluster: Cluster, account_of: AccountOf | None = None
) -> str:
    """Return the error message for a run that does not fit.

    The message contains the required memory, the available memory, and changes that make the run
    fit.

    Args:
        rank_account: Memory account of the run.
        cluster: Cluster of GPUs.
        account_of: Function that returns the memory account of a run with packed documents; None
            without packed documents.
    """
    left, run = fit(rank_account, cluster), rank_account.run
    if left.device < 0:
        groups = f"TP {run.tp}" + f" x PP {run.pp}" * (run.pp > 1)
        states = byte_size(sum(rank_account.states.values()))
        need = (
            f"a GPU needs {byte_size(rank_account.peak.bytes)} with {groups} ({states} of it for "
            f"parameters, gradients and optimizer), but only {byte_size(cluster.room)} are "
            "available"
        )
    else:
        need = (
            f"each GPU needs {byte_size(rank_account.host_bytes)} of host memory, but only "
            f"{byte_size(cluster.host_per_rank)} per GPU are available"
        )
    texts = [change.text for change in changes(rank_account.model, cluster, run, account_of)]
    if texts:
        texts[0] = ("it fits " if texts[0].startswith("with ") else "add ") + texts[0]
    else:
        texts = ["use a shorter sequence or many more GPUs"]
    return f"does not fit: {need}; {', or '.join(texts)}"


def _steps(run: Settings, chunks: bool) -> Iterator[dict[str, Any]]:
    """Yield changes of settings that need no more GPUs, the cheapest first.

    With `chunks`, changes to row chunks are included.
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
    """Yield the first change of `steps`, then the first two together, and so on."""
    fields: dict[str, Any] = {}
    for step in steps:
        fields = fields | step
        yield Remedy(replace(run, **fields), fields)


def _more_gpus(
    model: Model, cluster: Cluster, run: Settings, beside: list[Settings], account_of: AccountOf
) -> Remedy | None:
    """Return the change of parallel sizes that fits on the fewest GPUs; None if none fits.

    Each choice of parallel sizes is combined with each run in `beside`: the run itself, and if
    nothing else fits, the run with all changes that cost little time.
    """
    pinned = {"micro_batch": run.micro_batch, "vpp": run.vpp}
    for doubling in range(DOUBLINGS + 1):
        larger = replace(cluster, gpus=cluster.gpus << doubling)
        goal = TrainingGoal(run.seq, BUSY * larger.gpus * run.micro_batch, pinned)
        ways = [candidate for candidate in groups_of(model, larger, goal)
                 if candidate.tp >= run.tp and candidate.pp >= run.pp
                 and candidate.cp <= max(LARGEST, run.cp)]  # fmt: skip
        for options in beside:
            bytes_of = {candidate: least_bytes(model, candidate)
                     for candidate in (_regrouped(options, groups) for groups in ways)}  # fmt: skip
            possible = [candidate for candidate, least in bytes_of.items() if least <= larger.room]
            possible.sort(
                key=lambda candidate: (len(_changed(run, candidate)), bytes_of[candidate])
            )
            for after in possible[:TRIALS]:
                if _fits(larger, after, account_of):
                    return Remedy(after, _changed(run, after), larger.gpus if doubling else None)
    return None


def _regrouped(run: Settings, groups: Settings) -> Settings:
    """Return a run with the parallel sizes of `groups`."""
    names = ("tp", "pp", "first_layers", "last_layers", "ep", "cp", "dp", "intra")
    return replace(run, **{name: getattr(groups, name) for name in names})


def _changed(run: Settings, after: Settings) -> dict[str, Any]:
    after_values = ((name, getattr(after, name)) for name in vars(run) if name not in IMPLIED)
    return {name: value for name, value in after_values if value != getattr(run, name)}


def _fits(cluster: Cluster, run: Settings, account_of: AccountOf) -> bool:
    try:
        return fit(account_of(run), cluster).fits
    except ValueError:  # impossible settings
        return False
