# SPDX-License-Identifier: Apache-2.0
"""What would have to change for a run to be faster: each change is timed, none is guessed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import NamedTuple

from ....autotune.clusters import Cluster
from ....autotune.gpus import GIB
from ....autotune.host_time import HostTime
from ....units import byte_size
from ..settings import Settings
from .attention_choice import AttentionForecast
from .search import Configuration, Search
from .search_space import options_of

LEAST = 0.01  # of the time: smaller gains are not mentioned


class WhatIf(NamedTuple):
    """A change in words; gain: fraction of the time per token that it saves; with: the settings
    that then are best, in words, if they are others."""

    words: str
    gain: float
    then: str = ""

    @property
    def said(self) -> str:
        """ "links between nodes 2x as fast: -8 %"."""
        return f"{self.words}: {self.then + ', ' if self.then else ''}{-self.gain:.0%}"


def changes(best: Configuration, search: Search) -> list[WhatIf]:
    """Those that make the best run of a search at least 1 % faster, the largest gain first."""
    found = [*_faster(best, search), *_rounded(best, search), *_larger(best, search),
             *_longer(best, search)]  # fmt: skip
    return sorted((one for one in found if one.gain >= LEAST), key=lambda one: -one.gain)


def _faster(best: Configuration, search: Search) -> Iterator[WhatIf]:
    """Faster parts of the cluster, the run with the attention that is best then."""
    for words, other in faster_parts(search.cluster):
        yield _with(words, best, best.run, search.attention.on(other))


def _rounded(best: Configuration, search: Search) -> Iterator[WhatIf]:
    """Gradients of attention that travel in bf16. As that rounds them at every hop, no search takes
    it unless it is asked for."""
    if "wire" in search.want.pinned or best.run.cp == 1:
        return
    words = "gradients that attention sends in bf16 (--wire bf16: every hop rounds them)"
    run = replace(best.run, wire="bf16")
    yield _with(words, best, run, search.attention, lambda one: search.left(one).fits)


def _with(
    words: str, best: Configuration, run: Settings, attention: AttentionForecast,
    fits: Callable[[Settings], bool] = lambda _: True,
) -> WhatIf:  # fmt: skip
    """A run instead of the best one, or with the attention that then is faster, if that fits."""
    seconds, then = attention.step(run).seconds, ""
    other = attention.by_kind(attention.settled(run))
    if other != run and (faster := attention.step(other).seconds) < seconds and fits(other):
        seconds, then = faster, f"{other.algorithm}, side {other.side}"
        then += "".join(f", {own} in {kind} layers" for kind, own in other.by_kind.items())
        if other.ulysses > 1:
            then += f", {other.ulysses} ranks sharing heads"
    return WhatIf(words, 1 - seconds / best.seconds, then)


def faster_parts(cluster: Cluster) -> Iterator[tuple[str, Cluster]]:
    """The cluster with one kind of part faster, in words."""
    gpu, rates = cluster.gpu, cluster.rates
    kernels = replace(gpu, attention=min(1.0, 1.1 * gpu.attention))
    faster = rates and replace(rates, compute=1.1 * rates.compute if rates.compute else None)
    yield "attention kernels 10 % faster", replace(cluster, gpu=kernels, rates=faster)
    if cluster.gpus > cluster.per_node:
        shared = rates and (rates.nic and 2 * rates.nic)
        faster = rates and replace(rates, inter=2 * rates.inter, nic=shared)
        yield (
            "links between nodes 2x as fast",
            replace(cluster, nic_rate=2 * cluster.nic_rate, rates=faster),
        )
    faster = rates and replace(rates, intra=2 * rates.intra)
    yield (
        "links within nodes 2x as fast",
        replace(cluster, gpu=replace(gpu, nvlink=2 * gpu.nvlink), rates=faster),
    )
    yield "links to the host 2x as fast", replace(cluster, host_rate=2 * cluster.link)
    host = cluster.host_time
    twice = {field.name: getattr(host, field.name) / 2 for field in fields(host)}
    yield "processors that launch 2x as fast", replace(cluster, host_time=HostTime(**twice))
    memory = replace(gpu, memory_rate=2 * gpu.memory_rate)
    yield "GPU memory 2x as fast", replace(cluster, gpu=memory)


def _larger(best: Configuration, search: Search) -> Iterator[WhatIf]:
    """More GPU memory, at most as much again: the settings of these groups that are faster and
    lack least, and the fastest of them."""
    lacking: list[tuple[float, float, Settings]] = []
    for time, run in search.timed(options_of(best.run, search.want, chunked=False)):
        if best.run.by_kind:
            by_kind = search.attention.by_kind(run)
            time, run = min(
                (time, run), (search.attention.step(by_kind), by_kind),
                key=lambda each: each[0].seconds,
            )  # fmt: skip
        gain = 1 - time.seconds / best.seconds
        if gain >= LEAST:
            left = search.left(run)
            if -search.cluster.room <= left.device < 0 <= left.host:
                lacking.append((-left.device, gain, run))
    if not lacking:
        return
    taken = {min(lacking, key=lambda one: one[0]), max(lacking, key=lambda one: one[1])}
    for bytes_, gain, run in sorted(taken, key=lambda one: one[0]):
        more = byte_size(math.ceil(bytes_ / GIB) * GIB)
        yield WhatIf(f"{more} more memory per GPU", gain, options_said(run))


def options_said(run: Settings) -> str:
    """What a run recomputes and moves, in words."""
    said = ["no recompute"] if run.recompute == "none" else [f"store {run.store:g}"]
    if run.offload:
        said.append(f"offload {run.offload:g}")
    if run.sequence_chunks > 1:
        said.append(f"{run.sequence_chunks} sequence chunks")
    if run.mlp_tiles > 1:
        said.append(f"{run.mlp_tiles} MLP tiles")
    if run.optimizer_offload:
        said.append(f"optimizer offload {run.optimizer_offload:g}")
    return ", ".join(said)


def _longer(best: Configuration, search: Search) -> Iterator[WhatIf]:
    """Twice the sequences in a step: bubbles, reductions and updates are shared by more tokens."""
    run = replace(best.run, micro_batches=2 * best.run.micro_batches)
    time = search.attention.step(run)
    each = time.seconds / time.tokens
    yield WhatIf("2x the tokens per step", 1 - each / (best.seconds / best.time.tokens))
