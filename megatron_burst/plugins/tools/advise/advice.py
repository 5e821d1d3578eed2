# SPDX-License-Identifier: Apache-2.0
"""`mb.advise`: the fastest settings that fit, with their time, memory and reasons.

This module joins the search and the flags to paste. It refuses models, lengths and clusters with
which nothing can run.
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

STEP = 4 * 2**20  # default tokens of a step
LONGEST = "longest"  # instead of a length


class DoesNotFit(ValueError):
    """No way to run this model on this cluster fits its memory."""


@dataclass(frozen=True)
class Advice:
    """The result of `mb.advise`.

    Attributes:
        model: The model.
        cluster: The cluster.
        want: The goal of the search.
        ranked: Runs that fit: the best run of each way to divide the GPUs into groups (TP, PP, CP,
            DP). The recommended run is first, the others are ordered by time.
        ways: Number of ways.
        tried: Number of ways that a bound of their time did not exclude.
        lengths: Lengths of the documents of a pack, if there are any.
        search: The search.
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
        """The recommended run: the fastest, or the simplest of a tie with it."""
        return self.ranked[0]

    @cached_property
    def rivals(self) -> list[Rival]:
        """Megatron's own context parallelism with the parallel sizes of the best run."""
        return rivals(self.model, self.cluster, self.best.run, self.lengths)

    @cached_property
    def fastest_rival(self) -> Rival | None:
        """The fastest kind of Megatron's own context parallelism, with its own parallel sizes.

        None if no kind fits.
        """
        return fastest(self.model, self.cluster, self.want, lengths=self.lengths)

    @cached_property
    def by_kind(self) -> str:
        """The gain of an algorithm for each kind of layers in the best run, in words.

        It is "" if all layers have one algorithm.
        """
        run = self.best.run
        if not run.by_kind:
            return ""
        assert self.search is not None
        uniform_seconds = self.search.attention.step(run.uniform()).seconds
        own = ", ".join(f"{algorithm} in {kind} layers" for kind, algorithm in run.by_kind.items())
        return (
            f"--context-parallel-algo auto: {own}, a step "
            f"{1 - self.best.seconds / uniform_seconds:.1%} shorter than with {run.algorithm} in "
            "all layers"
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
        """The layout of packs; "" without packs."""
        return "zigzag" if self.want.documents else "balanced" if self.lengths else ""

    def flags(self, index: int = 0) -> list[str]:
        """Return flags for `megatron-burst pretrain` and Megatron-LM's script of the model.

        They are quoted for a shell, each with its values. `no_flag_for` names what they do not
        express.

        Args:
            index: Index in `ranked`.
        """
        return pasted.flags_of(self.model, self.ranked[index].run, self.cut)

    @property
    def no_flag_for(self) -> list[str]:
        """A sentence for each property of the model that has no flag in Megatron-LM."""
        return model_flags.lacking(self.model)

    def job(self, index: int = 0, train_iters: int | None = None) -> str:
        """Return a script for Slurm's sbatch that trains with `flags`.

        Args:
            index: Index in `ranked`.
            train_iters: Steps of the whole run, which give the time limit; None: `SET_ME`.

        Raises:
            ValueError: The number of steps is below 1.
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
        """The four longest parts of the best run's step, with their shares."""
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
    r"""Search for the fastest settings that fit.

    Example::

        advice = mb.advise("llama3-8b", "h100", gpus=64, seq="1M")
        print(advice.best.run, advice.why, *advice.flags(), sep="\n")

    Args:
        model: A name, the path of a Hugging Face `config.json`, or `mb.Model`.
        cluster: The name of a GPU (with gpus and per_node), the path of a cluster file, or
            `mb.Cluster`.
        seq: Tokens of a sequence, 2**20 or "1M". "longest" searches the longest sequence that fits
            with the fixed settings, then the fastest run of that length.
        gpus: Number of GPUs.
        per_node: GPUs per node.
        tokens_per_step: Tokens of a step over all ranks; None: 4M, or one sequence if that is
            longer.
        packed: Lengths of documents that fill packs of `seq` tokens: a list, a file, or a name of
            `packed.NAMED`.
        top: Number of runs to rank.
        progress: Called with the numbers of finished ways and of all ways.
        **fixed: Fields of `mb.Settings` that are not searched: `tp=8, store=0.5`.

    Returns:
        The advice.

    Raises:
        ValueError: An argument is invalid; the message names it.
        advice.DoesNotFit: Nothing fits; the message names changes that make it fit.
    """
    model = models.named(model) if isinstance(model, str) else model
    cluster = cluster_of(cluster, gpus, per_node)
    model_fields = of_model(model)
    if seq == LONGEST:
        if packed is not None or tokens_per_step is not None:
            raise ValueError(
                "--longest finds one length, of sequences without documents and of steps that are "
                "multiples of it: leave --packed and --tokens-per-step out, or give --seq"
            )
        goal = TrainingGoal(STEP, 1, fixed, **model_fields)
        run = longest(model, cluster, goal, AttentionForecast(model, cluster, fixed)).run
        seq, tokens_per_step = run.seq, run.seq * run.dp * max(1, STEP // (run.seq * run.dp))
    goal = replace(goal_of(seq, tokens_per_step, fixed), **model_fields)
    check_wanted(model, cluster, goal)
    if type(top) is not int or top < 1:
        raise ValueError(f"--top must be an integer from 1 on, got {top!r}")
    attention, lengths = AttentionForecast(model, cluster, goal.pinned), ()
    if packed is not None:
        lengths = lengths_of(packed, goal.seq)
        cut = cut_of(goal.pinned)
        goal = replace(
            goal, pinned=packed_pins(goal.pinned), documents=lengths if cut == "zigzag" else ()
        )
        attention = PackedForecast(model, cluster, goal.pinned, lengths, cut)
    search = Search(model, cluster, goal, attention)
    result = search.run(top, progress)
    if not result.ranked:
        if result.closest is None:
            raise search.refused or ValueError(_together(goal))
        account_of = attention.account_of if isinstance(attention, PackedForecast) else None
        raise DoesNotFit(does_not_fit(result.closest.account, cluster, account_of))
    # The accounts of the result have all moments.
    ranked = tuple(
        replace(entry, account=account(model, entry.run, core_of=search.core_of))
        for entry in result.ranked
    )
    return Advice(model, cluster, goal, ranked, result.ways, result.tried, lengths, search)


def nodes_and_gpus(cluster: Cluster) -> tuple[int, int]:
    """Return the number of nodes, and of GPUs per node."""
    per_node = min(cluster.gpus, cluster.ranks_per_node)
    return cluster.gpus // per_node, per_node


def _together(goal: TrainingGoal) -> str:
    """Return the reason why no way was tried.

    The store is the only fixed setting that can exclude all ways.
    """
    pinned_flags = " ".join(f"{flag_of(name)} {value}" for name, value in goal.pinned.items())
    return (
        f"{pinned_flags}: no run has all of these; --store is of attention over several "
        "context-parallel ranks, so it needs --cp above 1, and --recompute full"
    )


def cluster_of(cluster: str | Path | Cluster, gpus: int | None, per_node: int) -> Cluster:
    """Return a cluster by the name of its GPU, from a file, or unchanged."""
    if isinstance(cluster, Cluster):
        return cluster if gpus is None else replace(cluster, gpus=gpus)
    if str(cluster).endswith(".toml"):
        read = cluster_file.read(cluster)
        return read if gpus is None else replace(read, gpus=gpus)
    if gpus is None:
        raise ValueError(f"gpus: how many {cluster}? Give gpus=64, or a cluster file")
    return Cluster(str(cluster), gpus, per_node)  # pyright: ignore[reportArgumentType]


def goal_of(
    seq: int | str, tokens_per_step: int | str | None, fixed: dict[str, Any]
) -> TrainingGoal:
    """Return the goal of a training.

    Args:
        seq: Tokens of a sequence.
        tokens_per_step: Tokens of a step, None: the default.
        fixed: Fixed settings.

    Raises:
        ValueError: Sequences do not fill a step.
    """
    length = tokens_of(seq, "--seq")
    step = max(STEP, length) if tokens_per_step is None else None
    step = tokens_of(tokens_per_step, "--tokens-per-step") if step is None else step
    if tokens_per_step is None:
        step -= step % length
    if step % length:
        near = max(1, round(step / length)) * length
        raise ValueError(
            f"--tokens-per-step {step:,} is not a multiple of --seq {length:,}; use {near}"
        )
    return TrainingGoal(length, step // length, fixed)
