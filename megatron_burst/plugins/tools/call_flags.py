# SPDX-License-Identifier: Apache-2.0
"""Flags that several commands share, and their checks. No torch.

A flag has one name in all commands, `--tp` or `--per-node`; Megatron's long name is an alias.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterable
from pathlib import Path

from ...schedule.tables import SIDES

# A flag's name -> what else it may be called.
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
    """A flag and its aliases, for `add_argument`; the attribute has the name of the flag."""
    return name, *ALIASES.get(name, ())


def add_out(parser: argparse.ArgumentParser, what: str, *, required: bool = False) -> None:
    """Add `--out FILE`. what: the picture."""
    text = f"{what}: file to write, with a name that ends in .png or .svg"
    parser.add_argument("--out", type=Path, required=required, metavar="FILE", help=text)


def check_out(path: Path | None) -> None:
    """Raise ValueError unless the picture of `--out` can be written, or there is none."""
    if path is None:
        return
    if path.suffix not in (".png", ".svg"):
        raise ValueError(f"--out: the name of the file must end in .png or .svg, got {path}")
    check_place(path, "--out")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--out needs matplotlib: pip install matplotlib")


def add_grid(
    parser: argparse.ArgumentParser, nodes: int | None = None, per_node: int | None = None
) -> None:
    """Add `--nodes` and `--per-node`, and what they are where nobody says."""
    for flag, value, what in (
        ("--nodes", nodes, "number of nodes"),
        ("--per-node", per_node, "ranks on each node"),
    ):
        said = "" if value is None else f" (default: {value})"
        parser.add_argument(*named(flag), type=int, metavar="N", default=value, help=what + said)


def add_side(parser: argparse.ArgumentParser) -> None:
    """Add `--side`."""
    parser.add_argument("--side", default="auto", choices=("auto", *SIDES), help="tensors sent in "
                        "backward (default: auto, those with fewer bytes)")  # fmt: skip


def add_heads(parser: argparse.ArgumentParser, *, width: int, queries: bool = True) -> None:
    """Add `--heads`, if queries matter, `--kv-heads` and `--width`. width: of a head, where nobody
    says.
    """
    defaults = {"heads": (8, "query heads"), "kv-heads": (8, "key/value heads"),
                "width": (width, "width of a head")}  # fmt: skip
    for name, (value, what) in defaults.items():
        if name == "heads" and not queries:
            continue
        parser.add_argument(
            f"--{name}", type=int, metavar="N", default=value, help=f"{what} (default: {value})"
        )


def check_positive(arguments: argparse.Namespace, names: Iterable[str]) -> None:
    """Raise ValueError for one of these flags that is given and below 1."""
    for name in names:
        value = getattr(arguments, name, None)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")


def check_place(path: Path | None, flag: str) -> None:
    """Raise ValueError where the folder of a file to be written does not exist."""
    if path is not None and not path.absolute().parent.is_dir():
        raise ValueError(f"{flag} {path}: its folder does not exist")
