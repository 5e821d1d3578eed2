# SPDX-License-Identifier: Apache-2.0
"""The fastest runs that fit a cluster: what `mb.advise` ranks.

For each way to share the GPUs out, the options are tried in the order of their times until one fits
into memory. Ways that cannot be among the fastest are passed over: their time with attention that
sends nothing is more than that of those found so far. Times are `step_time`'s, bytes `account`'s,
attention settings `select.best`'s. Runs within TIE of the fastest are a tie, of which the simplest
is taken.
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
    """One run with its predicted time, its memory, and what that leaves of the cluster's."""

    run: Settings
    time: StepTime
    account: Account
    fit: MemoryLeft

    @property
    def seconds(self) -> float:
        """The seconds of one step."""
        return self.time.seconds

    @property
    def lacks(self) -> float:
        """Bytes that a run that does not fit lacks, on the GPU and the host together."""
        return -min(0.0, self.fit.device) - min(0.0, self.fit.host)


def simplicity(run: Settings) -> tuple[float, ...]:
    """What decides between runs that tie: the least of these, and of equals the fastest: what lies
    on the host, pieces, stages, a part of the store, recompute, ranks that share heads, ranks that
    share experts.
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
    """The simplest run with these groups, which with attention that sends nothing bounds the time
    of all others.
    """
    return replace(unbarred(groups), algorithm="burst", ulysses=1, head_chunks=1)


def unbarred(run: Settings) -> Settings:
    """The run with this attention as it would be if memory were no matter."""
    return replace(run, recompute="none", store=0.0, offload=0.0, optimizer_offload=0.0,
                   sequence_chunks=1, mlp_tiles=1)  # fmt: skip


def simplest_first(found: Sequence[Configuration]) -> tuple[Configuration, ...]:
    """By time, but the simplest of those that tie with the fastest first."""
    if not found:
        return ()
    limit = min(each.seconds for each in found) * (1 + TIE)
    tied = [each for each in found if each.seconds <= limit]
    taken = min(tied, key=lambda each: (simplicity(each.run), each.seconds))
    others = sorted((each for each in found if each is not taken), key=lambda each: each.seconds)
    return (taken, *others)


Progress = Callable[[int, int], None]  # ways done, of how many


@dataclass(frozen=True)
class SearchResult:
    """ranked: the runs that fit, one for each way to share the GPUs out, the one taken first, the
    others by time. ways: how many there are; tried: how many were not passed over. closest: of runs
    that do not fit, where none does, the one that lacks least.
    """

    ranked: tuple[Configuration, ...]
    ways: int
    tried: int
    closest: Configuration | None


class Way(NamedTuple):
    """What may be tried: a bound of its seconds, and of how simple the best of it can be."""

    bound: float
    simplest: tuple[float, ...]
    what: Any


class Search:
    """The search for one model, cluster and wish."""

    def __init__(
        self, model: Model, cluster: Cluster, want: TrainingGoal, attention: AttentionForecast
    ):
        self.model, self.cluster, self.want = model, cluster, want
        self.attention = attention
        self.core_of = attention.core_of
        self.closest: Configuration | None = None
        self.refused: ValueError | None = None
        self._held: dict[Settings, Account] = {}  # of one way
        self._failed: list[Configuration] = []  # of it, too: those that do not fit
        self.least: tuple[float, Settings] | None = None  # of runs that were not looked at
        self.prune = True

    def run(self, top: int, progress: Progress | None = None, prune: bool = True) -> SearchResult:
        """The `top` fastest. prune: False tries all, which takes long and finds the same."""
        self.prune = prune
        variants: dict[tuple[int, ...], list[Way]] = {}
        for run in groups_of(self.model, self.cluster, self.want):
            way = variants.setdefault((run.tp, run.pp, run.cp, run.dp), [])
            way.append(Way(self.at_least(run), simplicity(plainest(run)), run))
        ways = [
            Way(min(each.bound for each in way), min(each.simplest for each in way), way)
            for way in variants.values()
        ]
        found, tried = self._explore(ways, top, self._best_variant, progress)
        if not found and self.closest is None and self.least is not None:
            self.closest = self._account(*self.timed([self.least[1]])[0])  # none was worth one
        closer: list[Configuration] = []
        for each in simplest_first(found):
            # Of those that follow only what may be faster yet if memory bars less: by an estimate.
            limit = min((one.seconds for one in closer), default=math.inf)
            if len(closer) < top or self.attention.step(unbarred(each.run)).seconds < limit:
                closer.append(self.best_of(each.run, thorough=True) or each)
        return SearchResult(simplest_first(closer)[:top], len(ways), tried, self.closest)

    def _best_variant(self, variants: list[Way]) -> Configuration | None:
        """The best run of one way: its micro-batches, virtual stages and expert-parallel ranks."""
        found, _ = self._explore(variants, 1, self.best_of)
        return simplest_first(found)[0] if found else None

    def _explore(
        self,
        ways: Sequence[Way],
        top: int,
        best: Callable[[Any], Configuration | None],
        progress: Progress | None = None,
    ) -> tuple[list[Configuration], int]:
        """The best of every way that may be among the `top` fastest, or that may tie with the
        fastest and be simpler than it, by time; and how many were tried.
        """
        found: list[Configuration] = []
        left = deque(sorted(ways, key=lambda way: (way.bound, way.simplest)))

        def take(way: Way) -> None:
            if (one := best(way.what)) is not None:
                insort(found, one, key=lambda each: each.seconds)
            if progress is not None:
                progress(len(ways) - len(left), len(ways))

        while left and not self._passed_over(left[0], found, top):
            take(left.popleft())
        tried = len(ways) - len(left)
        if found and left:
            limit = found[0].seconds * (1 + TIE)
            for way in sorted(left, key=lambda way: way.simplest):
                taken = simplest_first(found)[0]
                if way.simplest > simplicity(taken.run):
                    break
                if way.bound <= min(limit, taken.seconds) or (
                    way.bound <= limit and (way.simplest < simplicity(taken.run))
                ):
                    take(way)
                    tried += 1
        if progress is not None:
            progress(len(ways), len(ways))
        return found, tried

    def _passed_over(self, way: Way, found: Sequence[Configuration], top: int) -> bool:
        return self.prune and len(found) >= top and way.bound > found[top - 1].seconds

    def at_least(self, groups: Settings) -> float:
        """A bound of the time of all runs with these groups that memory may hold: without what it
        certainly cannot, all layers are recomputed or the optimizer is on the host.
        """
        tried = []
        for moved in sorted(self.want.values("optimizer_offload", (0.0, 1.0))):
            kept = replace(plainest(groups), optimizer_offload=moved)
            full = replace(kept, recompute="full", offload=1.0)
            if least_bytes(self.model, kept) <= self.cluster.room:
                tried.append(kept)
                break
            if least_bytes(self.model, full) <= self.cluster.room:
                stored = 0.0 if groups.cp == 1 or self.want.selects else 1.0
                tried.append(replace(full, offload=0.0, store=stored))
        # Where nothing may fit, what lacks least is still told.
        tried = tried or [plainest(groups)]
        return min(self.attention.step_at_least(run).seconds for run in tried)

    def best_of(self, groups: Settings, thorough: bool = False) -> Configuration | None:
        """The fastest run with these groups that fits, the simplest of a tie; None if none does.

        Where none fits, or with `thorough` where memory bars the fastest of them, a part of the
        store is tried too, which has a layout of its own, and halves of layers in chunks of rows;
        and after these all tenths of the store and of what lies on the host.
        """
        self._held, self._failed = {}, []
        try:
            whole, chunked = (list(options_of(groups, self.want, c)) for c in (False, True))
            if not self._possible([*whole, *chunked]):
                return None
            usual = [run for run in whole if run.store in (0.0, 1.0)]
            timed = self.timed(usual or whole)
            best = self._taken(timed)
            barred = best is None or timed[0][0].seconds * (1 + TIE) < best.seconds
            if best is None or (barred and thorough):
                done = {run for _, run in timed}
                others = [*(run for run in whole if run not in usual), *chunked]
                full = [time.seconds for time, run in timed if run.store == 1]
                if best is not None and full and best.seconds <= min(full) * (1 + TIE):
                    # Less of a store recomputes more.
                    others = [run for run in others if run.store in (0.0, 1.0)]
                others = self._possible(others)
                timed += [each for each in self.timed(others) if each[1] not in done]
                best = self._taken(timed)
                if best is not None or any(one.fit.device >= 0 for one in self._failed):
                    best = self._taken(self._finer(groups, best)) or best
            return best and self._by_kind(best)
        except ValueError as error:  # what is fixed does not go with these groups
            self.refused = error
            return None

    def _finer(
        self, groups: Settings, best: Configuration | None
    ) -> list[tuple[StepTime, Settings]]:
        """Runs with tenths of the store and of the offload that are faster than `best` by more than
        a tie, with their times; without stores for which the GPU has no room in any of them.
        """
        besides = attrgetter(
            "recompute", "optimizer_offload", "sequence_chunks", "mlp_tiles", "layout"
        )
        alike: dict[Any, dict[float, list[Settings]]] = {}  # but for both, then by store
        for chunked in (False, True):
            for run in options_of(groups, self.want, chunked, FRACTIONS, FRACTIONS):
                by_store = alike.setdefault(besides(run), {})
                by_store.setdefault(run.store, []).append(run)
        limit, on_host = best.seconds if best is not None else math.inf, attrgetter("offload")

        def faster(run: Settings) -> bool:
            """With what lies on the host moved in no time at all."""
            bound = self.attention.step(self.attention.settled(run)).seconds
            return bound * (1 + TIE) * (1 - ROUNDING) < limit

        possible: list[Settings] = []
        for by_store in alike.values():
            if limit < math.inf:  # more on the host never makes a run faster
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
        return [each for each in self.timed(possible) if each[0].seconds * (1 + TIE) < limit]

    def _taken(self, timed: Sequence[tuple[StepTime, Settings]]) -> Configuration | None:
        """The fastest of these that fits, or the simplest of those that tie with it."""
        ordered = sorted(timed, key=lambda each: (each[0].seconds, simplicity(each[1])))
        first = next(self._fitting(ordered), None)
        if first is None:
            return None
        limit = first.seconds * (1 + TIE)
        tied = [each for each in ordered if first.seconds <= each[0].seconds <= limit]
        tied.sort(key=lambda each: (simplicity(each[1]), each[0].seconds))
        return next(self._fitting(tied), first)

    def _possible(self, runs: Iterable[Settings]) -> list[Settings]:
        """Runs without those whose states and what layers leave are too large already."""
        kept = []
        for run in runs:
            need = least_bytes(self.model, run)
            if need <= self.cluster.room:
                kept.append(run)
            elif self.least is None or need < self.least[0]:
                self.least = need, run
        return kept

    def timed(self, runs: Iterable[Settings]) -> list[tuple[StepTime, Settings]]:
        """Runs with their times, the fastest first."""
        settled = map(self.attention.settled, runs)
        found = ((self.attention.step(run), run) for run in settled)
        return sorted(found, key=lambda each: (each[0].seconds, simplicity(each[1])))

    def _by_kind(self, found: Configuration) -> Configuration:
        """The same with an algorithm for each kind of layers, where that gains more than a tie and
        fits.
        """
        run = self.attention.by_kind(found.run)
        if run is found.run:
            return found
        each = self._account(self.attention.step(run), run)
        gains = each.seconds * (1 + TIE) < found.seconds
        return each if gains and each.fit.fits else found

    def _account(self, time: StepTime, run: Settings) -> Configuration:
        """A run with its account, which is remembered."""
        return Configuration(run, time, self._held_by(run), self.left(run))

    def _held_by(self, run: Settings) -> Account:
        if run not in self._held:
            self._held[run] = account(self.model, run, every=False, core_of=self.core_of)
        return self._held[run]

    def left(self, run: Settings) -> MemoryLeft:
        """What a run leaves of the memory, by an account that is remembered."""
        return fit(self._held_by(run), self.cluster)

    def _fitting(self, timed: Sequence[tuple[StepTime, Settings]]) -> Iterator[Configuration]:
        """Those that fit, in order."""
        possible = set(self._possible(run for _, run in timed))
        for time, run in timed:
            if run not in possible or any(_takes_more(run, one) for one in self._failed):
                continue
            each = self._account(time, run)
            if each.fit.fits:
                yield each
                continue
            self._failed.append(each)
            if self.closest is None or each.lacks < self.closest.lacks:
                self.closest = each


def _takes_more(run: Settings, failed: Configuration) -> bool:
    """Whether a run takes no less of what another lacks, from which only its fractions differ."""
    other = failed.run
    if run.store < other.store or run != replace(other, store=run.store, offload=run.offload):
        return False
    return (failed.fit.device < 0 and run.offload <= other.offload) or (
        failed.fit.host < 0 and run.offload >= other.offload
    )
