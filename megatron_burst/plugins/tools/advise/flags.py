# SPDX-License-Identifier: Apache-2.0
"""Flags that `advise` and `memory` share: for the model, the cluster and fields of `Settings`.

The flag of a field has the name of the field, and its type or its choices.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import replace
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from ....autotune import clusters
from ....autotune.gpus import with_kernel
from ....units import size_of
from .. import model_arguments
from ..call_flags import named
from .search.packed import NAMED, TITLE
from .settings import Settings, flag_of

# Field of `Settings` -> help text of its flag.
FIELDS = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(Settings, include_extras=True).items()
    if get_origin(hint) is Annotated
}
_TYPES = get_type_hints(Settings)


def add_fields(parser: argparse.ArgumentParser, names: Iterable[str]) -> None:
    """Add one flag to a parser for each field of `Settings` in `names`."""
    for name in names:
        kind, text = _TYPES[name], FIELDS[name]
        kinds = [option for option in get_args(kind) if option is not NoneType]
        if kinds and isinstance(kinds[0], type):  # a number, or none
            (kind,) = kinds
        if words := get_args(kind):
            parser.add_argument(*named(flag_of(name)), choices=words, help=text)
        elif kind is bool:
            either = argparse.BooleanOptionalAction
            parser.add_argument(flag_of(name), action=either, default=None, help=text)
        else:
            metavar = "NAME" if kind is str else "N"
            parser.add_argument(*named(flag_of(name)), type=kind, metavar=metavar, help=text)


def given_fields(arguments: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Return the fields in `names` whose flags the user has set: field name -> value."""
    values = {name: getattr(arguments, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the model, the sequence length, the GPUs and JSON output."""
    add = parser.add_argument
    add("--model", metavar="NAME", help=model_arguments.HELP)
    add(*named("--seq"), metavar="N", help="sequence length in tokens: 131072, 128K, 1M")
    add("--gpus", type=int, metavar="N", help="number of GPUs, over all nodes")
    add(*named("--per-node"), type=int, metavar="N", help="GPUs per node (8)")
    add("--gpu", metavar="NAME", help=f"type of GPU: {', '.join(clusters.GPUS)} (h100)")
    add(
        "--gpu-memory",
        metavar="SIZE",
        help="memory of one GPU, such as 96GiB (default: the memory of --gpu)",
    )
    add("--host-memory", metavar="SIZE", help="host memory per node that may be used (1.6TB)")
    add("--json", action="store_true", help="print JSON, for scripts")


def add_packed(parser: argparse.ArgumentParser) -> None:
    """Add the flag `--packed` for the lengths of packed documents."""
    lengths = f"lengths such as 8K,32K,128K, a file of lengths, or {', '.join(NAMED)}"
    text = f"packed documents, in packs of --seq tokens: {lengths}"
    parser.add_argument(TITLE, metavar="LENGTHS", help=text)


def cluster_of(
    arguments: argparse.Namespace,
    cluster: clusters.Cluster | None = None,
    kernel: str | None = None,
) -> clusters.Cluster:
    """Return the cluster that the flags describe.

    Args:
        arguments: Parsed flags.
        cluster: Cluster whose fields the flags replace; None for the published values of `--gpu`.
        kernel: Attention kernel whose published rate the forecast uses; None for the fastest
            kernel.

    Raises:
        ValueError: The flags do not describe a cluster.
    """
    if cluster is not None:
        named = {"gpus": arguments.gpus, "per_node": arguments.per_node}
        cluster = replace(cluster, **{k: v for k, v in named.items() if v is not None})
    else:
        per_node = 8 if arguments.per_node is None else arguments.per_node
        cluster = clusters.Cluster(clusters.gpu(arguments.gpu or "h100"), arguments.gpus, per_node)
    if kernel is not None and cluster.kernels_measured:
        raise ValueError(
            f"--kernel {kernel} selects a published rate, but the cluster file has a measured "
            "rate; remove --kernel"
        )
    cluster = replace(cluster, gpu=with_kernel(cluster.gpu, kernel))
    if arguments.gpu_memory:
        memory = size_of(arguments.gpu_memory, "--gpu-memory")
        cluster = replace(cluster, gpu=replace(cluster.gpu, name="GPU", memory=memory))
    if arguments.host_memory:
        memory = size_of(arguments.host_memory, "--host-memory")
        cluster = replace(cluster, host_memory=memory)
    return cluster
