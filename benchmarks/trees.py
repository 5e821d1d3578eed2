"""Prefix trees and separate trajectories: counts, and a step on 64 GPUs, simulated.

    make bench-trees                              # all tables
    make bench-trees ARGS="--parts counts"        # seconds

`counts` counts tokens and pairs. `simulated` predicts a training step with the forecast of
`megatron-burst advise`: ours on trees, and Megatron's kinds on packs of separate trajectories. Each
has the fastest parallel sizes that fit.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

import megatron_burst as mb
from benchmarks.report import markdown, progress
from megatron_burst.plugins.tools.advise import rivals
from megatron_burst.plugins.tools.advise.account.memory import account
from megatron_burst.plugins.tools.advise.search.packed import PackedForecast, packed_pins
from megatron_burst.plugins.tools.advise.search.search import Search
from megatron_burst.plugins.tools.advise.search.search_space import TrainingGoal
from megatron_burst.plugins.tools.advise.settings import Settings
from megatron_burst.plugins.tools.advise.shapes import models
from megatron_burst.units import byte_size, duration

PARTS = ("counts", "simulated")
K = 1024
# (fraction, length) quantiles of 155,144 agent trajectories, published in 2026. The shortest length
# was not published and is assumed.
QUANTILES = ((0.0, 8 * K), (0.30, 32 * K), (0.50, 38 * K), (0.76, 49 * K), (0.925, 64 * K),
             (0.95, 71 * K), (0.993, 96 * K), (1.0, 184 * K))  # fmt: skip


def lengths(count: int, seed: int) -> tuple[int, ...]:
    """Return lengths of agent trajectories, interpolated between `QUANTILES`.

    One length is drawn from each of `count` equal parts of the distribution, so that a few lengths
    have the median and the tail of the distribution.
    """
    random = np.random.default_rng(seed)
    places = (np.arange(count) + random.random(count)) / count
    random.shuffle(places)
    shares, sizes = zip(*QUANTILES, strict=True)
    return tuple(np.interp(places, shares, sizes).astype(int).tolist())


# --- tokens and pairs ----------------------------------------------------------------------------


class Rollouts(NamedTuple):
    """Trajectories of one prompt.

    Attributes:
        lengths: Length of each trajectory.
        prompt: Tokens that all share.
        turns: Turns of a trajectory; 0 for none. Every trajectory except the first shares a random
            number of turns with an earlier trajectory.
    """

    lengths: tuple[int, ...]
    prompt: int
    turns: int = 0
    seed: int = 0

    def drawn(self) -> list[np.ndarray]:
        """Return the tokens of the trajectories."""
        random, trajectories = np.random.default_rng(self.seed), []
        start = random.integers(0, 1 << 30, self.prompt)
        for i, length in enumerate(self.lengths):
            shared = start
            if i and self.turns:
                earlier = trajectories[random.integers(i)]
                cut = (len(earlier) - self.prompt) * random.integers(self.turns) // self.turns
                shared = earlier[: self.prompt + cut]
            shared = shared[:length]
            new_tokens = random.integers(0, 1 << 30, length - len(shared))
            trajectories.append(np.concatenate([shared, new_tokens]))
        return trajectories


COUNTED = {
    "8 samples x 12.8K, 75 % shared": Rollouts((12800,) * 8, 9600),
    "8 agents x 12.8K, 16 turns": Rollouts((12800,) * 8, 1600, 16),
    "16 agents x 12.8K, 16 turns": Rollouts((12800,) * 16, 1600, 16),
}


class Saved(NamedTuple):
    """Savings of merging: tokens and visible pairs, separate / merged."""

    tree: mb.trees.PrefixTree
    tokens: float
    pairs: float


def saved(trajectories: Sequence[np.ndarray], multiple: int = 1) -> Saved:
    """Return the tree of these trajectories, and its savings."""
    tree = mb.trees.pack(trajectories, multiple=multiple)
    separate_pairs = sum(
        len(trajectory) * (len(trajectory) + 1) // 2 for trajectory in trajectories
    )
    return Saved(tree, tree.trajectory_tokens / tree.rows, separate_pairs / tree.mask.pairs)


def counts(ranks: Sequence[int] = (8, 64)) -> str:
    """Return a table of all of `COUNTED`."""
    rows = []
    for name, rollouts in COUNTED.items():
        savings = saved(rollouts.drawn(), math.lcm(*ranks))
        tree, imbalance = savings.tree, []
        for size in ranks:
            layout = mb.layout.make("balanced", cp_size=size, tree=tree)
            imbalance.append(f"{layout.balance:.3f}")  # pyright: ignore[reportAttributeAccessIssue]
        rows.append([
            name, f"{tree.trajectory_tokens:,}", f"{tree.rows:,}", f"{savings.tokens:.2f}",
            f"{savings.pairs:.2f}", ", ".join(imbalance),
        ])  # fmt: skip
    heads = ["trajectories", "tokens", "merged rows", "tokens / merged rows",
             "pairs / merged pairs",
             f"imbalance, {' and '.join(map(str, ranks))} ranks"]  # fmt: skip
    return markdown(heads, rows)


# --- a step on 64 GPUs, simulated ----------------------------------------------------------------

SYSTEM, GROUPS, SAMPLES, TURNS = 4 * K, 8, 8, 16
MODEL, GPUS = "qwen3-8b", 64  # H100


class TreeForecast(PackedForecast):
    """Forecast of attention for packs that are a prefix tree each."""

    def __init__(self, model: Any, cluster: Any, pinned: Any, tree: mb.masks.Tree):
        super().__init__(model, cluster, pinned, (len(tree.out),))
        self.tree = tree

    @cached_property
    def _free(self) -> TreeForecast:
        return TreeForecast(self.model, self.cluster, None, self.tree)

    @property
    def effective(self) -> float:
        return 2 * self.tree.pairs / len(self.tree.out)

    def mask(self, run: Settings) -> mb.masks.Tree:
        return self.tree

    def layout(self, run: Settings) -> Any:
        key = run.cp, self.cluster.cp_per_node(run.tp, run.cp)
        if run.cp > 1 and key not in self._layouts:
            self._layouts[key] = mb.layout.make(
                "balanced", cp_size=run.cp, tree=self.tree, per_node=key[1]
            )
        return self._layouts[key] if run.cp > 1 else super().layout(run)


class Step(NamedTuple):
    """A step of one kind: seconds and bytes of a GPU."""

    name: str
    run: Settings
    recompute: str
    seconds: float
    bytes: int


def groups(shared: bool, seed: int = 0) -> list[list[np.ndarray]]:
    """Return trajectories of every prompt; samples share turns (`shared`) or the system prompt."""
    every = lengths(GROUPS * SAMPLES, seed)
    return [
        Rollouts(every[i::GROUPS], SYSTEM, TURNS * shared, seed * GROUPS + i).drawn()
        for i in range(GROUPS)
    ]


def median_group(shared: bool, seed: int = 0) -> list[np.ndarray]:
    """Return the group with the tokens nearest to the mean; it represents all packs of a step."""
    all_groups = groups(shared, seed)
    sums = [sum(map(len, group)) for group in all_groups]
    return all_groups[int(np.argmin(np.abs(np.array(sums) - np.mean(sums))))]


def simulated(shared: bool) -> list[Step]:
    """Return a step of 8 packs: Megatron's kinds on separate trajectories, ours on both."""
    model, cluster = models.named(MODEL), mb.Cluster("h100", GPUS)
    trajectories = median_group(shared)
    # verl pads each sequence to 2 x CP x TP, which is 128 at most on 64 GPUs.
    padded = tuple(-(-len(trajectory) // 128) * 128 for trajectory in trajectories)
    steps = []
    want = TrainingGoal(_whole(sum(padded)), GROUPS, {})
    for kind in ("p2p", "all_gather"):
        fastest = rivals.fastest(model, cluster, want, (kind,), padded)
        if fastest is not None and fastest.run is not None and fastest.time is not None:
            steps.append(Step(f"verl's packs, Megatron {kind}", fastest.run, fastest.recompute,
                              fastest.time.seconds, fastest.bytes))  # fmt: skip
    packed = (*padded[:-1], padded[-1] + want.seq - sum(padded))
    tree = mb.trees.pack(trajectories)
    tree = mb.trees.pack(trajectories, multiple=_whole(tree.rows))
    for name, seq, make in (
        ("ours, separate", want.seq, lambda pins: PackedForecast(model, cluster, pins, packed)),
        ("ours, merged", len(tree.tokens),
         lambda pins: TreeForecast(model, cluster, pins, tree.mask)),
    ):  # fmt: skip
        goal = TrainingGoal(seq, GROUPS, packed_pins({}))
        best = Search(model, cluster, goal, make(goal.pinned)).run(1).ranked[0]
        run = best.run
        recompute = "none" if run.recompute == "none" else f"full, store {run.store:g}"
        recompute += ", inputs on the host" if run.offload else ""
        bytes_ = account(model, run, every=False).peak.bytes
        steps.append(Step(name, run, recompute, best.seconds, bytes_))
    return steps


def _whole(tokens: int) -> int:
    """Round tokens up to a multiple that sizes of 64 GPUs divide."""
    return -(-tokens // 256) * 256


def table(shared: bool) -> str:
    """Return the steps of one case, and the savings of merging."""
    steps, savings = simulated(shared), saved(median_group(shared))
    best = min(step.seconds for step in steps if step.name.startswith("verl"))
    rows = [
        [step.name + f", recompute {step.recompute}" * (step.recompute != "none"),
         f"{step.run.tp} x {step.run.pp} x {step.run.cp} x {step.run.dp}",
         duration(step.seconds), f"{best / step.seconds:.2f}", byte_size(step.bytes)]
        for step in steps
    ]  # fmt: skip
    heads = ["method", "TP x PP x CP x DP", "step", "speed", "GPU memory"]
    title = "system prompt and turns" if shared else "system prompt"
    return (
        f"Samples share the {title}: a group of {savings.tree.trajectory_tokens:,} tokens is "
        f"merged into {savings.tree.rows:,} rows. Merging reduces tokens by a factor of "
        f"{savings.tokens:.2f} and visible pairs by {savings.pairs:.2f}.\n\n{markdown(heads, rows)}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    args = parser.parse_args()
    if "counts" in args.parts:
        print(f"{counts()}\n", flush=True)
    if "simulated" in args.parts:
        with progress("simulated", 2) as step:
            for shared in (False, True):
                step("turns" if shared else "system prompt")
                print(f"{table(shared)}\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
