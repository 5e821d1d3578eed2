# SPDX-License-Identifier: Apache-2.0
"""Search for the longest sequence that fits into memory.

`mb.advise(seq="longest")` and `memory --longest` use it. For each choice of parallel sizes, the
settings that need the least memory are tried, even if they are slow. Attention settings are the
ones that `auto` would choose at this length. `advise` then searches for the fastest settings at
this length.
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

EVEN = 1 << 15  # rows of a rank, a multiple of all parallel sizes that are powers of two
NEAR = 0.6  # minimum length to try with chosen attention settings, relative to the first result
FULL = 64  # micro-batches of a step that keep all pipeline stages busy
GRANULE = 1 << 15  # tokens; sequences are multiples of this and of 2 x cp


@dataclass(frozen=True)
class Longest:
    """Longest sequence that a run can train on a cluster.

    Attributes:
        run: Settings with `seq` set to the longest length.
        account: Memory account at this length.
        left: Unused memory at this length.
        binds: Memory that a longer sequence would exceed, in the notation of `MemoryLeft.binds`.
    """

    run: Settings
    account: Account
    left: MemoryLeft
    binds: str


def longest_of(
    model: Model, cluster: Cluster, run: Settings, core_of: CoreOf | None = None
) -> Longest:
    """Return the longest sequence that fits into memory with the settings of a run.

    Args:
        model: Shape of the model.
        cluster: Cluster of GPUs.
        run: Settings of the run; `seq` is ignored.
        core_of: Function that returns the memory of core attention, such as a cached one.

    Raises:
        ValueError: Not even the shortest length fits; the message names settings that would fit.
    """
    unit, core_of = _unit(model, run), core_of or cached_core_of()

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
    """Return the longest sequence that fits with any run in `runs`.

    Args:
        model: Shape of the model.
        cluster: Cluster of GPUs.
        runs: Settings of the runs; `seq` is ignored.
        core_of: Function that returns the memory of core attention, such as a cached one.

    Raises:
        ValueError: No run fits; the message names settings that would fit.
    """
    longest: Longest | None = None
    core_of = core_of or cached_core_of()
    refused: ValueError | None = None
    last: Settings | None = None
    for run in runs:
        unit = _unit(model, run)
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
        except ValueError as error:  # a run with impossible settings
            refused = error
    if longest is None and last is not None:
        return longest_of(model, cluster, last, core_of)
    if longest is None:
        raise refused or ValueError(
            "--longest: no run is possible with the fixed settings; remove some of their flags"
        )
    return longest


def _unit(model: Model, run: Settings) -> int:
    """Return the number of tokens between tried sequence lengths."""
    even = evenly(model, run)
    return even * -(-GRANULE // even)


def evenly(model: Model, run: Settings) -> int:
    """Return the number of tokens by which sequence lengths must be divisible.

    All ranks, row chunks and MLP tiles then have equally many rows, and all rows of a compressed
    key (hybrid attention) are on one rank.
    """
    rows = run.tp * math.lcm(run.sequence_chunks, run.mlp_tiles)
    return 2 * run.cp * math.lcm(rows, model.key_rows)


def layouts_of(
    model: Model, cluster: Cluster, run: Settings, ep: int | None = None,
    documents: tuple[int, ...] = (),
) -> list[Settings]:  # fmt: skip
    """Return a list of runs, one per possible tensor-parallel size.

    Args:
        model: Shape of the model.
        cluster: Cluster of GPUs.
        run: Settings of the run. The remaining GPUs become context-parallel ranks. Pipeline sizes
            and micro-batch size are not changed.
        ep: Expert-parallel size; None for the largest that divides the number of ranks and the
            number of experts.
        documents: Lengths of the documents of a pack, as in `TrainingGoal.documents`.

    Raises:
        ValueError: No tensor-parallel size is possible.
    """
    ends = {name: size for name in ENDS if (size := getattr(run, name)) is not None}
    fixed = {"pp": run.pp, "vpp": run.vpp, "micro_batch": run.micro_batch, "dp": 1, **ends}
    fixed |= {} if ep is None else {"ep": ep}
    seq = run.seq if run.seq > 1 else EVEN * cluster.gpus
    goal = TrainingGoal(seq, FULL * cluster.gpus * run.micro_batch, fixed, documents=documents)
    check_wanted(model, cluster, goal)
    by_tp, refused = {}, None
    for groups in groups_of(model, cluster, goal):  # ordered by expert-parallel size
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


# --- over all choices of parallel sizes ---------------------------------------------------------


def longest(
    model: Model, cluster: Cluster, want: TrainingGoal, attention: AttentionForecast,
    micro_batches: int | None = None,
) -> Longest:  # fmt: skip
    """Return the longest sequence over all choices of parallel sizes.

    Args:
        model: Shape of the model.
        cluster: Cluster of GPUs.
        want: Goal of the search; `seq` is ignored.
        attention: Forecast of attention for the model and the cluster.
        micro_batches: Micro-batches of a step per data-parallel rank; None for enough to keep all
            pipeline stages busy.

    Raises:
        ValueError: The fixed settings contradict each other, or not even a short sequence fits.
    """
    check_fixed(want)
    # More data-parallel ranks do not reduce the tokens of a sequence on a rank, so a data-parallel
    # size of 1 is tried first.
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
    # The fastest attention settings depend on the length, and the length depends on their memory.
    near = [_at(model, run, first.run.seq * NEAR) for run in runs]
    hopeful = (run for run in near if fit(account(model, run, False, core_of), cluster).fits)
    return best(model, cluster, map(attention.settled, hopeful), core_of)


def _at(model: Model, run: Settings, seq: float) -> Settings:
    """Return the run with sequence length `seq`, rounded down to a multiple of `evenly`."""
    step = evenly(model, run)
    return replace(run, seq=max(1, int(seq) // step) * step)


def _smallest(groups: Settings, goal: TrainingGoal) -> Iterator[Settings]:
    """Yield the settings with these parallel sizes that may need the least memory.

    Settings with row chunks and full offload come first. Attention stores of 0 and 0.5 are tried,
    because a run with a partial store has another layout, which may need less memory.
    """
    for chunked in (True, False):
        yield from options_of(groups, goal, chunked, STORES[:0:-1], (1.0, 0.5, 0.0))
