# SPDX-License-Identifier: Apache-2.0
"""Choice of attention settings and prediction of attention times, with caches for a search.

`autotune.select` makes the choice, as for `--context-parallel-algo auto` in training. Predictions
therefore use the same attention settings as training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import Any

from .....autotune import select
from .....autotune.candidates import Candidate, FixedSettings, GridSchedules, Workload, grids
from .....autotune.clusters import Cluster
from .....autotune.places import Nodes
from .....autotune.rates import Rates
from .....layout import Layout, make
from .....masks import Causal, Mask, Window
from .....options import ring_algorithm
from .....schedule.head_shares import Share
from .....schedule.sizes import Sizes
from .....schedule.tables import SIDES
from .....schedule.topology import Topology, alternatives
from ..account.rings import CoreOf, cached_core_of
from ..forecast.attention_time import (
    AttentionTime,
    attention_time,
    cached_ring_passes,
    sizes_of,
    topology_of,
)
from ..forecast.scan_time import scan_seconds, scan_time
from ..forecast.step_time import StepTime, step_time
from ..settings import Settings
from ..shapes.layer_kinds import CHUNKED, SOFTMAX, WINDOW
from ..shapes.models import Model

# Fields of `Settings` on which the time of an attention call depends.
TIME_INPUTS = (
    "seq", "tp", "cp", "micro_batch", "sequence_chunks", "algorithm", "layout", "side", "wire",
    "intra", "ulysses", "placement", "inner", "head_chunks", "relay_stream",
)  # fmt: skip
CHOICE_OUTPUTS = ("algorithm", "side", "head_chunks", "ulysses", "placement")
# CHOICE_INPUTS: fields of `Settings` on which the choice for a run without row chunks depends.
_NO_INPUTS = *CHOICE_OUTPUTS, "sequence_chunks"
CHOICE_INPUTS = tuple(name for name in TIME_INPUTS if name not in _NO_INPUTS)
CACHED_GRIDS = 24  # grids with cached schedules; one number of ranks has fewer grids
LARGEST_RING = 128  # ranks of a ring; larger rings are tried only if no smaller ring is possible


class AttentionForecast:
    """Attention settings and predicted times of one model on one cluster, with caches.

    Args:
        model: Shape of the model.
        cluster: Cluster of GPUs.
        pinned: Fields of `Settings` that the user has fixed. With algorithm "hybrid" or "ulysses",
            only grids in which ranks share heads are tried.
    """

    def __init__(self, model: Model, cluster: Cluster, pinned: Mapping[str, Any] | None = None):
        self.model, self.cluster, self.pinned = model, cluster, dict(pinned or {})
        self._times: dict[Any, AttentionTime] = {}
        self.rings = cached_ring_passes()
        self.states = partial(scan_seconds, timed=cache(scan_time))
        self._choices: dict[Any, dict[str, Any]] = {}
        self._kinds: dict[Any, str] = {}
        self._schedules: dict[Any, GridSchedules] = {}

    @cached_property
    def core_of(self) -> CoreOf:
        """Function `rings.core_of` with a cache; it returns the memory of core attention."""
        return cached_core_of()

    def on(self, cluster: Cluster) -> AttentionForecast:
        """Return the forecast for the same model on another cluster."""
        forecast = self._on(cluster)
        forecast._schedules = self._schedules
        return forecast

    def _on(self, cluster: Cluster) -> AttentionForecast:
        return AttentionForecast(self.model, cluster, self.pinned)

    def step(self, run: Settings) -> StepTime:
        """Return the predicted time of a step of a run."""
        return step_time(self.model, self.cluster, run, self.time, self.states)

    def step_at_least(self, run: Settings) -> StepTime:
        """Return a lower bound of `step` that holds for all attention settings."""
        return step_time(self.model, self.cluster, run, self.at_least, self.states, True)

    def settled(self, run: Settings) -> Settings:
        """Return the run with the attention settings that are predicted to be fastest.

        All layers have the same settings.
        """
        if run.cp == 1:
            return run
        if self.model.hybrid is not None:  # each set of keys has the fastest algorithm
            algorithm = self.pinned.get("algorithm", "auto")
            return replace(run.uniform(), algorithm=algorithm, side="kv", head_chunks=1, ulysses=1)
        key = tuple(getattr(run, name) for name in CHOICE_INPUTS)
        if key not in self._choices:
            taken = self.candidate(run)
            self._choices[key] = {name: getattr(taken, name) for name in CHOICE_OUTPUTS}
        settled = replace(run.uniform(), **self._choices[key])
        return settled if run.sequence_chunks == 1 else self._in_chunks(settled)

    def by_kind(self, run: Settings) -> Settings:
        """Return the run with the fastest predicted algorithm for each kind of layer.

        Kinds are full attention, sliding windows and chunked attention. `--context-parallel-algo
        auto` makes the same choice. All kinds use the same other settings: the tensors that
        backward sends, the number of head chunks and the sizes of the rings. If the user has fixed
        an algorithm (`pinned`), the run is returned unchanged.
        """
        kinds = [kind for kind in SOFTMAX if kind in self.model.kinds]
        pinned = self.pinned.get("algorithm", "auto") != "auto"
        if len(kinds) < 2 or run.ulysses == run.cp or pinned:
            return run
        own = {
            "window_algorithm": self._of_kind(run, WINDOW),
            "chunk_algorithm": self._of_kind(run, CHUNKED),
        }
        return replace(run, **own) if any(own.values()) else run

    def _of_kind(self, run: Settings, kind: str) -> str | None:
        """Return the fastest algorithm for a kind of layer; None if it is the run's algorithm."""
        window = self.model.window_of(kind, run.seq)
        if kind not in self.model.kinds or not window:
            return None
        key = kind, self._key(run)
        if key not in self._kinds:
            mask = Window(window - 1, 0)
            work = Workload(sizes_of(self.model, run), mask, self.layout(run),
                            streams=run.relay_stream)  # fmt: skip
            shared = FixedSettings(None, run.side, run.head_chunks)
            grid, nodes = topology_of(self.cluster, run), self.cluster.nodes(run.tp)
            taken = select.fastest(work, [grid], self.cluster.rank_rates(), shared, nodes)
            self._kinds[key] = ring_algorithm(taken.algorithm)
        own = self._kinds[key]
        return None if own == ring_algorithm(run.algorithm) else own

    def _in_chunks(self, run: Settings) -> Settings:
        """Return the run with the fastest `side` (tensors sent in backward) for row chunks.

        Backward sends keys once per row chunk, but queries only once in total.
        """
        key = self._key(run)
        if key not in self._choices:
            sides = [self.pinned["side"]] if "side" in self.pinned else SIDES
            options = [replace(run, side=side) for side in sides]
            best = min(
                options,
                key=lambda option: self.time(self.model, self.cluster, option).seconds,
            )
            self._choices[key] = {"side": best.side}
        return replace(run, **self._choices[key])

    def time(
        self, model: Model, cluster: Cluster, run: Settings, window: int = 0, kind: str = ""
    ) -> AttentionTime:
        """Return `attention_time` of a run, from a cache."""
        key = self._key(run), window, kind
        if key not in self._times:
            self._times[key] = self.timed(run, window, kind)
        return self._times[key]

    def timed(self, run: Settings, window: int = 0, kind: str = "") -> AttentionTime:
        """Predict the time of an attention call without the cache of `time`."""
        return attention_time(self.model, self.cluster, run, self.rings, window, kind)

    def at_least(
        self, model: Model, cluster: Cluster, run: Settings, window: int = 0, kind: str = ""
    ) -> AttentionTime:
        """Return a lower bound of `time`.

        The bound assumes no communication, equal work on all ranks, and one kernel call.
        """
        alone = replace(run, cp=1, ulysses=1, algorithm="burst", head_chunks=1, sequence_chunks=1,
                        intra=1, inner=None, side="kv", layout="contiguous")  # fmt: skip
        one_rank = self.time(model, cluster, alone, window=window, kind=kind)
        computing = {"compute": one_rank.busy["compute"] / run.cp, "intra": 0.0, "inter": 0.0}
        return replace(
            one_rank, forward=one_rank.forward / run.cp, backward=one_rank.backward / run.cp,
            exchange=(0.0, 0.0), busy=computing,
        )  # fmt: skip

    def _key(self, run: Settings) -> tuple[Any, ...]:
        return *(getattr(run, name) for name in TIME_INPUTS), run.keys_on_host

    def candidate(self, run: Settings) -> Candidate:
        """Return the attention settings that are fastest for this run, as a `Candidate`."""
        work = Workload(sizes_of(self.model, run), self.mask(run), self.layout(run),
                        streams=run.relay_stream)  # fmt: skip
        if (index := self.model.indexer) is not None:
            work = replace(work, attended=index.top_k, latent=True)
        return select.fastest(work, self._grids(run, work.sizes), self.rates(),
                              self._fixed(), self.cluster.nodes(run.tp),
                              partial(self._schedules_of, run.layout))  # fmt: skip

    def _schedules_of(
        self, layout: str, workload: Workload, topology: Topology, nodes: Nodes | None
    ) -> GridSchedules:
        """Return the schedules of an attention call on a grid of ranks.

        Recently used schedules are cached, because successive runs often have the same schedules.
        """
        key = layout, workload.seq_len, topology, nodes, workload.streams
        cached = self._schedules
        schedules = cached.pop(key, None) or GridSchedules(workload, topology, nodes)
        if topology.ring_size <= LARGEST_RING:
            cached[key] = schedules
        while len(cached) > CACHED_GRIDS:
            del cached[next(iter(cached))]
        return schedules

    def rates(self) -> Rates:
        """Return the compute rate and the link rates of a rank."""
        return self.cluster.rank_rates()

    def mask(self, run: Settings) -> Mask:
        """Return the attention mask of full-attention layers."""
        return Causal()

    def layout(self, run: Settings) -> Layout:
        """Return the layout of a run."""
        return make(run.layout, cp_size=run.cp)

    def _fixed(self) -> FixedSettings:
        sparse = self.model.indexer is not None
        algorithm, side = (self.pinned.get(name, "auto") for name in ("algorithm", "side"))
        return FixedSettings(
            None if algorithm == "auto" else ring_algorithm(algorithm),
            "kv" if sparse else None if side == "auto" else side,
            1 if sparse else self.pinned.get("head_chunks"),
        )

    def _grids(self, run: Settings, sizes: Sizes) -> list[Topology]:
        """Return the grids of ranks that are compatible with the fixed settings.

        Grids whose rings have more than `LARGEST_RING` ranks are excluded if there are other grids.
        """
        all_grids = grids(run.cp, self.cluster.cp_per_node(run.tp, run.cp), sizes)
        size = {"ulysses": run.cp}.get(self.pinned.get("algorithm", ""))
        size = self.pinned.get("ulysses", size if self.model.indexer is None else 1)
        placement, chunks = self.pinned.get("placement"), self.pinned.get("head_chunks") or 1
        chosen = [
            grid
            for grid in all_grids
            if size in (None, grid.ulysses)
            and (
                size is not None or Share(sizes.kv_heads, grid.ulysses).heads_per_rank % chunks == 0
            )
            and (grid.ulysses == 1 or placement in (None, grid.placement))
        ]
        if self.pinned.get("algorithm", "auto") not in ("auto", "ulysses") and size is None:
            # Not all ranks share heads, so that they form rings.
            chosen = [grid for grid in chosen if grid.ulysses < max(2, run.cp)]
        if self.pinned.get("algorithm") == "hybrid" and size is None:
            chosen = [grid for grid in chosen if 1 < grid.ulysses < run.cp]
        parts = self.pinned.get("head_chunks", 1)
        whole_heads = [grid for grid in chosen if sizes.shared(grid.ulysses).kv_heads % parts == 0]
        chosen = whole_heads or chosen
        if not chosen:
            groups = f"--ulysses {size}" if size else f"--algorithm {self.pinned.get('algorithm')}"
            raise ValueError(
                f"{groups}: no such groups of the --cp {run.cp} ranks can share the {sizes.heads} "
                f"query and {sizes.kv_heads} key/value heads of a rank; use --ulysses "
                f"{alternatives(sorted({grid.ulysses for grid in all_grids}))}"
            )
        return [grid for grid in chosen if grid.ring_size <= LARGEST_RING] or chosen
