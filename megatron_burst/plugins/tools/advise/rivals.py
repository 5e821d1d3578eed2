# SPDX-License-Identifier: Apache-2.0
"""Predicted time and memory of Megatron's own context parallelism, for comparison.

Megatron has four kinds of context parallelism (`--cp-comm-type`). The simulator predicts their
times with the same link and kernel rates as for our algorithms. The predictions follow Transformer
Engine's `context_parallel.py` (2.20.0.dev0, commit d0067d0d, August 2026):

- `p2p`: one ring over all ranks in rank order. Whole chunks of keys and values are sent, even if
  the mask hides them. Backward also sends their gradients. All messages have the dtype of the keys.
  The chunks of all ranks and the partial results of all steps stay allocated until forward ends.
- `a2a`: an all-to-all sends q, k and v to the ranks that compute their heads, and the results back.
  The number of ranks must divide the query heads and the key/value heads.
- `a2a+p2p`: ranks of a node share heads by all-to-all. Ranks of different nodes form rings.
- `all_gather`: keys and values of the whole sequence are gathered on every rank before computing,
  in forward and again in backward. Gradients of the whole sequence are reduce-scattered. It is the
  only kind that supports sparse attention (Megatron-Core 0.19, `dsa.py`): index keys and latents
  are gathered in forward, and latents are saved for backward. It computes the same pairs as our
  sparse attention.

All kinds use the zigzag layout and pad every document of a pack to a multiple of 2 x CP. Sliding
windows require `a2a` or `all_gather`, sinks require `a2a`. Layers with linear attention exchange
heads. Transformer Engine 2.20.2 has the same limits, but supports packed documents in FP8 (pull
request 2994: B200, all four kinds, not MXFP8). Two options of Transformer Engine are not modelled:
FP8, and `NO_LOAD_BALANCE` (pull request 3221, experimental), with which `all_gather` accepts the
contiguous layout and the last rank has the most pairs.

If details are unknown, the estimate favours Megatron. It assumes no time for copies that reorder
gathered rows, full kernel speed on short pieces of documents, no attention to padding, and equal
packs in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Any, Literal, get_args

import numpy as np

from ....autotune import simulator
from ....autotune.candidates import reading, sharing
from ....autotune.clusters import Cluster
from ....autotune.exchanges import Wires
from ....autotune.places import Nodes, places
from ....autotune.prepared import PreparedSchedule
from ....autotune.simulator import PassTime
from ....schedule import rings
from ....schedule.demand import all_visible
from ....schedule.tables import Grid
from ....schedule.topology import Topology, divisors
from .account.memory import account, fullest_stages, least_bytes
from .account.operators import B, Core, F, LayerSizes
from .account.steps import layers_of
from .forecast.attention_time import (
    AttentionTime,
    index_sizes,
    sizes_of,
    topology_of,
)
from .forecast.layer_time import visible
from .forecast.links import ring_seconds
from .forecast.step_time import StepTime, step_time
from .search.attention_choice import AttentionForecast
from .search.packed import PackedForecast
from .search.search import plainest
from .search.search_space import GROUPS, TrainingGoal, groups_of, padded
from .settings import Settings
from .shapes.layer_kinds import SOFTMAX
from .shapes.model import Model

Kind = Literal["p2p", "a2a", "a2a+p2p", "all_gather"]
KINDS: tuple[Kind, ...] = get_args(Kind)
# Recomputation in Megatron: nothing, everything except attention (`--recompute-modules mlp
# layernorm`), or everything. "selective" is predicted as full recomputation with stored attention
# results.
RECOMPUTE = ("none", "selective", "full")
# Fixed settings that also apply to Megatron's own context parallelism.
_OPTIMIZER = "optimizer_offload", "optimizer_bytes", "distributed_optimizer", "gradients"
KEPT_CHOICES = *GROUPS, *_OPTIMIZER
RINGS = 8  # number of ring schedules that are cached
RingOf = Callable[[Topology, Nodes, int, bool], PreparedSchedule]


@dataclass(frozen=True)
class Rival:
    """Predicted time and memory of one kind of Megatron's context parallelism.

    Attributes:
        kind: Value of `--cp-comm-type`.
        refused: Reason why the kind does not support the run. If it does, this is "", and all other
            fields are set.
        run: Settings of the run with this kind.
        recompute: Recomputation, an entry of `RECOMPUTE`.
        time: Predicted time of a step.
        attention: Predicted time of one call of full attention.
        bytes: Peak of GPU memory in bytes.
        fits: Whether the peak fits into the memory of a GPU.
    """

    kind: Kind
    refused: str = ""
    run: Settings | None = None
    recompute: str = ""
    time: StepTime | None = None
    attention: AttentionTime | None = None
    bytes: int = 0
    fits: bool = False


def rivals(
    model: Model, cluster: Cluster, run: Settings, lengths: Sequence[int] = ()
) -> list[Rival]:
    """Return a prediction for each kind of context parallelism, with the parallel sizes of a run.

    Without context parallelism all kinds are equal, so one prediction is returned.

    Args:
        model: Shape of the model.
        cluster: Cluster of GPUs.
        run: Settings of the run.
        lengths: Lengths of the documents of a pack in tokens; () without packed documents.
    """
    kinds = KINDS if run.cp > 1 else KINDS[:1]
    return [rival(kind, model, cluster, run, lengths) for kind in kinds]


def rival(
    kind: Kind, model: Model, cluster: Cluster, run: Settings, lengths: Sequence[int] = ()
) -> Rival:
    """Return the prediction for one kind of Megatron's context parallelism.

    The prediction uses the fastest recomputation (`RECOMPUTE`) that fits into memory. If none fits,
    it uses the recomputation that needs the least memory.
    """
    if reason := refused(kind, model, cluster, run):
        return Rival(kind, reason)
    too_large = []
    for option in _timed(kind, model, cluster, run, lengths):
        fitted = _fitted(option, model, cluster)
        if fitted.fits:
            return fitted
        too_large.append(fitted)
    return min(too_large, key=lambda option: option.bytes)


def _timed(
    kind: Kind, model: Model, cluster: Cluster, run: Settings, lengths: Sequence[int],
    ring: RingOf | None = None,
) -> list[Rival]:  # fmt: skip
    """Return predictions for one kind of context parallelism, one per entry of `RECOMPUTE`.

    The fastest prediction is first. The fields `bytes` and `fits` are not computed.
    """
    own = settings(kind, model, cluster, run, lengths)
    calls = cache(lambda window: attention(kind, model, cluster, own, window, lengths, ring))
    timed = []
    for recompute in RECOMPUTE[:: 2 if model.indexer else 1]:  # sparse attention has no store
        candidate = replace(own, recompute="none" if recompute == "none" else "full",
                       store=float(recompute == "selective"))  # fmt: skip
        time = step_time(model, cluster, candidate, lambda *_, window: calls(window))
        timed.append(Rival(kind, "", candidate, recompute, time, calls(0)))
    return sorted(timed, key=_seconds)


def _fitted(estimate: Rival, model: Model, cluster: Cluster) -> Rival:
    """Return the prediction with its fields `bytes` and `fits` set."""
    assert estimate.run is not None
    size = peak_bytes(estimate.kind, model, estimate.run, estimate.recompute)
    return replace(estimate, bytes=size, fits=size <= cluster.room)


def fastest(
    model: Model, cluster: Cluster, goal: TrainingGoal, kinds: Sequence[Kind] = KINDS,
    lengths: Sequence[int] = (),
) -> Rival | None:  # fmt: skip
    """Return the prediction of the fastest run of Megatron's own context parallelism.

    Only runs that fit into memory are compared; the result is None if none fits. Parallel sizes and
    optimizer settings that the user has fixed are not searched.

    Args:
        model: Shape of the model.
        cluster: Cluster of GPUs.
        goal: Goal of the search.
        kinds: Kinds of context parallelism to try, values of `--cp-comm-type`.
        lengths: Lengths of the documents of a pack in tokens; () without packed documents.
    """
    pinned = {name: groups for name, groups in goal.pinned.items() if name in KEPT_CHOICES}
    goal = replace(
        goal, pinned=pinned | {"linear": "megatron"} | ({"micro_batch": 1} if lengths else {})
    )
    forecast = AttentionForecast(model, cluster)
    if lengths:
        forecast = PackedForecast(model, cluster, None, lengths, "zigzag")
    ways = [(forecast.step_at_least(plainest(groups)).seconds, groups)
            for groups in groups_of(model, cluster, goal)]  # fmt: skip
    ways.sort(key=lambda way: way[0])
    ring = lru_cache(maxsize=RINGS)(_ring)
    for offload in goal.values("optimizer_offload", (0.0, 1.0)):
        best: Rival | None = None
        for bound, run in ways:
            if best is not None and bound >= _seconds(best):
                break
            run = replace(run, optimizer_offload=offload)
            for kind in kinds if run.cp > 1 else kinds[:1]:
                if refused(kind, model, cluster, run) or not _may_fit(model, cluster, run):
                    continue
                for groups in _timed(kind, model, cluster, run, lengths, ring):
                    if best is not None and _seconds(groups) >= _seconds(best):
                        break
                    if (fitting := _fitted(groups, model, cluster)).fits:
                        best = fitting
                        break
        if best is not None:
            return best
    return None


def _may_fit(model: Model, cluster: Cluster, run: Settings) -> bool:
    """Return False if a run certainly exceeds GPU memory.

    This is certain if parameters, optimizer and layer inputs together exceed GPU memory, or if the
    logits alone do.
    """
    logits = run.rows * model.vocabulary / run.tp * run.logits_bytes
    states = least_bytes(model, replace(run, recompute="full"))
    return states <= cluster.room and logits <= cluster.room


def _seconds(timed: Rival) -> float:
    assert timed.time is not None
    return timed.time.seconds


def refused(kind: Kind, model: Model, cluster: Cluster, run: Settings) -> str:
    """Return the reason why a kind of context parallelism does not support a run; "" if it does."""
    if model.hybrid is not None:
        return "Megatron-Core does not support DeepSeek-V4's hybrid attention"
    if run.cp == 1:
        return ""
    if model.indexer is not None and kind != "all_gather":
        return "sparse attention requires --cp-comm-type all_gather"
    if model.mixers and not model.carried(run.tp, run.cp):
        assert model.mixer is not None
        return (f"{model.mixer.name}: TP {run.tp} x CP {run.cp} cannot share its "
                f"{model.mixer.key_heads or model.mixer.heads} heads equally")  # fmt: skip
    if model.windows and kind in ("p2p", "a2a+p2p"):
        return "sliding windows are not supported"
    if model.sinks and kind != "a2a":
        return "sinks are not supported"
    heads, kv_heads = model.heads // run.tp, max(1, model.kv_heads // run.tp)
    if kind == "a2a" and (heads % run.cp or kv_heads % run.cp):
        return f"CP {run.cp} does not divide {heads} query and {kv_heads} key/value heads"
    if kind == "a2a+p2p" and shared(model, cluster, run) == 1:
        return (
            f"no number of ranks on a node, below CP {run.cp}, divides {heads} query and "
            f"{kv_heads} key/value heads"
        )
    return ""


def shared(model: Model, cluster: Cluster, run: Settings) -> int:
    """Return the number of ranks that share heads in `a2a+p2p`.

    This is the largest number of ranks on a node that divides the query heads and the key/value
    heads and is less than CP.
    """
    heads, kv_heads = model.heads // run.tp, max(1, model.kv_heads // run.tp)
    here = cluster.cp_per_node(run.tp, run.cp)
    if run.cp == 1:
        return 1
    fit = [n for n in divisors(here) if n < run.cp and not (heads % n or kv_heads % n)]
    return max(fit)


def settings(
    kind: Kind, model: Model, cluster: Cluster, run: Settings, lengths: Sequence[int] = ()
) -> Settings:
    """Return settings that describe Megatron's own context parallelism.

    The parallel sizes are copied from `run`. Megatron computes the loss separately from the LM head
    and does not offload activations. The field `seq` includes the padding of documents.
    """
    seq = sum(padded(length, run.cp) for length in lengths) if lengths else run.seq
    ulysses = {"a2a": run.cp, "a2a+p2p": shared(model, cluster, run)}.get(kind, 1)
    return replace(
        run.uniform(), seq=seq, algorithm="ring", ulysses=ulysses, placement="head_first",
        layout="zigzag", side="kv", wire="bf16", head_chunks=1, sequence_chunks=1, mlp_tiles=1,
        inner=None, offload=0.0, store=0.0, linear="megatron", lm_head_loss="off", rope_local=True,
    )  # fmt: skip


# --- time ----------------------------------------------------------------------------------------


def attention(
    kind: Kind, model: Model, cluster: Cluster, run: Settings, window: int = 0,
    lengths: Sequence[int] = (), ring: RingOf | None = None,
) -> AttentionTime:  # fmt: skip
    """Return the time of one attention call in forward and backward.

    Args:
        kind: Value of `--cp-comm-type`.
        model: Shape of the model.
        cluster: Cluster of GPUs.
        run: Result of `settings`.
        window: Tokens that a query attends to (sliding window); 0 for full causal attention.
        lengths: Lengths of documents without padding; () without packed documents.
        ring: Function to call instead of `_ring`, for example a cached one.
    """
    rates, topology = cluster.rank_rates(documents=bool(lengths)), topology_of(cluster, run)
    if model.indexer is not None:
        return _sparse(cluster, run, model)
    sizes, nodes = sizes_of(model, run).shared(run.ulysses), cluster.nodes(run.tp)
    exchange = sharing(topology, sizes, rates, per_nic=nodes.per_nic)
    assert rates.compute is not None
    flops = 2.0 * sizes.heads * sizes.batch * (sizes.width + sizes.value_width)
    ranks = topology.ring_size
    seconds = pairs(lengths or (run.seq,), ranks, window) * (flops / rates.compute)
    # A kernel call on chunks of two ranks computes half of the queries or half of the keys, so it
    # is less efficient.
    loss_at_half = 1 + 2 * rates.half_rows / sizes.tokens, 1 + rates.half_rows / sizes.tokens
    seconds[~np.eye(ranks, dtype=bool)] *= loss_at_half[0] / loss_at_half[1]
    passes = []
    for forward, scale in ((True, 1.0), (False, rates.backward)):
        if kind == "all_gather" and ranks > 1:
            passes.append(_gathered(cluster, run, model, scale * seconds, forward))
            continue
        prepared = (ring or _ring)(topology, nodes, sizes.tokens, forward)
        passes.append(simulator.pass_time(prepared, sizes, scale * seconds, rates))
    return AttentionTime.of(passes[0] + exchange[0], passes[1] + exchange[1], exchange)


def _ring(topology: Topology, nodes: Nodes, tokens: int, forward: bool) -> PreparedSchedule:
    """Return the schedule of a ring that sends every rank's keys and values to all other ranks.

    `tokens` is the number of rows per rank. `forward` selects the schedule of forward or backward.
    """
    grid = Grid(topology.inter_size, topology.intra_size)
    want = all_visible(topology.ring_size, tokens)
    schedule = (
        rings.forward("ring", grid, visibility=want)
        if forward
        else rings.backward("ring", grid, "kv", visibility=want)
    )
    return PreparedSchedule(schedule, Wires(places=places(topology, nodes)))


def pairs(lengths: Sequence[int], ranks: int, window: int = 0) -> np.ndarray:
    """Return the number of visible pairs of queries of rank i and keys of rank j, float [i, j].

    For G ranks, the zigzag layout cuts every document into 2 G pieces of equal length. Rank i has
    pieces i and 2 G - 1 - i. Two ranks i and j have four combinations of a query piece and a key
    piece. If i and j differ, two of them are fully visible and the others are hidden. If i = j, one
    is fully visible, two are causal and one is hidden. With a window, the visible pairs are assumed
    to be spread evenly over the ranks.

    Args:
        lengths: Lengths of documents in tokens.
        ranks: Ranks of the ring.
        window: Tokens that a query attends to (sliding window); 0 for full causal attention.
    """
    if window:
        seen = sum(length * visible(length, window) for length in lengths)
        return np.full((ranks, ranks), seen / ranks**2)
    pieces = np.asarray(lengths, dtype=float) / (2 * ranks)
    off_diagonal = 2 * float((pieces**2).sum())
    return np.full((ranks, ranks), off_diagonal) + np.eye(ranks) * float(pieces.sum())


def _gathered(
    cluster: Cluster, run: Settings, model: Model, seconds: np.ndarray, forward: bool
) -> PassTime:
    """Return the time of forward or backward of `all_gather`.

    `seconds` are kernel times for queries of rank i and keys of rank j, [i, j]. Each pass gathers
    all keys and values and launches two kernels. Backward also reduce-scatters all gradients.
    Communication does not overlap with compute.
    """
    rates, x = cluster.rank_rates(), LayerSizes.of(model, run)
    moved = ring_seconds(cluster, run.cp, run.tp, whole_bytes(x, run)) * (1 if forward else 2)
    own = float(seconds.sum(axis=1).max())
    own *= 1 + 2 * rates.half_rows / max(1, run.rows)
    own += 2 * rates.launch
    within = run.cp == cluster.cp_per_node(run.tp, run.cp)
    links = (moved, 0.0) if within else (0.0, moved)
    host = rates.host.of_pass(2, 1 if forward else 2, 1, not forward) if rates.host else 0.0
    return PassTime(moved + own + rates.start, own, *links, host)


def _sparse(cluster: Cluster, run: Settings, model: Model) -> AttentionTime:
    """Return the time of one call of Megatron's sparse attention.

    Forward gathers index keys, selects keys, gathers latents and computes attention. Backward
    computes attention and reduce-scatters gradients. Communication does not overlap with compute.
    """
    rates, sizes, index = cluster.rank_rates(), sizes_of(model, run), index_sizes(model, run)
    assert model.indexer is not None
    assert rates.compute is not None
    rows, calls = run.rows, 2 * rates.launch + rates.start
    seen = rows * min(model.indexer.top_k, visible(run.seq))
    attending = 2.0 * sizes.heads * (sizes.width + 2 * sizes.value_width) * seen / rates.compute
    fwd, bwd = reading(sizes, rates.memory, latent=True)
    fwd, bwd = max(fwd, attending), max(bwd, rates.backward * attending)
    scoring = 2.0 * index.heads * index.width * rows * visible(run.seq) / rates.compute
    keys, latents = (
        ring_seconds(cluster, run.cp, run.tp, B * run.seq * run.micro_batch * width)
        for width in (index.width, sizes.width + sizes.value_width)
    )
    forward = keys + latents + scoring + fwd + 2 * calls
    backward = latents + bwd + calls
    within = "intra" if run.cp == cluster.cp_per_node(run.tp, run.cp) else "inter"
    busy = {"compute": scoring + fwd + bwd, "intra": 0.0, "inter": 0.0}
    busy[within] = keys + 2 * latents
    host = (0.0, 0.0)
    if rates.host:  # two gathers (index keys, latents) and two calls (selection, attention)
        host = rates.host.of_pass(2, 2), rates.host.of_pass(1, 2, backward=True)
    return AttentionTime(forward, backward, (0.0, 0.0), busy, host=host)


def whole_bytes(x: LayerSizes, run: Settings) -> int:
    """Return the bytes of the keys and values of whole sequences, for the heads of one rank."""
    return run.seq * run.micro_batch * x.kv * B


# --- memory --------------------------------------------------------------------------------------


def peak_bytes(kind: Kind, model: Model, run: Settings, recompute: str) -> int:
    """Return the peak of GPU memory in bytes on the rank that needs the most.

    Selective recomputation saves q, k, v and the result of attention, and the input of the MLP
    half (norm, MLP and residual) of each layer.
    """
    peak_account = account(model, run, every=False, core_of=partial(core, kind))
    if recompute != "selective":
        return peak_account.peak.bytes
    x = LayerSizes.of(model, run)
    saved = 0.0
    for stage in fullest_stages(run):
        layers = [model.parts[layer].attention for layer in layers_of(model, run, stage)]
        attending = sum(layer in SOFTMAX for layer in layers)
        layer = attending * run.rows * (x.query + x.kv) * B
        layer += len(layers) * run.rows / run.tp * model.hidden * B
        saved = max(saved, layer * min(run.pp - stage, run.micro_batches))
    return peak_account.peak.bytes + round(saved)


def core(kind: Kind, x: LayerSizes, run: Settings) -> Core:
    """Return the memory of core attention in one layer, on the rank that needs the most.

    Source: see the docstring of the module. `p2p`: forward allocates chunks of all ranks and a
    partial result of each step; backward allocates two buffers of keys, values and their gradients.
    `all_gather`: forward allocates keys and values of the whole sequence, and half of them again
    for reordering. Backward allocates keys and values, sums of their gradients, and the gradients
    that the kernel returns.
    """
    if x.indexer is not None:
        y = x.absorbed
        latents, keys = (run.seq * run.micro_batch * width * B for width in (y.kv, x.indexer.width))
        return Core(forward=2 * latents + keys, backward=2 * latents,
                    sums=run.rows * y.query * F, keys=run.seq * run.micro_batch,
                    reordered=True, wire=B)  # fmt: skip
    q, kv, out = run.rows * x.query * B, run.rows * x.kv * B, run.rows * x.out * B
    common = Core(
        sums=q, keys=run.rows, store=run.store, heads_shared=run.ulysses, reordered=True, wire=B
    )
    ring = run.cp // run.ulysses
    if run.cp == 1 or kind == "a2a":
        return replace(common, sums=q + kv)
    if kind == "all_gather":
        gathered = whole_bytes(x, run)
        keys = run.seq * run.micro_batch
        return replace(common, forward=1.5 * gathered, backward=2 * gathered, keys=keys)
    partial_results = ring * (out + run.rows * x.heads * F)
    return replace(common, forward=ring * kv + partial_results, backward=4 * kv)


# --- output --------------------------------------------------------------------------------------


def facts(estimate: Rival) -> dict[str, Any]:
    """Return a prediction as a dict for JSON, in seconds and bytes."""
    if estimate.run is None or estimate.time is None or estimate.attention is None:
        return {"kind": estimate.kind, "refused": estimate.refused}
    sizes = {name: getattr(estimate.run, name) for name in GROUPS}
    return {"kind": estimate.kind, "groups": sizes, "recompute": estimate.recompute,
            "seconds": estimate.time.seconds, "attention": estimate.attention.seconds,
            "bytes": estimate.bytes, "fits": estimate.fits}  # fmt: skip
