"""Flags of one attention call, and checks, that several commands here share. No torch."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterable
from pathlib import Path

from ..schedule.tables import SIDES


def add_side(parser: argparse.ArgumentParser) -> None:
    """Add `--side`."""
    parser.add_argument("--side", default="auto", choices=("auto", *SIDES), help="which tensors "
                        "travel in backward (default: the side with fewer bytes)")  # fmt: skip


def add_heads(parser: argparse.ArgumentParser, *, width: int) -> None:
    """Add `--heads`, `--kv-heads` and `--width`. width: of a head, where nobody says."""
    defaults = {"heads": (8, "query heads"), "kv-heads": (8, "key and value heads"),
                "width": (width, "width of a head")}  # fmt: skip
    for name, (value, what) in defaults.items():
        parser.add_argument(f"--{name}", type=int, metavar="N", default=value,
                            help=f"{what} (default: {value})")  # fmt: skip


def check_positive(arguments: argparse.Namespace, names: Iterable[str]) -> None:
    """Raise ValueError for one of these flags that is given and below 1."""
    for name in names:
        value = getattr(arguments, name, None)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")


def check_place(path: Path | None, flag: str) -> None:
    """Raise ValueError where the folder of a file to be written does not exist, or where it is a
    picture and matplotlib is not there to draw it."""
    if path is not None and not path.absolute().parent.is_dir():
        raise ValueError(f"{flag} {path}: its folder does not exist")
    if path is not None and flag == "--png" and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--png needs matplotlib: pip install 'megatron-burst[show]'")
