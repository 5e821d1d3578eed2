"""What `advise` refuses before it searches: what no way to share the GPUs out could have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any, get_args

from ...options import algorithms
from ...schedule.topology import alternatives, divisors
from ..clusters import Cluster
from ..settings import Linear, Settings
from ..shapes.model import Model
from .search_space import SEARCHED, STAGES, Wanted, groups_of, tensor_sizes

LINEAR = get_args(Linear)
STEP = 4 * 2**20  # tokens of a step that a suggestion is near


def check_wanted(model: Model, cluster: Cluster, want: Wanted) -> None:
    """Raise ValueError, with what would do, unless there is a way to share the GPUs out."""
    names = [each.name for each in fields(Settings)]
    for name in want.pinned:
        if name not in names or name not in SEARCHED:
            raise ValueError(f"{name}: can be fixed are {', '.join(SEARCHED)}")
    for reason in _reasons(model, cluster, want):
        raise ValueError(reason)
    if next(groups_of(model, cluster, want), None) is None:
        raise ValueError(_no_way(model, cluster, want))


def _reasons(model: Model, cluster: Cluster, want: Wanted) -> Iterator[str]:
    pinned = want.pinned
    for name in ("tp", "pp", "vpp", "ep", "cp", "dp", "micro_batch", "ulysses", "head_chunks"):
        value = pinned.get(name, 1)
        if type(value) is not int or value < 1:
            yield f"--{name.replace('_', '-')} must be an integer from 1 on, got {value!r}"
    known = algorithms()
    if pinned.get("algorithm", "auto") not in known:
        yield f"--algorithm {pinned['algorithm']}: no such algorithm: take {alternatives(known)}"
    sizes = tensor_sizes(model, cluster)
    if "tp" in pinned and pinned["tp"] not in sizes:
        yield (
            f"--tp {pinned['tp']} does not divide {model.name}'s {model.heads} heads, "
            f"{model.kv_heads} key/value heads and widths and the {cluster.ranks_per_node} GPUs of "
            f"a node: take {alternatives(sizes)}"
        )
    if model.layers % (pinned.get("pp", 1) * pinned.get("vpp", 1)):
        good = [n for n in divisors(model.layers) if n <= min(STAGES, cluster.gpus)]
        yield (
            f"--pp {pinned.get('pp', 1)} x --vpp {pinned.get('vpp', 1)} do not divide the "
            f"{model.layers} layers of {model.name}: take --pp {alternatives(good)}"
        )
    if pinned.get("ep", 1) > 1 and not model.experts:
        yield f"--ep {pinned['ep']}: {model.name} has no experts: leave it out"
    if "ep" in pinned and (model.experts or 1) % pinned["ep"]:
        yield (
            f"--ep {pinned['ep']} does not divide the {model.experts} experts of {model.name}: "
            f"take {alternatives(divisors(model.experts or 1))}"
        )
    yield from _reasons_of_states(model, cluster, want)
    yield from _reasons_of_ranks(cluster, pinned)


def _reasons_of_states(model: Model, cluster: Cluster, want: Wanted) -> Iterator[str]:
    """Of layers that carry a state from row to row."""
    pinned = want.pinned
    if want.carries and "striped" in str(pinned.get("layout")):
        yield (
            f"--layout {pinned['layout']}: {model.name} has layers that carry a state from row to "
            "row, and every row's predecessor is on another rank: take zigzag, or leave it out"
        )
    if "linear" in pinned and pinned["linear"] not in LINEAR:
        yield f"--linear {pinned['linear']}: take {alternatives(LINEAR)}"
    if want.carries and pinned.get("linear") == "megatron" and "cp" in pinned:
        good = [cp for cp in divisors(cluster.gpus) if model.carried(pinned.get("tp", 1), cp)]
        if pinned["cp"] not in good:
            yield (
                f"--linear megatron shares the heads of {model.name}'s layers of linear attention "
                f"over --cp {pinned['cp']} ranks, which do not divide them: take --cp "
                f"{alternatives(good)}, or --linear auto, which takes any"
            )


def _reasons_of_ranks(cluster: Cluster, pinned: Mapping[str, Any]) -> Iterator[str]:
    """Of the groups that are pinned together."""
    stated = [n for n in ("tp", "pp", "cp", "dp") if n in pinned]
    product = 1
    for name in stated:
        product *= pinned[name]
    if cluster.gpus % product:
        said = " x ".join(f"--{name} {pinned[name]}" for name in stated)
        yield (
            f"{said} are {product} ranks, which do not divide --gpus {cluster.gpus}: take "
            f"{-(-cluster.gpus // product) * product} GPUs, or smaller groups"
        )


def _no_way(model: Model, cluster: Cluster, want: Wanted) -> str:
    """Why there is none, though nothing that is fixed is wrong by itself."""
    tokens = want.seq * want.sequences
    odd = cluster.gpus // (cluster.gpus & -cluster.gpus)  # what lengths of powers of two lack
    step = max(1, round(STEP / (odd * want.seq))) * odd * want.seq
    if odd > 1 and not want.pinned and step != tokens:
        there = replace(want, sequences=step // want.seq)
        if next(groups_of(model, cluster, there), None) is not None:
            return (
                f"--gpus {cluster.gpus}: {want.sequences} sequences of {want.seq:,} tokens are not "
                f"shared out evenly: take --tokens-per-step {step}"
            )
    return (
        f"--gpus {cluster.gpus}: no TP x PP x CP x DP shares {want.sequences} sequences of "
        f"{want.seq:,} tokens out evenly: sequences must be a multiple of DP, and --seq of 2 x CP "
        f"and TP x CP. Give --seq a power of two, such as {1 << (want.seq - 1).bit_length()}, or "
        f"--tokens-per-step a multiple of it other than {tokens:,}"
    )
