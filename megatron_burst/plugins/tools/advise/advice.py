# SPDX-License-Identifier: Apache-2.0
"""`mb.advise`: which settings to train with, how fast and how large, and why.

Joins the search and the flags to paste. Decides what is refused: models, lengths and clusters with
which nothing could run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from ....autotune import cluster_file
from ....autotune.clusters import Cluster
from ....units import tokens_of
from .account.memory import account
from .kernel import AssumedKernel, of_forecast
from .rivals import Rival, fastest, rivals
from .search import model_flags, pasted
from .search.attention_choice import AttentionForecast
from .search.job import job_of
from .search.longest import longest
from .search.packed import Cut, PackedForecast, cut_of, lengths_of, packed_pins
from .search.remedies import does_not_fit
from .search.search import Configuration, Progress, Search
from .search.search_space import TrainingGoal, check_wanted, of_model
from .settings import flag_of
from .shapes import models
from .shapes.model import Model

STEP = 4 * 2**20  # tokens of a step, where nobody says
LONGEST = "longest"  # in place of a length


class DoesNotFit(ValueError):
    """No way to run this model on this cluster fits its memory."""


@dataclass(frozen=True)
class Advice:
    """What `mb.advise` found.

    model, cluster, want: what was asked for; search: with what. ranked: runs that fit, the one to
    take first, then by time; of each way to share the GPUs out
    (TP, PP, CP, DP) the best. ways: how many ways there are; tried: those that were not passed
    over by a bound of their time. lengths: of the documents of a pack, if there are any.
    """

    model: Model
    cluster: Cluster
    want: TrainingGoal
    ranked: tuple[Configuration, ...]
    ways: int
    tried: int
    lengths: tuple[int, ...] = field(default=(), repr=False)
    search: Search | None = field(default=None, repr=False, compare=False)

    @property
    def best(self) -> Configuration:
        """The run to take: the fastest, or the simplest of those that tie with it."""
        return self.ranked[0]

    @cached_property
    def rivals(self) -> list[Rival]:
        """What Megatron's own context parallelism takes with the parallel sizes of the best run."""
        return rivals(self.model, self.cluster, self.best.run, self.lengths)

    @cached_property
    def fastest_rival(self) -> Rival | None:
        """The fastest of them that fits, with parallel sizes of its own; None if nothing fits."""
        return fastest(self.model, self.cluster, self.want, lengths=self.lengths)

    @cached_property
    def by_kind(self) -> str:
        """Gain of an algorithm for each kind of layers in the best run, in words; "" if all layers
        have one algorithm.
        """
        run = self.best.run
        if not run.by_kind:
            return ""
        assert self.search is not None
        alike = self.search.attention.step(run.alike()).seconds
        own = ", ".join(f"{algorithm} in {kind} layers" for kind, algorithm in run.by_kind.items())
        return (
            f"--context-parallel-algo auto: {own}, a step {1 - self.best.seconds / alike:.1%} "
            f"shorter than with {run.algorithm} in all layers"
        )

    @cached_property
    def kernel(self) -> AssumedKernel:
        """The attention kernel that times assume, and the best run's step with other kernels."""
        assert self.search is not None
        attention, run = self.search.attention, self.best.run

        def seconds_on(cluster: Cluster) -> float:
            return attention.on(cluster).step(run).seconds

        return of_forecast(self.cluster, seconds_on, bool(self.lengths))

    @property
    def cut(self) -> Cut | Literal[""]:
        """The layout of packs; "" where there are none."""
        return "zigzag" if self.want.documents else "balanced" if self.lengths else ""

    def flags(self, index: int = 0) -> list[str]:
        """Flags for `megatron-burst pretrain` and Megatron-LM's script of the model, one with its
        values per entry, quoted for a shell. `no_flag_for` names what they do not say.

        index: of `ranked`.
        """
        return pasted.flags_of(self.model, self.ranked[index].run, self.cut)

    @property
    def no_flag_for(self) -> list[str]:
        """A sentence for each thing of the model that Megatron-LM has no flag for."""
        return model_flags.lacking(self.model)

    def job(self, index: int = 0, train_iters: int | None = None) -> str:
        """A script for Slurm's sbatch that trains with `flags`.

        Args:
            index: Of `ranked`.
            train_iters: Steps of the whole run, which give the time limit; None: `SET_ME`.

        Raises:
            ValueError: For a number of steps below 1.
        """
        if train_iters is not None and (type(train_iters) is not int or train_iters < 1):
            raise ValueError(f"--train-iters must be an integer from 1 on, got {train_iters!r}")
        taken, cluster = self.ranked[index], self.cluster
        _, high = cluster.band.around(taken.seconds)
        return job_of(
            self.model, taken.run, *nodes_and_gpus(cluster),
            f"{self.model.name}, sequences of {taken.run.seq:,} tokens, on {cluster.gpus} x "
            f"{cluster.gpu.name}",
            self.cut, (taken.seconds, high), train_iters,
        )  # fmt: skip

    @property
    def why(self) -> str:
        """The four parts of the best run's step that take most time, with their shares."""
        time = self.best.time
        parts = sorted(time.parts.items(), key=lambda part: -part[1])
        return ", ".join(f"{name} {taken / time.seconds:.0%}" for name, taken in parts[:4])


def advise(
    model: str | Model,
    cluster: str | Path | Cluster,
    *,
    seq: int | str,
    gpus: int | None = None,
    per_node: int = 8,
    tokens_per_step: int | str | None = None,
    packed: str | Sequence[int] | None = None,
    top: int = 10,
    progress: Progress | None = None,
    **fixed: Any,
) -> Advice:
    """Search for the fastest settings that fit.

    model: a name, the path of a Hugging Face `config.json`, or `mb.Model`. cluster: the name of a
    GPU (with gpus and per_node), the path of a cluster file, or `mb.Cluster`. seq: tokens of a
    sequence, 2**20 or "1M"; "longest" for the longest that fits, with everything allowed that is
    not fixed, and then the fastest run of that length. tokens_per_step: over all ranks (4M, or one
    sequence if that is more). packed: lengths of documents that fill packs of `seq` tokens: a list,
    a file of them, or a name of `packed.NAMED`. fixed: fields of `mb.Settings` that are not
    searched: `tp=8, store=0.5`.
    top: how many runs to rank. progress: called with how many ways are done, and of how many::

        advice = mb.advise("llama3-8b", "h100", gpus=64, seq="1M")
        print(advice.best.run, advice.why, *advice.flags(), sep="\\n")

    Raises ValueError naming what is invalid; `advice.DoesNotFit` where nothing
    fits, with what would make it fit.
    """
    model = models.named(model) if isinstance(model, str) else model
    cluster = cluster_of(cluster, gpus, per_node)
    known = of_model(model)
    if seq == LONGEST:
        if packed is not None or tokens_per_step is not None:
            raise ValueError(
                "--longest finds one length, of sequences without documents and of steps that are "
                "multiples of it: leave --packed and --tokens-per-step out, or give --seq"
            )
        goal = TrainingGoal(STEP, 1, fixed, **known)
        run = longest(model, cluster, goal, AttentionForecast(model, cluster, fixed)).run
        seq, tokens_per_step = run.seq, run.seq * run.dp * max(1, STEP // (run.seq * run.dp))
    want = replace(wanted_of(seq, tokens_per_step, fixed), **known)
    check_wanted(model, cluster, want)
    if type(top) is not int or top < 1:
        raise ValueError(f"--top must be an integer from 1 on, got {top!r}")
    attention, lengths = AttentionForecast(model, cluster, want.pinned), ()
    if packed is not None:
        lengths = lengths_of(packed, want.seq)
        cut = cut_of(want.pinned)
        want = replace(
            want, pinned=packed_pins(want.pinned), documents=lengths if cut == "zigzag" else ()
        )
        attention = PackedForecast(model, cluster, want.pinned, lengths, cut)
    search = Search(model, cluster, want, attention)
    found = search.run(top, progress)
    if not found.ranked:
        if found.closest is None:
            raise search.refused or ValueError(_together(want))
        held = attention.held if isinstance(attention, PackedForecast) else None
        raise DoesNotFit(does_not_fit(found.closest.account, cluster, held))
    # With all moments of the account.
    ranked = tuple(
        replace(each, account=account(model, each.run, core_of=search.core_of))
        for each in found.ranked
    )
    return Advice(model, cluster, want, ranked, found.ways, found.tried, lengths, search)


def nodes_and_gpus(cluster: Cluster) -> tuple[int, int]:
    """How many nodes there are, and GPUs of each."""
    per_node = min(cluster.gpus, cluster.ranks_per_node)
    return cluster.gpus // per_node, per_node


def _together(want: TrainingGoal) -> str:
    """Why no way was tried: of what is fixed only a store does not go with all of them."""
    said = " ".join(f"{flag_of(name)} {value}" for name, value in want.pinned.items())
    return (
        f"{said}: no run has all of these; --store is of attention over several context-parallel "
        "ranks, so it needs --cp above 1, and --recompute full"
    )


def cluster_of(cluster: str | Path | Cluster, gpus: int | None, per_node: int) -> Cluster:
    """A cluster by the name of its GPU, from a file, or as it is."""
    if isinstance(cluster, Cluster):
        return cluster if gpus is None else replace(cluster, gpus=gpus)
    if str(cluster).endswith(".toml"):
        read = cluster_file.read(cluster)
        return read if gpus is None else replace(read, gpus=gpus)
    if gpus is None:
        raise ValueError(f"gpus: how many {cluster}? Give gpus=64, or a cluster file")
    return Cluster(str(cluster), gpus, per_node)  # pyright: ignore[reportArgumentType]


def wanted_of(
    seq: int | str, tokens_per_step: int | str | None, fixed: dict[str, Any]
) -> TrainingGoal:
    """What is to be trained. ValueError unless sequences fill a step."""
    length = tokens_of(seq, "--seq")
    step = max(STEP, length) if tokens_per_step is None else None
    step = tokens_of(tokens_per_step, "--tokens-per-step") if step is None else step
    if tokens_per_step is None:
        step -= step % length
    if step % length:
        near = max(1, round(step / length)) * length
        raise ValueError(
            f"--tokens-per-step {step:,} is not a multiple of --seq {length:,}: take {near}, say"
        )
    return TrainingGoal(length, step // length, fixed)
