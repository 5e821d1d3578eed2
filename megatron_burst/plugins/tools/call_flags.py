# SPDX-License-Identifier: Apache-2.0
"""Command-line flags that several commands share, and checks of their values.

A flag has the same name in all commands, such as `--tp` or `--per-node`. Megatron's long name is an
alias. This module does not import torch.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterable
from pathlib import Path

from ...schedule.tables import SIDES

# Name of a flag -> aliases.
ALIASES = {
    "--seq": ("--seq-length",),
    "--per-node": ("--gpus-per-node",),
    "--tp": ("--tensor-model-parallel-size",),
    "--cp": ("--context-parallel-size",),
    "--pp": ("--pipeline-model-parallel-size",),
    "--vpp": ("--num-virtual-stages-per-pipeline-rank",),
    "--ep": ("--expert-model-parallel-size",),
    "--micro-batch": ("--micro-batch-size",),
}


def named(name: str) -> tuple[str, ...]:
    """Return all names of a flag, as arguments of `add_argument`: the flag, then its aliases."""
    return name, *ALIASES.get(name, ())


def add_out(parser: argparse.ArgumentParser, picture: str, *, required: bool = False) -> None:
    """Add `--out FILE`; `picture` describes the picture in the help text."""
    text = f"{picture}: file to write, with a name that ends in .png or .svg"
    parser.add_argument("--out", type=Path, required=required, metavar="FILE", help=text)


def check_out(path: Path | None) -> None:
    """Raise ValueError if a picture cannot be written to the path of `--out`.

    Reasons are a name without .png or .svg, a missing folder, and missing matplotlib.
    """
    if path is None:
        return
    if path.suffix not in (".png", ".svg"):
        raise ValueError(f"--out: the file name must end in .png or .svg, got {path}")
    check_place(path, "--out")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--out requires matplotlib: pip install matplotlib")


def add_grid(
    parser: argparse.ArgumentParser, nodes: int | None = None, per_node: int | None = None
) -> None:
    """Add `--nodes` and `--per-node`; `nodes` and `per_node` are the defaults."""
    for flag, value, meaning in (
        ("--nodes", nodes, "number of nodes"),
        ("--per-node", per_node, "ranks on each node"),
    ):
        text = meaning if value is None else f"{meaning} (default: {value})"
        parser.add_argument(*named(flag), type=int, metavar="N", default=value, help=text)


def add_side(parser: argparse.ArgumentParser) -> None:
    """Add `--side`: the tensors that ranks send in backward, keys and values or queries."""
    parser.add_argument("--side", default="auto", choices=("auto", *SIDES), help="tensors sent in "
                        "backward (default: auto, those with fewer bytes)")  # fmt: skip


def add_heads(parser: argparse.ArgumentParser, *, width: int, queries: bool = True) -> None:
    """Add `--heads`, `--kv-heads` and `--width`.

    Args:
        parser: Parser of the command.
        width: Default width of a head.
        queries: False omits `--heads`.
    """
    defaults = {"heads": (8, "query heads"), "kv-heads": (8, "key/value heads"),
                "width": (width, "width of a head")}  # fmt: skip
    for name, (value, meaning) in defaults.items():
        if name == "heads" and not queries:
            continue
        parser.add_argument(
            f"--{name}", type=int, metavar="N", default=value, help=f"{meaning} (default: {value})"
        )


def check_positive(arguments: argparse.Namespace, names: Iterable[str]) -> None:
    """Raise ValueError if an argument in `names` is set to a number below 1."""
    for name in names:
        value = getattr(arguments, name, None)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")


def check_place(path: Path | None, flag: str) -> None:
    """Raise ValueError if the folder of an output file does not exist.

    Args:
        path: Path of the file, or None.
        flag: Flag that sets the path, for the message.
    """
    if path is not None and not path.absolute().parent.is_dir():
        raise ValueError(f"{flag} {path}: its folder does not exist; create it")
