# SPDX-License-Identifier: Apache-2.0
"""What fits: the longest sequence of a run, and what would make a run fit that does not.

Cheap changes are tried, and only those that help are named. A change is tried alone; if none is
enough, all that cost little time are taken together, and more GPUs beside them. All this holds as
far as the account does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from .....autotune.clusters import Cluster
from .....schedule.topology import divisors
from .....units import byte_size
from ..settings import ENDS, Settings, flag_of, uneven_ends
from ..shapes.models import Model
from .memory import Account, MemoryLeft, account, fit, fullest_stages, states_of
from .rings import CoreOf, remembering
from .steps import layers_of

CHUNKS = {"sequence_chunks": 32, "mlp_tiles": 64}
GRANULE = 1 << 15  # tokens: sequences are multiples of it, and of 2 x cp
MOST = 3  # changes that are named
TIMES = 64  # at most so many times the GPUs that there are
Held = Callable[[Settings], Account]  # of packs of documents, in place of `account`


class Remedy(NamedTuple):
    """Fields of `Settings` with the values that they would need, and GPUs if more are needed."""

    fields: dict[str, Any]
    gpus: int | None = None

    @property
    def said(self) -> str:
        """In words: flags to add, and how many GPUs in all."""
        flags = " ".join(map(flag_said, self.fields, self.fields.values()))
        if not self.gpus:
            return flags
        return f"with {self.gpus} GPUs and {flags}" if flags else f"with {self.gpus} GPUs"


def flag_said(name: str, value: Any) -> str:
    """A field of `Settings` as its flag with a value; None: without it."""
    if value is True:
        return flag_of(name)
    if value is None:
        return f"without {flag_of(name)}"
    return f"{flag_of(name)} {value:g}" if isinstance(value, float) else f"{flag_of(name)} {value}"


def changes(
    model: Model, cluster: Cluster, run: Settings, held: Held | None = None
) -> list[Remedy]:
    """Changes of a run that does not fit, each of which makes it fit, the cheapest first. Empty
    where nothing that is tried does."""
    found = [one for one in _alone(model, cluster, run) if _fits(model, cluster, run, one, held)]
    if len(found) < MOST:
        if not found:  # no single one is enough
            several = map(Remedy, _together(model, cluster, run, held is None))
            found += [one for one in several if _fits(model, cluster, run, one, held)][:1]
        more = _more_gpus(model, cluster, run, held, alone=bool(found))
        found += [more] if more is not None else []
    return found[:MOST]


def does_not_fit(found: Account, cluster: Cluster, held: Held | None = None) -> str:
    """An error's words: how much a run takes, how much there is, and what would make it fit."""
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
    elif sum(found.states.values()) > cluster.room:
        helps = [f"states are shared out by more GPUs only: more than {TIMES} times as many"]
    else:
        helps = ["take a shorter sequence, or many more GPUs"]
    return f"does not fit: {what}; {', or '.join(helps)}"


def _alone(model: Model, cluster: Cluster, run: Settings) -> Iterator[Remedy]:
    """Changes that cost no GPU and little time, the cheapest first."""
    if run.lm_head_loss == "off":
        yield Remedy({"lm_head_loss": "single_pass"})
    if not run.distributed_optimizer:
        yield Remedy({"distributed_optimizer": True})
    if run.recompute == "none":
        yield Remedy({"recompute": "full"})
    elif run.offload < 1:
        yield Remedy({"offload": 1.0})
    if run.recompute == "full" and not run.chunked and run.cp > 1:
        yield Remedy(CHUNKS)
    if run.store:
        yield Remedy({"store": 0.0})
    if run.optimizer_offload < 1:
        yield Remedy({"optimizer_offload": 1.0})
    tp = 2 * run.tp
    while tp <= cluster.ranks_per_node and model.heads % tp == 0 and run.cp % (tp // run.tp) == 0:
        yield Remedy({"tp": tp})
        tp *= 2


def _together(
    model: Model, cluster: Cluster, run: Settings, chunked: bool
) -> Iterator[dict[str, Any]]:
    """More and more of them together; first, where states are too many, wider groups. chunked: with
    attention in chunks of rows, which that of packs is not."""
    fields: dict[str, Any] = {}
    if sum(states_of(model, run, 0)[0].values()) > cluster.room / 2:
        fields |= _wider(model, cluster, run)
    fields |= {"lm_head_loss": "single_pass"} if run.lm_head_loss == "off" else {}
    tp = fields.get("tp", run.tp)
    chunks = CHUNKS if chunked and run.cp * run.tp > tp else {"mlp_tiles": 64}
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


def _more_gpus(
    model: Model, cluster: Cluster, run: Settings, held: Held | None, *, alone: bool
) -> Remedy | None:
    """The fewest GPUs of up to 64 times as many; unless `alone`, with what costs little beside."""
    beside = () if alone else tuple(_together(model, cluster, run, held is None))
    for gpus, groups in _groups(model, cluster, run):
        for fields in (groups, *(each | groups for each in beside)):
            change = Remedy(fields, gpus)
            if _fits(model, cluster, run, change, held):
                return change
    return None


def _groups(model: Model, cluster: Cluster, run: Settings) -> list[tuple[int, dict[str, int]]]:
    """Numbers of GPUs above those there are, the fewest first, with groups of whole nodes: more
    stages, wider tensor- and expert-parallel groups, and ranks besides in powers of two."""
    found = []
    least, most = cluster.gpus, TIMES * cluster.gpus
    for stages in _stages(model, run):
        for tp in (n for n in divisors(math.gcd(model.heads, model.kv_heads)) if n >= run.tp):
            if tp > max(run.tp, cluster.per_node):
                continue
            ranks = tp * stages["pp"]
            while ranks <= most:
                if ranks > least and ranks % min(cluster.per_node, ranks) == 0:
                    groups = {"tp": tp, **stages}
                    if model.experts:
                        others = ranks // (tp * stages["pp"])
                        groups["ep"] = max(run.ep, math.gcd(model.experts, others))
                    changed = {k: n for k, n in groups.items() if n != getattr(run, k)}
                    found.append((ranks, changed))
                ranks *= 2
    return sorted(found, key=lambda each: (each[0], len(each[1]), each[1].get("pp", 0)))


def _stages(model: Model, run: Settings) -> Iterator[dict[str, Any]]:
    """The stages that there are, and more of them, whose ends have other numbers of layers."""
    if run.uneven:
        yield {"pp": run.pp}
    for pp in sorted({*divisors(model.layers), 2 * run.pp, 4 * run.pp}):
        if model.layers % pp == 0:
            ends = (None, None)
        else:
            ends = uneven_ends(model.layers, pp) if run.uneven else None
        if ends is not None and pp >= run.pp + run.uneven:
            yield {"pp": pp, **dict(zip(ENDS, ends, strict=True))}


def _fits(model: Model, cluster: Cluster, run: Settings, change: Remedy, held: Held | None) -> bool:
    """Whether the run fits after a change."""
    try:
        after, cluster = _after(cluster, run, change)
        if sum(states_of(model, after, 0)[0].values()) > cluster.room:
            return False
        found = held(after) if held is not None else account(model, after, every=False)
        return fit(found, cluster).fits
    except ValueError:  # sizes that do not divide each other, or a cluster of no whole nodes
        return False


def _after(cluster: Cluster, run: Settings, change: Remedy) -> tuple[Settings, Cluster]:
    """The run and its cluster after a change. Ranks that are neither tensor-parallel nor stages are
    context-parallel as far as the sequence can be cut, else data-parallel. ValueError where they
    come out uneven."""
    after = replace(run, **change.fields)
    larger = replace(cluster, gpus=change.gpus or cluster.gpus)
    ranks, dp = run.tp * run.cp * run.pp, run.dp
    if ranks * larger.gpus % (cluster.gpus * after.tp * after.pp):  # copies are shared out anew
        ranks, dp = ranks * dp, 1
    ranks = ranks * larger.gpus // cluster.gpus
    cp, rest = divmod(ranks, after.tp * after.pp)
    if rest or not cp:
        raise ValueError(f"{ranks} ranks are not shared out by TP {after.tp} and PP {after.pp}")
    cut = max((n for n in divisors(cp) if run.seq % (2 * n) == 0), default=cp)
    intra = max(1, larger.ranks_per_node // after.tp) if "tp" in change.fields else run.intra
    return replace(after, cp=cut, dp=dp * cp // cut, intra=intra), larger


# --- the longest sequence ----------------------------------------------------------------------


@dataclass(frozen=True)
class Longest:
    """The longest sequence of a run on a cluster: the run at that length, its memory, what is left,
    and what the next longer one lacks."""

    run: Settings
    account: Account
    left: MemoryLeft
    binds: str


def longest(
    model: Model, cluster: Cluster, run: Settings, core_of: CoreOf | None = None
) -> Longest:
    """The longest sequence of `run`, whose own length does not count. core_of: what core attention
    holds, from a caller that remembers it.

    ValueError, with what would help, if not even a granule of tokens fits.
    """
    unit, core_of = _unit(run), core_of or remembering()

    def tried(units: int) -> tuple[Account, MemoryLeft]:
        found = account(model, replace(run, seq=units * unit), False, core_of)
        return found, fit(found, cluster)

    low, high = 0, 1
    while tried(high)[1].fits:
        low, high = high, 2 * high
    while high - low > max(1, low // 500):
        middle = (low + high) // 2
        low, high = (middle, high) if tried(middle)[1].fits else (low, middle)
    if not low:
        raise ValueError(does_not_fit(tried(1)[0], cluster))
    found, left = tried(low)
    _, beyond = tried(high)
    binds = beyond.binds if beyond.device < 0 else "host memory"
    return Longest(found.run, found, left, binds)


def best(
    model: Model, cluster: Cluster, runs: Iterable[Settings], core_of: CoreOf | None = None
) -> Longest:
    """The one of these runs with the longest sequence; runs that do not fit are passed over.
    core_of: as of `longest`.

    ValueError, with what would help the last of them, where none fits.
    """
    found: Longest | None = None
    core_of = core_of or remembering()
    refused: ValueError | None = None
    last: Settings | None = None
    for run in runs:
        unit = _unit(run)
        units = 1 if found is None else found.run.seq // unit + 1
        try:
            if least_bytes(model, replace(run, seq=units * unit)) > cluster.room:
                last = last or run
                continue
            longer = account(model, replace(run, seq=units * unit), False, core_of)
            last = run
            if fit(longer, cluster).fits:
                other = longest(model, cluster, run, core_of)
                found = other if found is None or other.run.seq > found.run.seq else found
        except ValueError as error:  # no such run
            refused = error
    if found is None and last is not None:
        return longest(model, cluster, last, core_of)
    if found is None:
        raise refused or ValueError("no run to try")
    return found


def _unit(run: Settings) -> int:
    """The lengths of a run that are tried are multiples of it."""
    even = evenly(run)
    return even * -(-GRANULE // even)


def evenly(run: Settings) -> int:
    """A length whose multiples ranks, chunks and tiles of rows all divide."""
    return 2 * run.cp * run.tp * math.lcm(run.sequence_chunks, run.mlp_tiles)


def layouts_of(
    model: Model, cluster: Cluster, run: Settings, experts: bool = False
) -> Iterator[Settings]:
    """The run with every tensor-parallel size that fits a node and the heads; the others are its
    context-parallel ranks, more than one if rows are cut into chunks. experts: as many of them as
    divide a model's experts share these, which takes least memory; else `run.ep` do."""
    tp = 1
    while tp <= cluster.ranks_per_node:
        fits = model.heads % tp == 0 and model.kv_heads % tp == 0 and model.carried(tp)
        if cluster.gpus % (tp * run.pp) == 0 and fits:
            intra, cp = max(1, cluster.ranks_per_node // tp), cluster.gpus // tp // run.pp
            if cp > 1 or run.sequence_chunks == 1:
                ep = math.gcd(model.experts, cp) if experts and model.experts else run.ep
                yield replace(run, tp=tp, cp=cp, dp=1, ep=ep, intra=intra)
        tp *= 2


def least_bytes(model: Model, run: Settings) -> float:
    """Bytes of a GPU below which no account of a run is: states, and what layers leave."""
    plain = model.attentions == model.mlps == model.layers
    rows, hidden = run.rows, run.rows / run.tp * model.hidden
    out = rows * (model.heads // run.tp) * model.value_dim
    if not plain:
        left = hidden * (1 - run.offload)
    elif run.recompute == "full":
        left = (hidden + run.store * out) * (1 - run.offload)
    else:  # inputs of both norms, queries, results, and what goes into the last product
        ffn = model.top_k * model.ffn if model.experts else model.ffn
        ffn = min(ffn, model.dense_ffn) if model.moe_layers not in (0, model.layers) else ffn
        left = 2 * hidden + rows * (model.heads // run.tp) * model.head_dim + out
        left += rows * ffn / run.tp
    return max(
        sum(states_of(model, run, stage)[0].values()) + 2 * left * len(layers_of(model, run, stage))
        for stage in fullest_stages(run)
    )
