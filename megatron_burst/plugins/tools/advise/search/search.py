# SPDX-License-Identifier: Apache-2.0
"""Search for the fastest settings that fit into memory: the ranking of `mb.advise`.

A `Way` is a choice of parallel sizes. For each way, options (recompute, store, offload, ...) are
tried in the order of predicted time until one fits. A way is skipped if a lower bound on its time
exceeds the best times so far. The bound assumes that attention sends nothing. `step_time` predicts
times, `account` predicts memory, and `autotune.select` chooses attention settings. Of all runs
within the fraction TIE of the fastest time, the simplest is chosen.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, NamedTuple

from .....autotune.candidates import ROUNDING
from .....autotune.clusters import Cluster
from .....autotune.select import TIE
from ..account.memory import Account, MemoryLeft, account, fit, least_bytes
from ..forecast.step_time import StepTime
from ..settings import Settings
from ..shapes.models import Model
from .attention_choice import AttentionForecast
from .search_space import FRACTIONS, TrainingGoal, groups_of, options_of


@dataclass(frozen=True)
class Configuration:
    """Settings of a run with predicted time, memory account and unused memory.

    Attributes:
        run: Settings of the run.
        time: Predicted time of a step.
        account: Memory account.
        fit: Unused memory.
    """

    run: Settings
    time: StepTime
    account: Account
    fit: MemoryLeft

    @property
    def seconds(self) -> float:
        """Predicted seconds of one step."""
        return self.time.seconds

    @property
    def lacks(self) -> float:
        """Bytes by which the run exceeds GPU memory, plus bytes by which it exceeds host memory.

        0 if the run fits.
        """
        return -min(0.0, self.fit.device) - min(0.0, self.fit.host)


def simplicity(run: Settings) -> tuple[float, ...]:
    """Return a sort key by which the simplest run is first.

    In order of importance, the key contains: offload, row chunks and tiles, pipeline stages, a
    partial attention store, recomputation, ranks that share heads, and expert-parallel ranks.
    """
    return (
        run.optimizer_offload,
        run.offload,
        run.sequence_chunks,
        run.mlp_tiles,
        run.vpp,
        run.pp > 1,
        run.store not in (0.0, 1.0),
        run.recompute == "full",
        run.ulysses > 1,
        run.ep,
    )


def plainest(groups: Settings) -> Settings:
    """Return the simplest run with the parallel sizes of `groups`.

    Its time without communication is a lower bound for all runs with these parallel sizes.
    """
    return replace(unbarred(groups), algorithm="burst", ulysses=1, head_chunks=1)


def unbarred(run: Settings) -> Settings:
    """Return the run without settings that save memory. Attention settings stay the same."""
    return replace(run, recompute="none", store=0.0, offload=0.0, optimizer_offload=0.0,
                   sequence_chunks=1, mlp_tiles=1)  # fmt: skip


def simplest_first(ranked: Sequence[Configuration]) -> tuple[Configuration, ...]:
    """Sort configurations by time, except for the first one.

    The first one is the simplest configuration within TIE of the fastest time.
    """
    if not ranked:
        return ()
    limit = min(entry.seconds for entry in ranked) * (1 + TIE)
    tied = [entry for entry in ranked if entry.seconds <= limit]
    taken = min(tied, key=lambda entry: (simplicity(entry.run), entry.seconds))
    by_time = sorted(ranked, key=attrgetter("seconds"))
    return (taken, *(entry for entry in by_time if entry is not taken))


Progress = Callable[[int, int], None]  # arguments: number of finished ways, number of all ways


@dataclass(frozen=True)
class SearchResult:
    """Result of a search.

    Attributes:
        ranked: Best configuration that fits, for each way (choice of parallel sizes). The
            recommended configuration is first; the others are ordered by time.
        ways: Number of ways.
        tried: Number of ways that were not skipped.
        closest: Configuration that exceeds memory by the fewest bytes; None if all computed
            configurations fit.
    """

    ranked: tuple[Configuration, ...]
    ways: int
    tried: int
    closest: Configuration | None


class Way(NamedTuple):
    """Choice of parallel sizes (TP, PP, CP, DP), or one variant of it.

    Variants differ in micro-batch size, virtual stages and expert-parallel size.

    Attributes:
        bound: Lower bound on the seconds of a step.
        simplest: Lower bound on `simplicity` of the runs of this way.
        content: For a choice of parallel sizes, the list of its variants (`Way`). For a variant,
            `Settings` with its parallel sizes.
    """

    bound: float
    simplest: tuple[float, ...]
    content: Any


class TimedRun(NamedTuple):
    """Settings of a run, and the predicted time of its step."""

    time: StepTime
    run: Settings

    @property
    def order(self) -> tuple[float, tuple[float, ...]]:
        """Sort key: seconds, then simplicity."""
        return self.time.seconds, simplicity(self.run)


class Search:
    """Search for the fastest settings for one model, cluster and goal."""

    def __init__(
        self, model: Model, cluster: Cluster, want: TrainingGoal, attention: AttentionForecast
    ):
        self.model, self.cluster, self.want = model, cluster, want
        self.attention = attention
        self.core_of = attention.core_of
        self.closest: Configuration | None = None
        self.refused: ValueError | None = None
        self._accounts: dict[Settings, Account] = {}  # accounts for the current way
        self._failed: list[Configuration] = []  # runs of the current way that do not fit
        self.least: tuple[float, Settings] | None = None  # skipped run with the fewest bytes
        self.prune = True

    def run(self, top: int, progress: Progress | None = None, prune: bool = True) -> SearchResult:
        """Search all ways (choices of parallel sizes) and return the `top` fastest configurations.

        Args:
            top: Number of configurations to return.
            progress: Function that is called with the number of finished ways and the number of all
                ways.
            prune: Skip ways that cannot be among the results. Tests set it to False, which makes
                the search slow.
        """
        self.prune = prune
        variants: dict[tuple[int, ...], list[Way]] = {}
        for run in groups_of(self.model, self.cluster, self.want):
            way = variants.setdefault((run.tp, run.pp, run.cp, run.dp), [])
            way.append(Way(self.at_least(run), simplicity(plainest(run)), run))
        ways = [
            Way(min(x.bound for x in way), min(x.simplest for x in way), way)
            for way in variants.values()
        ]
        ranked, tried = self._explore(ways, top, self._best_variant, progress)
        if not ranked and self.closest is None and self.least is not None:
            # Every run was skipped before its memory account was computed.
            self.closest = self._configuration(*self.timed([self.least[1]])[0])
        closer: list[Configuration] = []
        for candidate in simplest_first(ranked):
            # Once there are `top` runs, refine a run only if it would be faster than the fastest of
            # them with unlimited memory.
            limit = min((finished.seconds for finished in closer), default=math.inf)
            if len(closer) < top or self.attention.step(unbarred(candidate.run)).seconds < limit:
                closer.append(self.best_of(candidate.run, thorough=True) or candidate)
        return SearchResult(simplest_first(closer)[:top], len(ways), tried, self.closest)

    def _best_variant(self, variants: list[Way]) -> Configuration | None:
        """Return the best configuration of a choice of parallel sizes, over its variants."""
        ranked, _ = self._explore(variants, 1, self.best_of)
        return simplest_first(ranked)[0] if ranked else None

    def _explore(
        self,
        ways: Sequence[Way],
        top: int,
        best: Callable[[Any], Configuration | None],
        progress: Progress | None = None,
    ) -> tuple[list[Configuration], int]:
        """Return the best configuration of each way that is tried, and the number of tried ways.

        A way is a choice of parallel sizes or one variant of it. It is tried if it may be among the
        `top` fastest, or if it may be simpler and within TIE of the fastest. `best` returns the
        best configuration for a `Way.content`.
        """
        ranked: list[Configuration] = []
        left = deque(sorted(ways, key=lambda way: (way.bound, way.simplest)))

        def take(way: Way) -> None:
            if (configuration := best(way.content)) is not None:
                insort(ranked, configuration, key=attrgetter("seconds"))
            if progress is not None:
                progress(len(ways) - len(left), len(ways))

        while left and not self._passed_over(left[0], ranked, top):
            take(left.popleft())
        tried = len(ways) - len(left)
        if ranked and left:
            limit = ranked[0].seconds * (1 + TIE)
            for way in sorted(left, key=lambda way: way.simplest):
                taken = simplest_first(ranked)[0]
                if way.simplest > simplicity(taken.run):
                    break
                if way.bound <= min(limit, taken.seconds) or (
                    way.bound <= limit and (way.simplest < simplicity(taken.run))
                ):
                    take(way)
                    tried += 1
        if progress is not None:
            progress(len(ways), len(ways))
        return ranked, tried

    def _passed_over(self, way: Way, ranked: Sequence[Configuration], top: int) -> bool:
        return self.prune and len(ranked) >= top and way.bound > ranked[top - 1].seconds

    def at_least(self, groups: Settings) -> float:
        """Return a lower bound on the step time of runs with these parallel sizes, in seconds.

        Only runs that may fit into memory count. If the simplest run certainly does not fit, the
        bound assumes full recomputation or an offloaded optimizer.
        """
        candidates = []
        for moved in sorted(self.want.values("optimizer_offload", (0.0, 1.0))):
            resident = replace(plainest(groups), optimizer_offload=moved)
            full = replace(resident, recompute="full", offload=1.0)
            if least_bytes(self.model, resident) <= self.cluster.room:
                candidates.append(resident)
                break
            if least_bytes(self.model, full) <= self.cluster.room:
                stored = 0.0 if groups.cp == 1 or self.want.selects else 1.0
                candidates.append(replace(full, offload=0.0, store=stored))
        # Even if nothing fits, the search reports the run that exceeds memory the least.
        candidates = candidates or [plainest(groups)]
        return min(self.attention.step_at_least(run).seconds for run in candidates)

    def best_of(self, groups: Settings, thorough: bool = False) -> Configuration | None:
        """Return the fastest run with these parallel sizes that fits; None if none fits.

        Of the runs within TIE of the fastest, the simplest is returned. More runs are tried if none
        fits, and with `thorough` also if a faster run does not fit. These are first runs with a
        partial attention store (layout striped) or row chunks. Then the fractions of stored outputs
        and of offloading are varied in steps of 0.1.
        """
        self._accounts, self._failed = {}, []
        try:
            whole_runs, chunked = (list(options_of(groups, self.want, c)) for c in (False, True))
            if not self._possible([*whole_runs, *chunked]):
                return None
            usual = [run for run in whole_runs if run.store in (0.0, 1.0)]
            timed = self.timed(usual or whole_runs)
            best = self._taken(timed)
            barred = best is None or timed[0][0].seconds * (1 + TIE) < best.seconds
            if best is None or (barred and thorough):
                done = {run for _, run in timed}
                remaining = [*(run for run in whole_runs if run not in usual), *chunked]
                full = [time.seconds for time, run in timed if run.store == 1]
                if best is not None and full and best.seconds <= min(full) * (1 + TIE):
                    # A smaller store recomputes more.
                    remaining = [run for run in remaining if run.store in (0.0, 1.0)]
                remaining = self._possible(remaining)
                timed += [entry for entry in self.timed(remaining) if entry.run not in done]
                best = self._taken(timed)
                if best is not None or any(failure.fit.device >= 0 for failure in self._failed):
                    best = self._taken(self._finer(groups, best)) or best
            return best and self._by_kind(best)
        except ValueError as error:  # the fixed settings are impossible with these parallel sizes
            self.refused = error
            return None

    def _finer(self, groups: Settings, best: Configuration | None) -> list[TimedRun]:
        """Return runs with finer fractions that are faster than `best` by more than TIE.

        The fractions are the stored outputs and the offloading; their values are multiples of 0.1.
        Stores that exceed GPU memory even with the largest offload are excluded.
        """
        other_options = attrgetter(
            "recompute", "optimizer_offload", "sequence_chunks", "mlp_tiles", "layout"
        )
        # Group runs that differ only in store and offload, by store.
        by_options: dict[Any, dict[float, list[Settings]]] = {}
        for chunked in (False, True):
            for run in options_of(groups, self.want, chunked, FRACTIONS, FRACTIONS):
                by_store = by_options.setdefault(other_options(run), {})
                by_store.setdefault(run.store, []).append(run)
        limit, on_host = best.seconds if best is not None else math.inf, attrgetter("offload")

        def faster(run: Settings) -> bool:
            """Return whether a run is faster than `best` by more than TIE, up to rounding."""
            bound = self.attention.step(self.attention.settled(run)).seconds
            return bound * (1 + TIE) * (1 - ROUNDING) < limit

        possible: list[Settings] = []
        for by_store in by_options.values():
            if limit < math.inf:  # more offload never makes a run faster
                hopeful = [s for s, runs in by_store.items() if faster(min(runs, key=on_host))]
                largest = max(hopeful, default=-1.0)
            else:
                hopeful, largest = list(by_store), 1.0
            for store, runs in sorted(by_store.items()):
                if store > largest:
                    break
                moved = self._possible([max(runs, key=on_host)])
                if not moved or self.left(self.attention.settled(moved[0])).device < 0:
                    break
                if store in hopeful:
                    possible += runs
        return [x for x in self.timed(possible) if x.time.seconds * (1 + TIE) < limit]

    def _taken(self, timed: Sequence[TimedRun]) -> Configuration | None:
        """Return the simplest run within TIE of the fastest run, of the runs that fit.

        None if no run fits.
        """
        ordered = sorted(timed, key=attrgetter("order"))
        first = next(self._fitting(ordered), None)
        if first is None:
            return None
        limit = first.seconds * (1 + TIE)
        tied = [entry for entry in ordered if first.seconds <= entry.time.seconds <= limit]
        tied.sort(key=lambda entry: entry.order[::-1])
        return next(self._fitting(tied), first)

    def _possible(self, runs: Iterable[Settings]) -> list[Settings]:
        """Return the runs whose lower bound on memory (`least_bytes`) fits into GPU memory."""
        possible = []
        for run in runs:
            need = least_bytes(self.model, run)
            if need <= self.cluster.room:
                possible.append(run)
            elif self.least is None or need < self.least[0]:
                self.least = need, run
        return possible

    def timed(self, runs: Iterable[Settings]) -> list[TimedRun]:
        """Choose attention settings of the runs, predict their times, and sort them by time."""
        settled = map(self.attention.settled, runs)
        times = [TimedRun(self.attention.step(run), run) for run in settled]
        return sorted(times, key=attrgetter("order"))

    def _by_kind(self, configuration: Configuration) -> Configuration:
        """Return the configuration with the fastest algorithm for each kind of layer.

        The configuration is returned unchanged if the gain is at most TIE or if the result does not
        fit.
        """
        run = self.attention.by_kind(configuration.run)
        if run is configuration.run:
            return configuration
        by_kind = self._configuration(self.attention.step(run), run)
        gains = by_kind.seconds * (1 + TIE) < configuration.seconds
        return by_kind if gains and by_kind.fit.fits else configuration

    def _configuration(self, time: StepTime, run: Settings) -> Configuration:
        """Return a run as a `Configuration`. Its memory account comes from a cache."""
        return Configuration(run, time, self._account_of(run), self.left(run))

    def _account_of(self, run: Settings) -> Account:
        if run not in self._accounts:
            self._accounts[run] = account(self.model, run, every=False, core_of=self.core_of)
        return self._accounts[run]

    def left(self, run: Settings) -> MemoryLeft:
        """Return the unused memory of a run. Its memory account comes from a cache."""
        return fit(self._account_of(run), self.cluster)

    def _fitting(self, timed: Sequence[TimedRun]) -> Iterator[Configuration]:
        """Yield the configurations of the runs that fit into memory, in the order of `timed`."""
        possible = set(self._possible(run for _, run in timed))
        for time, run in timed:
            if run not in possible or any(_takes_more(run, failure) for failure in self._failed):
                continue
            configuration = self._configuration(time, run)
            if configuration.fit.fits:
                yield configuration
                continue
            self._failed.append(configuration)
            if self.closest is None or configuration.lacks < self.closest.lacks:
                self.closest = configuration


def _takes_more(run: Settings, failed: Configuration) -> bool:
    """Return whether a run certainly exceeds memory, because the similar run `failed` does.

    False if the runs differ in more than the fractions of stored outputs and of offloading.
    """
    other_run = failed.run
    same = replace(other_run, store=run.store, offload=run.offload)
    if run.store < other_run.store or run != same:
        return False
    return (failed.fit.device < 0 and run.offload <= other_run.offload) or (
        failed.fit.host < 0 and run.offload >= other_run.offload
    )
