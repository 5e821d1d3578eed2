# SPDX-License-Identifier: Apache-2.0
"""`mb.advise`: the fastest settings that fit into memory, with predicted time and memory.

This module calls the search and formats the result as flags. It raises ValueError for invalid
models, lengths and clusters.
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
from .search.search_space import STEP, TrainingGoal, check_wanted, of_model
from .settings import flag_of
from .shapes import models
from .shapes.model import Model

LONGEST = "longest"  # value of `seq` that selects the longest sequence that fits


class DoesNotFit(ValueError):
    """Raised if the model does not fit into the memory of the cluster with any settings."""


@dataclass(frozen=True)
class Advice:
    """Result of `mb.advise`.

    Attributes:
        model: Shape of the model.
        cluster: Cluster of GPUs.
        want: Goal of the search: tokens per sequence, sequences per step, and the settings that the
            user has fixed.
        ranked: Best configuration for each choice of parallel sizes (TP, PP, CP, DP) that fits into
            memory, at most `top` of them. The recommended configuration is first; the others are
            ordered by time.
        ways: Number of possible choices of parallel sizes.
        tried: Number of these choices that the search tried. It skipped the other choices, because
            a lower bound on their step time showed that they are slower.
        lengths: Lengths of the documents of a pack in tokens; () without packed documents.
        search: `Search` that returned the result.
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
        """Recommended configuration: the simplest within 1.5 % of the time of the fastest."""
        return self.ranked[0]

    @cached_property
    def rivals(self) -> list[Rival]:
        """Predictions for Megatron's own context parallelism, with the parallel sizes of `best`."""
        return rivals(self.model, self.cluster, self.best.run, self.lengths)

    @cached_property
    def fastest_rival(self) -> Rival | None:
        """Prediction for the fastest kind of Megatron's own context parallelism.

        All choices of parallel sizes are compared. None if no choice fits into memory.
        """
        return fastest(self.model, self.cluster, self.want, lengths=self.lengths)

    @cached_property
    def by_kind(self) -> str:
        """Sentence that compares `best` with one attention algorithm for all layers.

        "" if `best` uses one attention algorithm for all layers.
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
        """Attention kernel that the prediction assumes; step times of `best` with other kernels."""
        assert self.search is not None
        attention, run = self.search.attention, self.best.run

        def seconds_on(cluster: Cluster) -> float:
            return attention.on(cluster).step(run).seconds

        return of_forecast(self.cluster, seconds_on, bool(self.lengths))

    @property
    def cut(self) -> Cut | Literal[""]:
        """Layout of packed documents, "zigzag" or "balanced"; "" if documents are not packed."""
        return "zigzag" if self.want.documents else "balanced" if self.lengths else ""

    def flags(self, index: int = 0) -> list[str]:
        """Return flags for `megatron-burst pretrain` and Megatron-LM's script of the model.

        Each entry is one flag with its values, quoted for a shell. `no_flag_for` lists properties
        of the model that no flag sets.

        Args:
            index: Index in `ranked`.
        """
        return pasted.flags_of(self.model, self.ranked[index].run, self.cut)

    @property
    def no_flag_for(self) -> list[str]:
        """One sentence for each property of the model that no flag of Megatron-LM sets."""
        return model_flags.lacking(self.model)

    def job(self, index: int = 0, train_iters: int | None = None) -> str:
        """Return a script for Slurm's sbatch that trains with `flags`.

        Args:
            index: Index in `ranked`.
            train_iters: Number of training steps, from which the job's time limit is computed. None
                writes `SET_ME` instead of a time limit.

        Raises:
            ValueError: The number of steps is below 1.
        """
        if train_iters is not None and (type(train_iters) is not int or train_iters < 1):
            raise ValueError(f"--train-iters must be an integer >= 1, got {train_iters!r}")
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
        """Text with the four longest parts of a step of `best` and the share of each part."""
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
    r"""Search for the fastest settings that fit into memory.

    Example::

        advice = mb.advise("llama3-8b", "h100", gpus=64, seq="1M")
        print(advice.best.run, advice.why, *advice.flags(), sep="\n")

    Args:
        model: Name of a model, path of a Hugging Face `config.json`, or `mb.Model`.
        cluster: Name of a GPU (with `gpus` and `per_node`), path of a cluster file, or
            `mb.Cluster`.
        seq: Tokens of a sequence, such as 2**20 or "1M". "longest" first searches for the
            longest sequence that fits with the fixed settings, then for the fastest settings at
            this length.
        gpus: Number of GPUs, over all nodes.
        per_node: GPUs per node.
        tokens_per_step: Tokens of a step over all ranks, a multiple of `seq`. None for as many
            sequences as fit into 4M tokens, at least one.
        packed: Lengths of documents that fill packs of `seq` tokens: a list, the path of a file, or
            a key of `packed.NAMED`.
        top: Maximum number of configurations to return.
        progress: Function that is called with the number of finished choices of parallel sizes
            and the number of all choices.
        **fixed: Values of `mb.Settings` fields that are not searched, such as `tp=8, store=0.5`.

    Returns:
        The advice.

    Raises:
        ValueError: An argument is invalid; the message names it.
        advice.DoesNotFit: No configuration fits. The message names changes that would help.
    """
    model = models.named(model) if isinstance(model, str) else model
    cluster = cluster_of(cluster, gpus, per_node)
    model_fields = of_model(model)
    if seq == LONGEST:
        if packed is not None or tokens_per_step is not None:
            raise ValueError(
                "--longest searches one sequence length and chooses the tokens per step: remove "
                "--packed and --tokens-per-step, or use --seq instead of --longest"
            )
        goal = TrainingGoal(STEP, 1, fixed, **model_fields)
        run = longest(model, cluster, goal, AttentionForecast(model, cluster, fixed)).run
        seq, tokens_per_step = run.seq, run.seq * run.dp * max(1, STEP // (run.seq * run.dp))
    goal = replace(goal_of(seq, tokens_per_step, fixed), **model_fields)
    check_wanted(model, cluster, goal)
    if type(top) is not int or top < 1:
        raise ValueError(f"--top must be an integer >= 1, got {top!r}")
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
    # The search keeps only the peaks of its memory accounts; the result keeps all moments.
    ranked = tuple(
        replace(entry, account=account(model, entry.run, core_of=search.core_of))
        for entry in result.ranked
    )
    return Advice(model, cluster, goal, ranked, result.ways, result.tried, lengths, search)


def nodes_and_gpus(cluster: Cluster) -> tuple[int, int]:
    """Return the number of nodes of a cluster, and the number of GPUs per node."""
    per_node = min(cluster.gpus, cluster.ranks_per_node)
    return cluster.gpus // per_node, per_node


def _together(goal: TrainingGoal) -> str:
    """Return the error message for fixed settings that are valid one by one but not together."""
    pinned_flags = " ".join(f"{flag_of(name)} {value}" for name, value in goal.pinned.items())
    return (
        f"{pinned_flags}: no configuration has all these settings; --store requires --cp above 1 "
        "and --recompute full"
    )


def cluster_of(cluster: str | Path | Cluster, gpus: int | None, per_node: int) -> Cluster:
    """Return `cluster` as a `Cluster` with `gpus` GPUs.

    `cluster` is the name of a GPU, the path of a cluster file, or a `Cluster`. If `gpus` is None,
    the number of GPUs in the file or the `Cluster` is kept.
    """
    if isinstance(cluster, Cluster):
        return cluster if gpus is None else replace(cluster, gpus=gpus)
    if str(cluster).endswith(".toml"):
        read = cluster_file.read(cluster)
        return read if gpus is None else replace(read, gpus=gpus)
    if gpus is None:
        raise ValueError(
            f"gpus is required for cluster {cluster}; pass gpus, such as gpus=64, or a cluster file"
        )
    return Cluster(str(cluster), gpus, per_node)  # pyright: ignore[reportArgumentType]


def goal_of(
    seq: int | str, tokens_per_step: int | str | None, fixed: dict[str, Any]
) -> TrainingGoal:
    """Return the goal of the search.

    Args:
        seq: Tokens of a sequence.
        tokens_per_step: Tokens of a step over all ranks. None for as many sequences as fit into 4M
            tokens, at least one.
        fixed: Values of the `Settings` fields that the user has fixed.

    Raises:
        ValueError: `tokens_per_step` is not a multiple of `seq`.
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
