# SPDX-License-Identifier: Apache-2.0
"""Masks, layouts and documents of `show`, from flags.

`--mask` names one of `MASKS`, whose numbers have flags of their own, or MODULE:NAME: a mask, or a
function without arguments that returns one. `--lengths` adds documents to any mask.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .... import masks
from ....layout import NAMES, Layout, make
from ....masks import Mask
from ....schedule.tables import Grid
from ....units import tokens_of

Window = tuple[int | None, int | None]


class _Number(NamedTuple):
    """A number of a mask: its flag, the name of the argument, its value if the flag is absent."""

    flag: str
    argument: str
    default: int | None
    text: str


# Name of a mask -> its class and its numbers.
MASKS: dict[str, tuple[type[Mask], tuple[_Number, ...]]] = {
    "causal": (masks.Causal, ()),
    "full": (masks.Full, ()),
    "window": (
        masks.Window,
        (
            _Number("--left", "left", None, "keys before the query that --mask window shows"),
            _Number("--right", "right", 0, "keys after the query that --mask window shows (0)"),
        ),
    ),
    "dilated": (
        masks.Dilated,
        (_Number("--stride", "stride", None, "distance of keys that --mask dilated shows"),),
    ),
    "prefix": (
        masks.Prefix,
        (_Number("--first", "n", None, "first keys of the sequence that --mask prefix shows"),),
    ),
}


def add_mask(parser: argparse.ArgumentParser, default: str | None) -> None:
    """Add `--mask` and the numbers of masks."""
    absent = default or "none; the work of ranks is then not drawn"
    parser.add_argument(
        "--mask", default=default, metavar="MASK",
        help=f"which pairs attend: {', '.join(MASKS)}, or MODULE:NAME of a mask or of a function "
        f"without arguments that returns one (default: {absent})",
    )  # fmt: skip
    for _, numbers in MASKS.values():
        for each in numbers:
            parser.add_argument(each.flag, type=int, metavar="N", help=each.text)


def add_lengths(parser: argparse.ArgumentParser) -> None:
    """Add `--lengths`."""
    text = "tokens of each packed document, such as 300,20,5; the rest of the sequence is another "
    parser.add_argument("--lengths", metavar="N,N,...", help=f"{text}document")


def add_layout(parser: argparse.ArgumentParser, default: str | None) -> None:
    """Add `--layout` and `--block`."""
    parser.add_argument(
        "--layout", default=default, choices=NAMES,
        help="which positions a rank holds "
        f"(default: {default or 'contiguous, zigzag and striped, and with --lengths balanced'})",
    )  # fmt: skip
    parser.add_argument(
        "--block", type=int, metavar="N",
        help="positions of a block that --layout block_striped cuts",
    )  # fmt: skip


def add_per_document(parser: argparse.ArgumentParser) -> None:
    """Add `--per-document`."""
    parser.add_argument(
        "--per-document",
        action="store_true",
        help="cut each of the documents by --layout zigzag, as Megatron does",
    )


# --- documents -----------------------------------------------------------------------------------


def lengths_of(text: str) -> list[int]:
    """Read the lengths of documents. Raises ValueError for what is no list of positive integers."""
    return [tokens_of(word, "--lengths") for word in text.split(",")]


def least_seq(text: str | None, ranks: int) -> int:
    """Return the fewest positions that hold these documents and that all layouts can cut."""
    return -(-sum(lengths_of(text)) // (2 * ranks)) * 2 * ranks if text else 0


def bounds_of(text: str | None, seq_len: int) -> list[int]:
    """Return where documents begin and end, from 0 to `seq_len`.

    Args:
        text: Lengths of documents; None for one document.
        seq_len: Positions of the sequence. Positions after the last length are one more document.

    Raises:
        ValueError: For lengths that do not fit.
    """
    lengths = lengths_of(text) if text is not None else []
    if sum(lengths) > seq_len:
        raise ValueError(
            f"--lengths: {sum(lengths)} tokens do not fit into {seq_len}; give --seq "
            f"{sum(lengths)} or shorter documents"
        )
    return np.unique([*np.cumsum([0, *lengths]).tolist(), seq_len]).tolist()


# --- masks ---------------------------------------------------------------------------------------


class ShownMask(NamedTuple):
    """A mask with the words of titles. documents: bounds of `--lengths`; None without them."""

    mask: Mask
    text: str
    documents: list[int] | None
    window: Window | None


def mask_of(arguments: argparse.Namespace, seq_len: int) -> ShownMask:
    """Make the mask of the flags; without `--mask` every pair attends.

    Args:
        arguments: Flags of `add_mask` and `add_lengths`.
        seq_len: Positions that the mask has to fit.

    Raises:
        ValueError: For a mask that does not exist or does not fit, and for flags of other masks.
    """
    mask, text = named_mask(arguments, arguments.mask or "full")
    window: Window | None = None  # how far a token of a document attends; None: causal
    if isinstance(mask, masks.Window):
        window = mask.left, mask.right
    elif isinstance(mask, masks.Full):
        window = None, None
    bounds = None
    if getattr(arguments, "lengths", None) is not None:
        bounds = bounds_of(arguments.lengths, seq_len)
        mask, text = masks.Documents(bounds) & mask, f"{text}, {len(bounds) - 1} documents"
    try:
        mask.check(seq_len)
    except ValueError as error:
        raise ValueError(f"--mask {text}: {error}") from error
    return ShownMask(mask, text, bounds, window)


def named_mask(arguments: argparse.Namespace, name: str) -> tuple[Mask, str]:
    """Make the mask of `--mask` alone; return it with the words of titles."""
    own = MASKS[name][1] if name in MASKS else ()
    for other, (_, numbers) in MASKS.items():
        for each in numbers:
            if each not in own and _value(arguments, each) is not None:
                raise ValueError(f"{each.flag} applies to --mask {other}, got --mask {name}")
    if ":" in name:
        return imported_mask(name), name
    if name not in MASKS:
        raise ValueError(
            f"--mask {name}: unknown; use {', '.join(MASKS)}, or MODULE:NAME of a mask or of a "
            "function without arguments that returns one"
        )
    values: dict[str, int] = {}
    for each in own:
        given = _value(arguments, each)
        value = each.default if given is None else given
        if value is None:
            raise ValueError(f"--mask {name} requires {each.flag} N")
        values[each.argument] = value
    try:
        mask = MASKS[name][0](**values)
    except ValueError as error:
        raise ValueError(f"--mask {name}: {error}") from error
    shown = [f"{each.flag[2:]} {values[each.argument]}" for each in own]
    return mask, " ".join([name, *shown])


def _value(arguments: argparse.Namespace, number: _Number) -> int | None:
    return getattr(arguments, number.flag[2:])


def imported_mask(path: str) -> Mask:
    """Import the mask MODULE:NAME, or call the function of this name.

    Raises:
        ValueError: If the module cannot be imported, or NAME is neither.
    """
    module, _, name = path.partition(":")
    expected = (
        "MODULE:NAME is a mask or a function without arguments that returns one, of a module that "
        "Python can import (PYTHONPATH)"
    )
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        if not isinstance(found, Mask):
            found = found()
    except Exception as error:  # whatever the user's module raises
        raise ValueError(f"--mask {path}: {type(error).__name__}: {error}; {expected}") from error
    if not isinstance(found, Mask):
        raise ValueError(f"--mask {path}: got {type(found).__name__}; {expected}")
    return found


# --- layouts -------------------------------------------------------------------------------------


class ShownLayout(NamedTuple):
    """A layout with the words of titles."""

    layout: Layout
    text: str


def layout_of(
    arguments: argparse.Namespace,
    name: str,
    grid: Grid,
    documents: Sequence[int] | None = None,
    window: Window | None = None,
    tree: masks.Tree | None = None,
) -> ShownLayout:
    """Make a layout over the ranks of a grid.

    Args:
        arguments: Flags of `add_layout`, and of `add_per_document` if the picture has them.
        name: Name of the layout.
        grid: Nodes and ranks on each.
        documents: Bounds of documents; None without documents.
        window: How far a token of a document attends, for layout balanced; None: causal.
        tree: Prefix tree that layout balanced cuts instead of documents.

    Raises:
        ValueError: For flags that do not fit together.
    """
    if arguments.block is not None and name != "block_striped":
        raise ValueError(f"--block applies to --layout block_striped, got {name}")
    if getattr(arguments, "per_document", False):
        if name != "zigzag" or documents is None:
            raise ValueError("--per-document requires --layout zigzag and --lengths")
        layout = make("zigzag", cp_size=grid.size, cu_seqlens=documents)
        return ShownLayout(layout, "zigzag of each document")
    if name == "block_striped":
        if arguments.block is None:
            raise ValueError("--layout block_striped requires --block N")
        layout = make("block_striped", cp_size=grid.size, block=arguments.block)
        return ShownLayout(layout, f"block_striped, block {arguments.block}")
    if name != "balanced":
        return ShownLayout(make(name, cp_size=grid.size), name)
    if tree is not None:
        return ShownLayout(make(name, cp_size=grid.size, tree=tree, per_node=grid.intra), name)
    if documents is None:
        raise ValueError("--layout balanced requires the documents of --lengths")
    layout = make(
        name, cp_size=grid.size, cu_seqlens=documents, per_node=grid.intra,
        windows=None if window is None else [window],
    )  # fmt: skip
    return ShownLayout(layout, name)
