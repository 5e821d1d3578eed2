"""The flags that `advise` and `memory` share: fields of `Settings`, and the cluster.

A flag has the name of its field; its type or its choices are those of the field.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, get_args, get_type_hints

from ...autotune import clusters
from ...units import size_of
from .. import model_arguments
from .settings import Settings, flag_of

FIELDS = {
    "tp": "tensor-parallel ranks, with sequence parallelism",
    "cp": "context-parallel ranks",
    "pp": "pipeline stages",
    "vpp": "virtual stages of each",
    "ep": "expert-parallel ranks",
    "dp": "data-parallel ranks besides context parallelism",
    "micro_batch": "sequences of a micro-batch",
    "micro_batches": "micro-batches of a step on each rank",
    "recompute": "of layers",
    "store": "fraction of attention results that recompute keeps",
    "offload": "fraction of layer inputs and store that waits on the host",
    "sequence_chunks": "row chunks of the attention half",
    "mlp_tiles": "tiles of rows of the MLP half",
    "optimizer_offload": "fraction of optimizer states on the host",
    "optimizer_bytes": "bytes of fp32 weights and moments per parameter",
    "distributed_optimizer": "optimizer states shared out over ranks",
    "fsdp": "parameters and gradients are sharded too",
    "lm_head_loss": "the LM head and its loss as one operation, or apart",
    "gradients": "dtype in which gradients are summed",
    "wire": "dtype in which gradients of keys or queries travel",
    "algorithm": "of attention: ring, burst, hybrid, tile, ...",
    "side": "what travels in backward: kv or query",
    "linear": "what carries states of linear attention over ranks",
    "layout": "which rows each rank holds: zigzag or striped",
    "ulysses": "context-parallel ranks that share heads by all-to-all",
    "head_chunks": "groups of heads, of which one travels while another computes",
    "placement": "what lies next to each other: ranks that share heads, or a ring's",
    "path": "whose modules compute: Transformer Engine's, or Megatron's on a CPU",
}
_TYPES = get_type_hints(Settings)


def add_fields(parser: argparse.ArgumentParser, names: Iterable[str]) -> None:
    """Add the flags of these fields."""
    for name in names:
        kind, text = _TYPES[name], FIELDS[name]
        if words := get_args(kind):
            parser.add_argument(flag_of(name), choices=words, help=text)
        elif kind is bool:
            either = argparse.BooleanOptionalAction
            parser.add_argument(flag_of(name), action=either, default=None, help=text)
        else:
            metavar = "NAME" if kind is str else "N"
            parser.add_argument(flag_of(name), type=kind, metavar=metavar, help=text)


def given_fields(arguments: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Those of these fields that the user has given."""
    values = {name: getattr(arguments, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say which model on which GPUs."""
    add = parser.add_argument
    add("--model", metavar="NAME", help=model_arguments.HELP)
    add("--seq", metavar="N", help="tokens of a sequence, such as 131072, 128K or 1M")
    add("--gpus", type=int, metavar="N", help="of all nodes")
    add("--per-node", type=int, metavar="N", help="GPUs of a node (8)")
    add("--gpu", metavar="NAME", help=f"one of {', '.join(clusters.GPUS)} (h100)")
    add("--gpu-memory", metavar="SIZE", help="of another GPU, such as 96GiB")
    add("--host-memory", metavar="SIZE", help="of a node, to be taken (1.6TB)")
    add("--json", action="store_true", help="print JSON, for scripts")


def cluster_of(
    arguments: argparse.Namespace, cluster: clusters.Cluster | None = None
) -> clusters.Cluster:
    """The cluster of the flags; they change what `cluster` says, if one is given.

    Raises ValueError for flags that name no cluster.
    """
    if cluster is not None:
        named = {"gpus": arguments.gpus, "per_node": arguments.per_node}
        cluster = replace(cluster, **{k: v for k, v in named.items() if v is not None})
    else:
        per_node = 8 if arguments.per_node is None else arguments.per_node
        cluster = clusters.Cluster(clusters.gpu(arguments.gpu or "h100"), arguments.gpus, per_node)
    if arguments.gpu_memory:
        memory = size_of(arguments.gpu_memory, "--gpu-memory")
        cluster = replace(cluster, gpu=replace(cluster.gpu, name="GPU", memory=memory))
    if arguments.host_memory:
        memory = size_of(arguments.host_memory, "--host-memory")
        cluster = replace(cluster, host_memory=memory)
    return cluster
