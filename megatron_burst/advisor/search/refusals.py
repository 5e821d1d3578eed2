"""What `advise` refuses before it searches: what no way to share the GPUs out could have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from ...schedule.topology import alternatives, divisors
from ..clusters import Cluster
from ..settings import Settings
from ..shapes.model import Model
from .search_space import SEARCHED, STAGES, Wanted, groups_of, tensor_sizes


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
    if "ep" in pinned and (model.experts or 1) % pinned["ep"]:
        yield (
            f"--ep {pinned['ep']} does not divide the {model.experts} experts of {model.name}: "
            f"take {alternatives(divisors(model.experts or 1))}"
        )
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
    return (
        f"--gpus {cluster.gpus}: no TP x PP x CP x DP shares {want.sequences} sequences of "
        f"{want.seq:,} tokens out evenly: sequences must be a multiple of DP, and --seq of 2 x CP "
        f"and TP x CP. Give --seq a power of two, such as {1 << (want.seq - 1).bit_length()}, or "
        f"--tokens-per-step a multiple of it other than {tokens:,}"
    )
