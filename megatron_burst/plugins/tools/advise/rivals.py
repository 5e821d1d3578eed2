# SPDX-License-Identifier: Apache-2.0
"""What Megatron's own context parallelism takes for a run: time and memory of its four kinds.

Each kind of `--cp-comm-type` is timed by the simulator, rates and kernels that time ours, with what
Transformer Engine's `context_parallel.py` does (2.20.0.dev0, commit d0067d0d, August 2026):

- `p2p`: one ring over all ranks in the order of their numbers; whole chunks of keys and values
  travel whatever the mask hides, gradients behind them, all in the dtype of the keys; buffers of
  all ranks' chunks and the partial results of all steps stay until forward ends.
- `a2a`: q, k and v to where their heads are, results back; ranks must divide both kinds of heads.
- `a2a+p2p`: heads shared within a node, that ring over the rest.
- `all_gather`: keys and values of the whole sequence on every rank, before anything is computed, in
  forward and again in backward, whose gradients of the whole sequence are then reduce-scattered.
  The only kind of sparse attention (Megatron-Core 0.19, `dsa.py`): index keys and latents are
  gathered in forward, latents stay for backward, and computed are the pairs that ours computes.

All cut zigzag, and every document of a pack is padded to a multiple of 2 x CP. Sliding windows run
with `a2a` and `all_gather` only, sinks with `a2a` only. Layers that carry a state exchange heads.
Transformer Engine 2.20.2 refuses the same, but no longer packs in FP8 (pull request 2994: B200, all
four kinds, not MXFP8). Two of its options are not counted: FP8, and `NO_LOAD_BALANCE` (pull request
3221, experimental), in which `all_gather` takes contiguous packs and the last rank has most pairs.

What is in doubt is counted for Megatron: copies that put gathered rows in order take no time, a
kernel loses nothing on pieces of a few rows of a document, padding is never attended to, and all
packs of a step are taken to be alike.
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
# What Megatron can recompute of a layer: nothing, all but attention (`--recompute-modules mlp
# layernorm`), or all. The second is timed like full recompute that keeps attention's results.
RECOMPUTE = ("none", "selective", "full")
# What of a user's choices holds for Megatron's own too.
HELD = (*GROUPS, "optimizer_offload", "optimizer_bytes", "distributed_optimizer", "gradients")
RINGS = 8  # that a search remembers: both passes of the kinds and settings of a few groups
RingOf = Callable[[Topology, Nodes, int, bool], PreparedSchedule]


@dataclass(frozen=True)
class Rival:
    """One kind for a run. refused: why it does not run, "" if it does; then there are its settings,
    what it recomputes (a name of `RECOMPUTE`), time and bytes of the peak; attention: of one call
    of a layer that sees all. fits: on the cluster.
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
    """Every kind with the parallel sizes of a run, of which one stands for all where there is no
    context parallelism. lengths: of the documents of a pack.
    """
    kinds = KINDS if run.cp > 1 else KINDS[:1]
    return [rival(kind, model, cluster, run, lengths) for kind in kinds]


def rival(
    kind: Kind, model: Model, cluster: Cluster, run: Settings, lengths: Sequence[int] = ()
) -> Rival:
    """One kind: with the recompute that is fastest of those that fit, or else the one that takes
    least memory.
    """
    if said := refused(kind, model, cluster, run):
        return Rival(kind, said)
    found = _timed(kind, model, cluster, run, lengths)
    for each in found:
        if (fitting := _fitted(each, model, cluster)).fits:
            return fitting
    return min((_fitted(each, model, cluster) for each in found), key=lambda each: each.bytes)


def _timed(
    kind: Kind, model: Model, cluster: Cluster, run: Settings, lengths: Sequence[int],
    ring: RingOf | None = None,
) -> list[Rival]:  # fmt: skip
    """With each way to recompute, the fastest first; without bytes."""
    own = settings(kind, model, cluster, run, lengths)
    calls = cache(lambda window: attention(kind, model, cluster, own, window, lengths, ring))
    found = []
    for recompute in RECOMPUTE[:: 2 if model.indexer else 1]:  # sparse attention is not kept
        each = replace(own, recompute="none" if recompute == "none" else "full",
                       store=float(recompute == "selective"))  # fmt: skip
        time = step_time(model, cluster, each, lambda *_, window: calls(window))
        found.append(Rival(kind, "", each, recompute, time, calls(0)))
    return sorted(found, key=_seconds)


def _fitted(found: Rival, model: Model, cluster: Cluster) -> Rival:
    """The same with its bytes."""
    assert found.run is not None
    size = peak_bytes(found.kind, model, found.run, found.recompute)
    return replace(found, bytes=size, fits=size <= cluster.room)


def fastest(
    model: Model, cluster: Cluster, want: TrainingGoal, kinds: Sequence[Kind] = KINDS,
    lengths: Sequence[int] = (),
) -> Rival | None:  # fmt: skip
    """The fastest of these kinds that fits, with any parallel sizes; None if nothing does. Of what
    the user has fixed, sizes of groups and the optimizer's settings hold.
    """
    pinned = {name: each for name, each in want.pinned.items() if name in HELD}
    want = replace(
        want, pinned=pinned | {"linear": "megatron"} | ({"micro_batch": 1} if lengths else {})
    )
    forecast = AttentionForecast(model, cluster)
    if lengths:
        forecast = PackedForecast(model, cluster, None, lengths, "zigzag")
    ways = [(forecast.step_at_least(plainest(each)).seconds, each)
            for each in groups_of(model, cluster, want)]  # fmt: skip
    ways.sort(key=lambda way: way[0])
    ring = lru_cache(maxsize=RINGS)(_ring)
    for offload in want.values("optimizer_offload", (0.0, 1.0)):
        best: Rival | None = None
        for bound, run in ways:
            if best is not None and bound >= _seconds(best):
                break
            run = replace(run, optimizer_offload=offload)
            for kind in kinds if run.cp > 1 else kinds[:1]:
                if refused(kind, model, cluster, run) or not _may_fit(model, cluster, run):
                    continue
                for each in _timed(kind, model, cluster, run, lengths, ring):
                    if best is not None and _seconds(each) >= _seconds(best):
                        break
                    if (fitting := _fitted(each, model, cluster)).fits:
                        best = fitting
                        break
        if best is not None:
            return best
    return None


def _may_fit(model: Model, cluster: Cluster, run: Settings) -> bool:
    """Whether states, what recomputed layers leave and logits alone leave memory."""
    logits = run.rows * model.vocabulary / run.tp * run.logits_bytes
    states = least_bytes(model, replace(run, recompute="full"))
    return states <= cluster.room and logits <= cluster.room


def _seconds(found: Rival) -> float:
    assert found.time is not None
    return found.time.seconds


def refused(kind: Kind, model: Model, cluster: Cluster, run: Settings) -> str:
    """Why a kind does not run with these parallel sizes; "" if it does."""
    if run.cp == 1:
        return ""
    if model.indexer is not None and kind != "all_gather":
        return "sparse attention gathers (--cp-comm-type all_gather)"
    if model.mixers and not model.carried(run.tp, run.cp):
        assert model.mixer is not None
        return (f"{model.mixer.name}: TP {run.tp} x CP {run.cp} do not divide its "
                f"{model.mixer.key_heads or model.mixer.heads} heads")  # fmt: skip
    if model.windows and kind in ("p2p", "a2a+p2p"):
        return "sliding windows are not supported"
    if model.sinks and kind != "a2a":
        return "sinks are not supported"
    heads, kv_heads = model.heads // run.tp, max(1, model.kv_heads // run.tp)
    if kind == "a2a" and (heads % run.cp or kv_heads % run.cp):
        return f"CP {run.cp} does not divide {heads} and {kv_heads} heads of a rank"
    if kind == "a2a+p2p" and shared(model, cluster, run) == 1:
        return (
            f"no part of CP {run.cp} within a node divides {heads} and {kv_heads} heads of a rank"
        )
    return ""


def shared(model: Model, cluster: Cluster, run: Settings) -> int:
    """Ranks that share heads in `a2a+p2p`: as many of a node as divide its heads, not all CP."""
    heads, kv_heads = model.heads // run.tp, max(1, model.kv_heads // run.tp)
    here = cluster.cp_per_node(run.tp, run.cp)
    if run.cp == 1:
        return 1
    fit = [n for n in divisors(here) if n < run.cp and not (heads % n or kv_heads % n)]
    return max(fit)


def settings(
    kind: Kind, model: Model, cluster: Cluster, run: Settings, lengths: Sequence[int] = ()
) -> Settings:
    """What Megatron runs with the parallel sizes of a run: its own loss after the LM head, no rows
    on the host; padded documents make a longer sequence of the same tokens.
    """
    seq = sum(padded(length, run.cp) for length in lengths) if lengths else run.seq
    ulysses = {"a2a": run.cp, "a2a+p2p": shared(model, cluster, run)}.get(kind, 1)
    return replace(
        run.alike(), seq=seq, algorithm="ring", ulysses=ulysses, placement="head_first",
        layout="zigzag", side="kv", wire="bf16", head_chunks=1, sequence_chunks=1, mlp_tiles=1,
        inner=None, offload=0.0, store=0.0, linear="megatron", lm_head_loss="off", rope_local=True,
    )  # fmt: skip


# --- time ----------------------------------------------------------------------------------------


def attention(
    kind: Kind, model: Model, cluster: Cluster, run: Settings, window: int = 0,
    lengths: Sequence[int] = (), ring: RingOf | None = None,
) -> AttentionTime:  # fmt: skip
    """The time of one attention call. run: as of `settings`; lengths: of documents, not padded;
    ring: makes schedules, or remembers them.
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
    # Of two ranks' chunks half of the queries or half of the keys meet: a call has half the rows.
    half = 1 + 2 * rates.half_rows / sizes.tokens, 1 + rates.half_rows / sizes.tokens
    seconds[~np.eye(ranks, dtype=bool)] *= half[0] / half[1]
    passes = []
    for forward, scale in ((True, 1.0), (False, rates.backward)):
        if kind == "all_gather" and ranks > 1:
            passes.append(_gathered(cluster, run, model, scale * seconds, forward))
            continue
        prepared = (ring or _ring)(topology, nodes, sizes.tokens, forward)
        passes.append(simulator.pass_time(prepared, sizes, scale * seconds, rates))
    return AttentionTime.of(passes[0] + exchange[0], passes[1] + exchange[1], exchange)


def _ring(topology: Topology, nodes: Nodes, tokens: int, forward: bool) -> PreparedSchedule:
    """The schedule of a pass of a ring in which every rank sends its whole rows round."""
    grid = Grid(topology.inter_size, topology.intra_size)
    want = all_visible(topology.ring_size, tokens)
    schedule = (
        rings.forward("ring", grid, visibility=want)
        if forward
        else rings.backward("ring", grid, "kv", visibility=want)
    )
    return PreparedSchedule(schedule, Wires(places=places(topology, nodes)))


def pairs(lengths: Sequence[int], ranks: int, window: int = 0) -> np.ndarray:
    """Float [G, G]: visible pairs of the queries of each rank and the keys of each, zigzag within
    every document.

    Rank i has pieces i and 2 G - 1 - i of 2 G: with every other rank two squares of pieces are
    visible, with itself a square and two triangles.
    """
    if window:
        seen = sum(length * visible(length, window) for length in lengths)
        return np.full((ranks, ranks), seen / ranks**2)
    pieces = np.asarray(lengths, dtype=float) / (2 * ranks)
    each = 2 * float((pieces**2).sum())
    return np.full((ranks, ranks), each) + np.eye(ranks) * float(pieces.sum())


def _gathered(
    cluster: Cluster, run: Settings, model: Model, seconds: np.ndarray, forward: bool
) -> PassTime:
    """A pass of `all_gather`: a gather of all keys and values, two calls of the kernel, and in
    backward a reduce-scatter of all their gradients, one after another.
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
    """Sparse attention: index keys gathered, keys selected, latents gathered, attention; in
    backward attention and a reduce-scatter. Nothing runs beside anything else.
    """
    rates, sizes, index = cluster.rank_rates(), sizes_of(model, run), index_sizes(model, run)
    assert model.indexer is not None
    assert rates.compute is not None
    rows, calls = run.rows, 2 * rates.launch + rates.start
    seen = rows * min(model.indexer.top_k, visible(run.seq))
    attending = 2.0 * sizes.heads * (sizes.width + 2 * sizes.value_width) * seen / rates.compute
    there, back = reading(sizes, rates.memory, latent=True)
    there, back = max(there, attending), max(back, rates.backward * attending)
    scoring = 2.0 * index.heads * index.width * rows * visible(run.seq) / rates.compute
    keys, latents = (
        ring_seconds(cluster, run.cp, run.tp, B * run.seq * run.micro_batch * each)
        for each in (index.width, sizes.width + sizes.value_width)
    )
    forward = keys + latents + scoring + there + 2 * calls
    backward = latents + back + calls
    within = "intra" if run.cp == cluster.cp_per_node(run.tp, run.cp) else "inter"
    busy = {"compute": scoring + there + back, "intra": 0.0, "inter": 0.0}
    busy[within] = keys + 2 * latents
    host = (0.0, 0.0)
    if rates.host:  # index keys and latents are gathered; selecting and attending are calls
        host = rates.host.of_pass(2, 2), rates.host.of_pass(1, 2, backward=True)
    return AttentionTime(forward, backward, (0.0, 0.0), busy, host=host)


def whole_bytes(x: LayerSizes, run: Settings) -> int:
    """Bytes of the keys and values of the whole sequence, heads of one rank."""
    return run.seq * run.micro_batch * x.kv * B


# --- memory --------------------------------------------------------------------------------------


def peak_bytes(kind: Kind, model: Model, run: Settings, recompute: str) -> int:
    """Bytes of the peak of the rank that takes most. Selective recompute keeps, besides attention's
    results, its queries, keys and values and the input of the MLP half.
    """
    found = account(model, run, every=False, core_of=partial(core, kind))
    if recompute != "selective":
        return found.peak.bytes
    x = LayerSizes.of(model, run)
    kept = 0.0
    for stage in fullest_stages(run):
        layers = [model.parts[each].attention for each in layers_of(model, run, stage)]
        attending = sum(layer in SOFTMAX for layer in layers)
        each = attending * run.rows * (x.query + x.kv) * B
        each += len(layers) * run.rows / run.tp * model.hidden * B
        kept = max(kept, each * min(run.pp - stage, run.micro_batches))
    return found.peak.bytes + round(kept)


def core(kind: Kind, x: LayerSizes, run: Settings) -> Core:
    """What the core attention of one layer holds beside its tensors, counted in the source named
    above, of the rank that holds most.

    p2p: chunks of all ranks and a partial result of each step; in backward two buffers of keys,
    values and their gradients. all_gather: of the whole sequence in forward keys and values, and
    half of them again while they are put in order; in backward keys and values and the sums of
    their gradients, beside those that the kernel makes.
    """
    if x.indexer is not None:
        y = x.absorbed
        whole, keys = (run.seq * run.micro_batch * each * B for each in (y.kv, x.indexer.width))
        return Core(forward=2 * whole + keys, backward=2 * whole, sums=run.rows * y.query * F,
                    keys=run.seq * run.micro_batch, reordered=True, wire=B)  # fmt: skip
    q, kv, out = run.rows * x.query * B, run.rows * x.kv * B, run.rows * x.out * B
    common = Core(
        sums=q, keys=run.rows, store=run.store, heads_shared=run.ulysses, reordered=True, wire=B
    )
    ring = run.cp // run.ulysses
    if run.cp == 1 or kind == "a2a":
        return replace(common, sums=q + kv)
    if kind == "all_gather":
        whole = whole_bytes(x, run)
        keys = run.seq * run.micro_batch
        return replace(common, forward=1.5 * whole, backward=2 * whole, keys=keys)
    partial_results = ring * (out + run.rows * x.heads * F)
    return replace(common, forward=ring * kv + partial_results, backward=4 * kv)


# --- telling -------------------------------------------------------------------------------------


def facts(found: Rival) -> dict[str, Any]:
    """A kind as plain data: seconds, bytes."""
    if found.run is None or found.time is None or found.attention is None:
        return {"kind": found.kind, "refused": found.refused}
    sizes = {name: getattr(found.run, name) for name in GROUPS}
    return {"kind": found.kind, "groups": sizes, "recompute": found.recompute,
            "seconds": found.time.seconds, "attention": found.attention.seconds,
            "bytes": found.bytes, "fits": found.fits}  # fmt: skip
