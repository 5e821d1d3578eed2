"""Agent trajectories as trees beside the same ones packed as documents, 8 to 64 GPUs."""

from __future__ import annotations

from typing import Any

import numpy as np

import megatron_burst as mb
from benchmarks.cluster.problems import Rollouts
from benchmarks.trees import SAMPLES, SYSTEM, TURNS, lengths

from . import ours, rivals
from .rivals import NODE, Constants

SEEDS = 3


def drawn(ranks: int, turns: bool, seed: int) -> list[np.ndarray]:
    """Eight trajectories of each prompt, a prompt for every 8 GPUs. turns: samples share turns
    besides the system prompt."""
    groups = max(1, ranks // 8)
    every = lengths(groups * SAMPLES, seed)
    return [
        each
        for i in range(groups)
        for each in Rollouts(every[i::groups], SYSTEM, TURNS * turns, 100 * seed + i).drawn()
    ]


def simulated(ranks: int, turns: bool, fitted: Constants, seeds: int = SEEDS) -> dict[str, Any]:
    """Medians over seeds: tokens and pairs that a tree saves, and milliseconds of attention of a
    layer, forward and backward."""
    found = []
    for seed in range(seeds):
        trajectories = drawn(ranks, turns, seed)
        each = np.array([len(one) for one in trajectories])
        each[-1] += -each.sum() % (2 * ranks)  # padding
        plain = ours.documents(each, ranks, True)
        tree = mb.trees.pack(trajectories, multiple=2 * ranks)
        layout = mb.layout.make("balanced", cp_size=ranks, tree=tree)
        merged = ours.Pack(layout, tree.mask, np.array(tree.mask.bounds), float(tree.mask.pairs))
        times = [_best(pack, fitted) for pack in (plain, merged)]
        few = ranks // NODE
        layout = mb.layout.make("balanced", cp_size=few, tree=tree, per_node=1)
        over = (ours.documents(each, few, True, 1),
                ours.Pack(layout, tree.mask, np.array(tree.mask.bounds), merged.area))  # fmt: skip
        times += [_best(pack, fitted, NODE) for pack in over]
        usp = sum(rivals.seconds("usp", ranks, each, True, back, fitted) for back in (False, True))
        found.append((each.sum() / tree.rows, plain.area / merged.area,
                      1e3 * usp, *(1e3 * one for one in times)))  # fmt: skip
    names = ("tokens", "pairs", "usp", "plain", "tree", "plain_shared", "tree_shared")
    middle = np.median(np.array(found), axis=0).tolist()
    return {"ranks": ranks, "turns": turns} | dict(zip(names, middle, strict=True))


def _best(pack: ours.Pack, fitted: Constants, share: int = 1) -> float:
    """Seconds of what `auto` picks, forward and backward. share: GPUs that share heads."""
    run = ours.taken(ours.runs(pack, fitted, ours.AUTO, share=share, head_chunks=(1,)))
    return run.forward.seconds + run.backward.seconds
