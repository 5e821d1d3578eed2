"""What would make a run fit that does not: the cheap changes, tried, and only those that do.

A change is tried alone; if none is enough, all that cost little time are taken together, and more
GPUs beside them. What is said is the account's, so it holds as far as that does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from ...schedule.topology import divisors
from ..clusters import Cluster
from ..settings import Settings
from ..shapes.models import Model
from .memory import Account, account, fit, states_of

CHUNKS = {"sequence_chunks": 32, "mlp_tiles": 64}
MOST = 3  # changes that are named
TIMES = 64  # at most so many times the GPUs that there are
# The flag of a Megatron command for a field, and what follows it where that is not the value.
MEGATRON: dict[str, str] = {
    "tp": "--tensor-model-parallel-size", "pp": "--pipeline-model-parallel-size",
    "ep": "--expert-model-parallel-size",
    "offload": "--burst-offload", "lm_head_loss": "--burst-lm-head-loss",
    "sequence_chunks": "--burst-sequence-chunks", "mlp_tiles": "--burst-mlp-tiles",
    "store": "--burst-attention-store", "recompute": "--recompute-granularity",
    "optimizer_offload": "--optimizer-cpu-offload --optimizer-offload-fraction",
    "distributed_optimizer": "--use-distributed-optimizer",
}  # fmt: skip


class Change(NamedTuple):
    """Fields of `Settings` with the values that they would need, and GPUs if more are needed."""

    fields: dict[str, Any]
    gpus: int | None = None

    def said(self, flag: Callable[[str], str]) -> str:
        """In words: flags to add, and how many GPUs in all."""
        words = [
            flag(name) if value is True else f"{flag(name)} {value:g}"
            if isinstance(value, float) else f"{flag(name)} {value}"
            for name, value in self.fields.items()
        ]  # fmt: skip
        flags = " ".join(words)
        if not self.gpus:
            return flags
        return f"with {self.gpus} GPUs" + f" and {flags}" * bool(flags)


def megatron_flag(name: str) -> str:
    """The flag of a Megatron command that sets a field of `Settings`."""
    return MEGATRON[name]


def own_flag(name: str) -> str:
    """The flag of `megatron-burst memory` that sets it."""
    return f"--{name.replace('_', '-')}"


def what_would_fit(
    model: Model, cluster: Cluster, run: Settings, flag: Callable[[str], str] = megatron_flag
) -> list[str]:
    """Changes of a run that does not fit, each of which makes it fit, the cheapest first: flags to
    add, in the words of `flag`, or how many GPUs. Empty where nothing that is tried does."""
    return [change.said(flag) for change in changes(model, cluster, run)]


def changes(model: Model, cluster: Cluster, run: Settings) -> list[Change]:
    """The same as fields."""
    found = [one for one in _alone(model, cluster, run) if _fits(model, cluster, run, one)]
    if len(found) < MOST:
        if not found:  # no single one is enough
            several = map(Change, _together(model, cluster, run))
            found += [one for one in several if _fits(model, cluster, run, one)][:1]
        more = _more_gpus(model, cluster, run, alone=bool(found))
        found += [more] if more is not None else []
    return found[:MOST]


def does_not_fit(
    found: Account, cluster: Cluster, flag: Callable[[str], str] = megatron_flag
) -> str:
    """An error's words: how much a run takes, how much there is, and what would make it fit."""
    left, run = fit(found, cluster), found.run
    if left.device < 0:
        taken = f"{found.peak.bytes / 1e9:.0f} GB at TP {run.tp}"
        taken += f" x PP {run.pp}" * (run.pp > 1)
        states = sum(found.states.values()) / 1e9
        what = f"{taken}, {states:.0f} of it states, where {cluster.room / 1e9:.0f} are there"
    else:
        what = (
            f"{found.host_bytes / 1e9:.0f} GB of host memory per GPU, where "
            f"{cluster.host_per_rank / 1e9:.0f} are there"
        )
    helps = what_would_fit(found.model, cluster, run, flag)
    if helps:
        helps[0] = ("it fits " if helps[0].startswith("with ") else "add ") + helps[0]
    elif sum(found.states.values()) > cluster.room:
        helps = [f"states are shared out by more GPUs only: more than {TIMES} times as many"]
    else:
        helps = ["take a shorter sequence, or many more GPUs"]
    return f"does not fit: {what}; {', or '.join(helps)}"


def _alone(model: Model, cluster: Cluster, run: Settings) -> Iterator[Change]:
    """Changes that cost no GPU and little time, the cheapest first."""
    if run.lm_head_loss == "off":
        yield Change({"lm_head_loss": "single_pass"})
    if not run.distributed_optimizer:
        yield Change({"distributed_optimizer": True})
    if run.recompute == "none":
        yield Change({"recompute": "full"})
    elif run.offload < 1:
        yield Change({"offload": 1.0})
    if run.recompute == "full" and not run.chunked and run.cp > 1:
        yield Change(CHUNKS)
    if run.store:
        yield Change({"store": 0.0})
    if run.optimizer_offload < 1:
        yield Change({"optimizer_offload": 1.0})
    tp = 2 * run.tp
    while tp <= cluster.ranks_per_node and model.heads % tp == 0 and run.cp % (tp // run.tp) == 0:
        yield Change({"tp": tp})
        tp *= 2


def _together(model: Model, cluster: Cluster, run: Settings) -> Iterator[dict[str, Any]]:
    """More and more of them together; first, where states are too many, wider groups."""
    fields: dict[str, Any] = {}
    if sum(states_of(model, run, 0)[0].values()) > cluster.room / 2:
        fields |= _wider(model, cluster, run)
    fields |= {"lm_head_loss": "single_pass"} if run.lm_head_loss == "off" else {}
    tp = fields.get("tp", run.tp)
    chunks = CHUNKS if run.cp * run.tp > tp else {"mlp_tiles": 64}
    steps = ({"recompute": "full"}, {"offload": 1.0}, chunks, {"optimizer_offload": 1.0})
    for step in steps:
        fields |= {name: x for name, x in step.items() if getattr(run, name) != x}
        yield dict(fields)


def _wider(model: Model, cluster: Cluster, run: Settings) -> dict[str, int]:
    """The most tensor- and expert-parallel ranks that a node, the heads and the experts allow."""
    ranks = run.tp * run.cp
    tp = max(
        (n for n in range(run.tp, cluster.ranks_per_node + 1)
         if ranks % n == 0 and model.heads % n == 0 and model.kv_heads % n == 0),
        default=run.tp,
    )  # fmt: skip
    fields = {} if tp == run.tp else {"tp": tp}
    if model.experts:
        others = ranks // tp * run.dp
        ep = max(n for n in range(1, others + 1) if others % n == 0 and model.experts % n == 0)
        fields |= {"ep": ep} if ep > run.ep else {}
    return fields


def _more_gpus(model: Model, cluster: Cluster, run: Settings, *, alone: bool) -> Change | None:
    """The fewest GPUs of up to 64 times as many; unless `alone`, with what costs little beside."""
    beside = () if alone else tuple(_together(model, cluster, run))
    for gpus, groups in _groups(model, cluster, run):
        for fields in (groups, *(each | groups for each in beside)):
            change = Change(fields, gpus)
            if _fits(model, cluster, run, change):
                return change
    return None


def _groups(model: Model, cluster: Cluster, run: Settings) -> list[tuple[int, dict[str, int]]]:
    """Numbers of GPUs above those there are, the fewest first, with groups of whole nodes: more
    stages, wider tensor- and expert-parallel groups, and ranks besides in powers of two."""
    found = []
    least, most = cluster.gpus, TIMES * cluster.gpus
    for pp in (n for n in divisors(model.layers) if n >= run.pp):
        for tp in (n for n in divisors(math.gcd(model.heads, model.kv_heads)) if n >= run.tp):
            if tp > max(run.tp, cluster.per_node):
                continue
            ranks = tp * pp
            while ranks <= most:
                if ranks > least and ranks % min(cluster.per_node, ranks) == 0:
                    groups = {"tp": tp, "pp": pp}
                    if model.experts:
                        groups["ep"] = max(run.ep, math.gcd(model.experts, ranks // (tp * pp)))
                    changed = {k: n for k, n in groups.items() if n != getattr(run, k)}
                    found.append((ranks, changed))
                ranks *= 2
    return sorted(found, key=lambda each: (each[0], len(each[1]), each[1].get("pp", 0)))


def _fits(model: Model, cluster: Cluster, run: Settings, change: Change) -> bool:
    """Whether the run fits after a change."""
    try:
        after, cluster = _after(cluster, run, change)
        if sum(states_of(model, after, 0)[0].values()) > cluster.room:
            return False
        return fit(account(model, after, every=False), cluster).fits
    except ValueError:  # sizes that do not divide each other, or a cluster of no whole nodes
        return False


def _after(cluster: Cluster, run: Settings, change: Change) -> tuple[Settings, Cluster]:
    """The run and its cluster after a change. Ranks that are neither tensor-parallel nor stages are
    context-parallel as far as the sequence can be cut, else data-parallel. ValueError where they
    come out uneven."""
    after = replace(run, **change.fields)
    there = replace(cluster, gpus=change.gpus or cluster.gpus)
    ranks, dp = run.tp * run.cp * run.pp, run.dp
    if ranks * there.gpus % (cluster.gpus * after.tp * after.pp):  # copies are shared out anew
        ranks, dp = ranks * dp, 1
    ranks = ranks * there.gpus // cluster.gpus
    cp, rest = divmod(ranks, after.tp * after.pp)
    if rest or not cp:
        raise ValueError(f"{ranks} ranks are not shared out by TP {after.tp} and PP {after.pp}")
    cut = max((n for n in divisors(cp) if run.seq % (2 * n) == 0), default=cp)
    intra = max(1, there.ranks_per_node // after.tp) if "tp" in change.fields else run.intra
    return replace(after, cp=cut, dp=dp * cp // cut, intra=intra), there
