# SPDX-License-Identifier: Apache-2.0
"""Predictions for packed documents: lengths of the documents, and times of attention.

A pack has as many tokens as a sequence. The prediction assumes that all packs of a step are equal;
`--burst-pack documents` approximates this.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from .....autotune.candidates import sharing
from .....autotune.clusters import Cluster
from .....autotune.rates import Rates
from .....layout import Layout, make
from .....masks import Causal, Documents, Mask, Window
from .....schedule.cost import ring_spans
from .....schedule.demand import visibility_of
from .....schedule.dry_run import HeldBuffers
from .....schedule.tables import Grid
from .....schedule.topology import Topology
from .....units import tokens_of
from ..account.memory import Account, account
from ..account.operators import Core, LayerSizes
from ..account.rings import SHORT, CoreOf, core_of, most_held
from ..forecast.attention_time import AttentionTime, sizes_of, topology_of
from ..forecast.layer_time import visible
from ..forecast.step_time import StepTime, model_operations
from ..settings import Settings
from ..shapes.model import Model
from .attention_choice import AttentionForecast
from .search_space import TrainingGoal, padded

TITLE = "--packed"
Cut = Literal["balanced", "zigzag"]
SHORTEST = 16  # minimum tokens of a random document


class LogNormalLengths(NamedTuple):
    """Log-normal distribution of document lengths.

    Attributes:
        median: Median in tokens.
        sigma: Standard deviation of the natural logarithm.
        most: Maximum length in tokens.
    """

    median: int
    sigma: float
    most: int


# Distributions of lengths by name (docs/concepts/packing.md).
NAMED: Mapping[str, LogNormalLengths] = {
    "1k-to-32k": LogNormalLengths(1 << 10, 1.0, 1 << 15),
    "2k-to-512k": LogNormalLengths(1 << 11, 1.8, 1 << 19),
    "8k-to-1m": LogNormalLengths(1 << 13, 1.75, 1 << 20),
    "64k": LogNormalLengths(1 << 16, 0.3, 1 << 18),
}


def lengths_of(stated: str | Sequence[int], seq: int) -> tuple[int, ...]:
    """Return the lengths of the documents that fill one pack.

    The last document is shortened so that it fits.

    Args:
        stated: Key of `NAMED`, lengths such as "8K,32K,128K", the path of a file with lengths, or
            a list of lengths. Lengths are repeated in this order until the pack is full.
        seq: Tokens of a pack.

    Raises:
        ValueError: `stated` contains no length, or a length exceeds `seq`.
    """
    if isinstance(stated, str) and stated in NAMED:
        kind, random = NAMED[stated], np.random.default_rng(0)
        count = 1 + seq // SHORTEST
        drawn = kind.median * np.exp(kind.sigma * random.standard_normal(min(count, 1 << 20)))
        lengths: list[int] = np.clip(drawn, SHORTEST, min(kind.most, seq)).astype(int).tolist()
    elif isinstance(stated, str):
        lengths = [tokens_of(word, TITLE) for word in _words(stated)]
    else:
        lengths = [tokens_of(length, TITLE) for length in stated]
    if not lengths:
        raise ValueError(
            f"{TITLE} {stated!r} contains no length; use lengths such as 8K,32K, a file of "
            f"lengths, or one of {', '.join(NAMED)}"
        )
    longest = max(lengths)
    if longest > seq:
        raise ValueError(
            f"{TITLE}: a document of {longest:,} tokens does not fit into a pack of --seq {seq:,}; "
            "use lengths of at most --seq, or a longer --seq"
        )
    filled, have = [], 0
    while have < seq:
        length = min(lengths[len(filled) % len(lengths)], seq - have)
        filled.append(length)
        have += length
    return tuple(filled)


def packed_pins(pinned: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fixed settings, together with the settings that packs require.

    Packs require one pack per micro-batch and no row chunks. `layout` is removed, because
    `PackedForecast.cut` contains it.

    Args:
        pinned: Settings that the user has fixed.

    Raises:
        ValueError: A fixed setting is not supported with packs.
    """
    cut_of(pinned)
    if pinned.get("sequence_chunks", 1) != 1:
        raise ValueError(
            f"--sequence-chunks {pinned['sequence_chunks']}: row chunks are not supported for "
            f"packs; remove --sequence-chunks or {TITLE}"
        )
    if pinned.get("micro_batch", 1) != 1:
        raise ValueError(
            f"--micro-batch {pinned['micro_batch']}: a micro-batch must be one pack; use "
            f"--micro-batch 1, or remove {TITLE}"
        )
    left = {name: value for name, value in pinned.items() if name != "layout"}
    return {"micro_batch": 1, "sequence_chunks": 1, **left}


def cut_of(pinned: Mapping[str, Any]) -> Cut:
    """Return the layout of packs over ranks: the fixed layout, or "balanced" if none is fixed.

    Args:
        pinned: Settings that the user has fixed.

    Raises:
        ValueError: The forecast does not support packs with the fixed layout.
    """
    layout = pinned.get("layout", "balanced")
    if layout not in get_args(Cut):
        raise ValueError(
            f"--layout {layout} is not supported for packs; use balanced or zigzag, or remove "
            f"--layout or {TITLE}"
        )
    return layout


def _words(stated: str) -> list[str]:
    path = Path(stated)
    listed = bool(re.fullmatch(r"[\dkKmM., ]+", stated))
    if not listed and not path.is_file():
        raise ValueError(
            f"{TITLE} must be lengths such as 8K,32K,128K, a file of lengths, or one of "
            f"{', '.join(NAMED)}, got {stated}"
        )
    return re.findall(r"[^\s,\[\]]+", stated if listed else path.read_text())


class PackedForecast(AttentionForecast):
    """Attention settings and times for packed documents of one model on one cluster.

    Args:
        model: Shape of the model.
        cluster: Cluster of GPUs.
        pinned: Fields of `Settings` that the user has fixed.
        lengths: Lengths of the documents of a pack in tokens.
        cut: Layout over several ranks: "balanced" or "zigzag". Zigzag pads every document to a
            multiple of 2 x CP and cuts it, as Megatron does.
    """

    def __init__(
        self,
        model: Model,
        cluster: Cluster,
        pinned: Mapping[str, Any] | None = None,
        lengths: Sequence[int] = (),
        cut: Cut = "balanced",
    ):
        if model.hybrid is not None:
            raise ValueError(
                f"{TITLE}: the hybrid attention of {model.name} is not predicted for packs; "
                f"remove {TITLE}"
            )
        super().__init__(model, cluster, pinned)
        self.lengths = tuple(lengths)
        self.cut: Cut = cut
        self._layouts: dict[tuple[int, int], Layout] = {}
        self._buffers: dict[Any, tuple[HeldBuffers, HeldBuffers]] = {}

    def step(self, run: Settings) -> StepTime:
        """Return the predicted time of a step of a run. Tokens and MFU exclude padding."""
        time, tokens = super().step(run), sum(self.lengths)
        share = model_operations(self.model, round(self.effective)) / model_operations(
            self.model, run.seq
        )
        return replace(
            time, mfu=time.mfu * share * tokens / run.seq, tokens=time.tokens // run.seq * tokens
        )

    def account_of(self, run: Settings, every: bool = False) -> Account:
        """Return the predicted memory of a run with these packs, including padding.

        Args:
            run: Settings of the run.
            every: Keep all snapshots of the memory, as in `account`.

        Raises:
            ValueError: The settings do not support packs.
        """
        packed_pins({"sequence_chunks": run.sequence_chunks, "micro_batch": run.micro_batch})
        documents = self.lengths if self.cut == "zigzag" else ()
        rows = TrainingGoal(sum(self.lengths), 1, documents=documents).rows(run.tp, run.cp)
        return account(self.model, replace(run, seq=rows), every, self.core_of)

    @cached_property
    def core_of(self) -> CoreOf:
        """Function that returns the memory of core attention in a layer, for these documents."""
        return self._core_of

    def _core_of(self, x: LayerSizes, run: Settings, window: int = 0) -> Core:
        return core_of(x, run, partial(self._most, run, window), window)

    def _most(
        self, run: Settings, window: int, algorithm: str, _layout: str, size: int, _intra: int,
        side: str, wire: bool, packed: bool, joined: bool | None, _before: int | None,
        _host: bool, streams: bool = False,
    ) -> tuple[HeldBuffers, HeldBuffers]:  # fmt: skip
        """Return the sizes of ring buffers as `rings.ring_held` does, for these documents.

        The documents determine the mask and the layout. Arguments whose names begin with an
        underscore are not used.
        """
        key = (run.tp, run.cp, run.ulysses, run.placement, window, algorithm, side, wire, packed,
               streams)  # fmt: skip
        if key not in self._buffers:
            topology, sizes = topology_of(self.cluster, run), sizes_of(self.model, run)
            mask = self.mask(run) & Window(window - 1, 0) if window else self.mask(run)
            spans = ring_spans(self.layout(run), topology, run.seq)
            grid = Grid(topology.inter_size, topology.intra_size)
            forward, backward = most_held(
                algorithm, grid, visibility_of(mask, spans, spans, joined, streams),
                sizes.shared(run.ulysses), side, range(size), wire=wire, packed=packed,
            )  # fmt: skip
            of_short = SHORT * size / run.seq
            self._buffers[key] = forward.scaled(of_short), backward.scaled(of_short)
        return self._buffers[key]

    def _on(self, cluster: Cluster) -> AttentionForecast:
        return PackedForecast(self.model, cluster, self.pinned, self.lengths, self.cut)

    def at_least(
        self, model: Model, cluster: Cluster, run: Settings, window: int = 0, kind: str = ""
    ) -> AttentionTime:
        """Return a lower bound of `time`, which does not include padding of documents.

        The bound is computed for one rank. Fixed settings that require several ranks are ignored.
        """
        if not self.pinned:
            return super().at_least(model, cluster, run, window=window)
        return self._free.at_least(model, cluster, run, window=window)

    @cached_property
    def _free(self) -> PackedForecast:
        """Forecast for the same documents without fixed settings."""
        return PackedForecast(self.model, self.cluster, None, self.lengths, self.cut)

    @property
    def effective(self) -> float:
        """Tokens of a sequence with as many visible keys per query as the pack has on average."""
        lengths = np.array(self.lengths, dtype=float)
        return float((lengths**2).sum() / lengths.sum())

    def rates(self) -> Rates:
        """Return the compute rate and the link rates of a rank for packed documents."""
        return self.cluster.rank_rates(documents=True)

    def bounds(self, run: Settings) -> np.ndarray:
        """Return the boundaries of padded documents in the pack, starting with 0, in tokens.

        Padding at the end of the pack counts as one more document.
        """
        lengths = list(self.lengths)
        if self.cut == "zigzag":
            lengths = [padded(length, run.cp) for length in lengths]
            if (padding := run.seq - sum(lengths)) > 0:
                lengths.append(padding)
        return np.concatenate([[0], np.cumsum(lengths)])

    def mask(self, run: Settings) -> Mask:
        """Return the mask of a pack, which is causal within each document."""
        bounds = self.bounds(run)
        return Documents(bounds, range(len(self.lengths), len(bounds) - 1)) & Causal()

    def layout(self, run: Settings) -> Layout:
        """Return the layout of a pack over the context-parallel ranks and nodes of the run."""
        if run.cp == 1:
            return make("contiguous", cp_size=1)
        if self.cut == "zigzag":
            return make("zigzag", cp_size=run.cp, cu_seqlens=self.bounds(run))
        key = run.cp, self.cluster.cp_per_node(run.tp, run.cp)
        if key not in self._layouts:
            self._layouts[key] = make(
                "balanced", cp_size=run.cp, cu_seqlens=self.bounds(run), per_node=key[1]
            )
        return self._layouts[key]

    def by_kind(self, run: Settings) -> Settings:
        """Return `run` unchanged: all layers of packed documents use one algorithm.

        The time of sliding-window layers is predicted as a fraction of the time of full attention
        (`windowed`), so the fastest algorithm is predicted to be the same.
        """
        return run

    def timed(self, run: Settings, window: int = 0, kind: str = "") -> AttentionTime:
        """Predict the time of an attention call; for a window, estimate it from full attention."""
        if window:
            return windowed(self.time(self.model, self.cluster, run), window, round(self.effective))
        taken = self.candidate(run)
        here = self.cluster.cp_per_node(run.tp, run.cp)
        topology = Topology(run.cp, here, taken.ulysses, taken.placement)
        sizes = sizes_of(self.model, run).shared(taken.ulysses)
        exchange = sharing(topology, sizes, self.rates(), run.sequence_chunks > 1,
                           self.cluster.nodes(run.tp).per_nic)  # fmt: skip
        planning = self.cluster.host_time.plan if run.cp > 1 else 0.0
        return AttentionTime.of(taken.forward, taken.backward, exchange, planning)


def windowed(core: AttentionTime, window: int, seq: int) -> AttentionTime:
    """Estimate the time of sliding-window attention from the time of full attention.

    The estimate is proportional to the number of visible pairs. It ignores imbalance between ranks,
    and that some keys need not be sent.

    Args:
        core: Time of full attention.
        window: Tokens that a query attends to.
        seq: Tokens of the sequence.
    """
    share = visible(seq, window) / visible(seq)
    return replace(
        core, forward=core.forward * share, backward=core.backward * share,
        busy={name: share * taken for name, taken in core.busy.items()},
        host=(share * core.host[0], share * core.host[1]),
    )  # fmt: skip
