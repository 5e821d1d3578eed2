# SPDX-License-Identifier: Apache-2.0
"""The longest sequence that any run of a search can train.

`mb.advise(seq="longest")` and `memory --longest` use it. For every way to divide the GPUs into
groups, the runs that need the least memory are tried, whatever their time, with the attention
settings that `auto` would choose at such a length. The search then finds the fastest run of that
length.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from .....autotune.clusters import Cluster
from ..account.memory import Account, MemoryLeft, account, fit, least_bytes
from ..account.rings import CoreOf, cached_core_of
from ..settings import ENDS, Settings, check, uneven_rounds
from ..shapes.model import Model
from .attention_choice import AttentionForecast
from .remedies import does_not_fit
from .search_space import (
    STORES,
    TrainingGoal,
    check_fixed,
    check_wanted,
    groups_of,
    options_of,
)

EVEN = 1 << 15  # rows of a rank; all sizes of groups divide this number
NEAR = 0.6  # minimum length relative to the longest run with other attention settings
FULL = 64  # micro-batches that keep every stage of a pipeline busy
GRANULE = 1 << 15  # tokens; sequences are multiples of this and of 2 x cp


@dataclass(frozen=True)
class Longest:
    """The longest sequence of a run on a cluster.

    Attributes:
        run: The run at that length.
        account: Its memory.
        left: The unused memory.
        binds: The memory that the next longer sequence exceeds.
    """

    run: Settings
    account: Account
    left: MemoryLeft
    binds: str


def longest_of(
    model: Model, cluster: Cluster, run: Settings, core_of: CoreOf | None = None
) -> Longest:
    """Return the longest sequence of a run.

    Args:
        model: The model.
        cluster: The cluster.
        run: The run. Its own length is ignored.
        core_of: Returns the memory of core attention, from a cache of the caller.

    Raises:
        ValueError: Not even the shortest length fits; the message names a remedy.
    """
    unit, core_of = _unit(run), core_of or cached_core_of()

    def at_units(units: int) -> tuple[Account, MemoryLeft]:
        rank_account = account(model, replace(run, seq=units * unit), False, core_of)
        return rank_account, fit(rank_account, cluster)

    low, high = 0, 1
    while at_units(high)[1].fits:
        low, high = high, 2 * high
    while high - low > max(1, low // 500):
        middle = (low + high) // 2
        low, high = (middle, high) if at_units(middle)[1].fits else (low, middle)
    if not low:
        raise ValueError(does_not_fit(at_units(1)[0], cluster))
    rank_account, left = at_units(low)
    _, beyond = at_units(high)
    binds = beyond.binds if beyond.device < 0 else "host memory"
    return Longest(rank_account.run, rank_account, left, binds)


def best(
    model: Model, cluster: Cluster, runs: Iterable[Settings], core_of: CoreOf | None = None
) -> Longest:
    """Return the run with the longest sequence; runs that do not fit are skipped.

    Args:
        model: The model.
        cluster: The cluster.
        runs: The runs.
        core_of: Same as in `longest_of`.

    Raises:
        ValueError: No run fits; the message names a remedy for the last run.
    """
    longest: Longest | None = None
    core_of = core_of or cached_core_of()
    refused: ValueError | None = None
    last: Settings | None = None
    for run in runs:
        unit = _unit(run)
        units = 1 if longest is None else longest.run.seq // unit + 1
        try:
            if least_bytes(model, replace(run, seq=units * unit)) > cluster.room:
                last = last or run
                continue
            longer = account(model, replace(run, seq=units * unit), False, core_of)
            last = run
            if fit(longer, cluster).fits:
                candidate = longest_of(model, cluster, run, core_of)
                if longest is None or candidate.run.seq > longest.run.seq:
                    longest = candidate
        except ValueError as error:  # no such run
            refused = error
    if longest is None and last is not None:
        return longest_of(model, cluster, last, core_of)
    if longest is None:
        raise refused or ValueError("there is no run to try")
    return longest


def _unit(run: Settings) -> int:
    """Return the unit of the lengths of a run."""
    even = evenly(run)
    return even * -(-GRANULE // even)


def evenly(run: Settings) -> int:
    """Return the shortest length that ranks, chunks and tiles of rows divide evenly."""
    return 2 * run.cp * run.tp * math.lcm(run.sequence_chunks, run.mlp_tiles)


def layouts_of(
    model: Model, cluster: Cluster, run: Settings, ep: int | None = None,
    documents: tuple[int, ...] = (),
) -> list[Settings]:  # fmt: skip
    """Return the run with every tensor-parallel size, all other ranks context-parallel.

    Args:
        model: The model.
        cluster: The cluster.
        run: The run, whose stages, virtual stages and micro-batch stay.
        ep: Expert-parallel size; None: the largest that divides ranks and experts.
        documents: Same as in `TrainingGoal`.

    Raises:
        ValueError: If there is no such size.
    """
    ends = {name: size for name in ENDS if (size := getattr(run, name)) is not None}
    fixed = {"pp": run.pp, "vpp": run.vpp, "micro_batch": run.micro_batch, "dp": 1, **ends}
    fixed |= {} if ep is None else {"ep": ep}
    seq = run.seq if run.seq > 1 else EVEN * cluster.gpus
    goal = TrainingGoal(seq, FULL * cluster.gpus * run.micro_batch, fixed, documents=documents)
    check_wanted(model, cluster, goal)
    by_tp, refused = {}, None
    for groups in groups_of(model, cluster, goal):  # in the order of expert-parallel ranks
        own = replace(run, tp=groups.tp, cp=groups.cp, dp=1, ep=groups.ep, intra=groups.intra)
        try:
            check(model, replace(own, seq=groups.seq))
        except ValueError as error:
            refused = error
        else:
            by_tp[own.tp] = own
    if refused is not None and not by_tp:
        raise refused
    return list(by_tp.values())


# --- over all ways to share the GPUs out --------------------------------------------------------


def longest(
    model: Model, cluster: Cluster, want: TrainingGoal, attention: AttentionForecast,
    micro_batches: int | None = None,
) -> Longest:  # fmt: skip
    """Return the run with the longest sequence, at that length.

    Args:
        model: The model.
        cluster: The cluster.
        want: The goal. Its length is ignored.
        attention: The attention forecast.
        micro_batches: Micro-batches of a step; None: enough to keep every stage of a pipeline busy.

    Raises:
        ValueError: The fixed settings contradict each other, or not even a short sequence fits.
    """
    check_fixed(want)
    # Data-parallel ranks share no sequence, so one rank is tried first.
    for dp in ({"dp": 1}, {}):
        goal = replace(
            want, seq=EVEN * cluster.gpus, sequences=FULL * cluster.gpus,
            pinned={**dp, **want.pinned},
        )  # fmt: skip
        if next(groups_of(model, cluster, goal), None) is not None:
            break
    check_wanted(model, cluster, goal)
    groups = [
        replace(group, micro_batches=micro_batches or group.micro_batches)
        for group in groups_of(model, cluster, goal)
        if group.vpp == goal.pinned.get("vpp", 1)
    ]
    if all(problems := [uneven_rounds(group) for group in groups]):
        raise ValueError(problems[0])
    runs = [run for group in groups if not uneven_rounds(group) for run in _smallest(group, goal)]
    if not runs:
        check(model, groups[0])
    core_of = attention.core_of
    first = best(model, cluster, runs, core_of)
    # The fastest attention settings depend on the length, and their memory limits the length.
    near = [_at(run, first.run.seq * NEAR) for run in runs]
    hopeful = (run for run in near if fit(account(model, run, False, core_of), cluster).fits)
    return best(model, cluster, map(attention.settled, hopeful), core_of)


def _at(run: Settings, seq: float) -> Settings:
    """Return the run at about this length, which its ranks, chunks and tiles divide."""
    step = evenly(run)
    return replace(run, seq=max(1, int(seq) // step) * step)


def _smallest(groups: Settings, goal: TrainingGoal) -> Iterator[Settings]:
    """Yield runs that recompute everything unless a setting is fixed.

    Runs in row chunks with most on the host come first. Stores 0 and 0.5 are tried, because the
    layout of a partial store may need less memory.
    """
    for chunked in (True, False):
        yield from options_of(groups, goal, chunked, STORES[:0:-1], (1.0, 0.5, 0.0))
