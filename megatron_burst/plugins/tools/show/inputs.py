# SPDX-License-Identifier: Apache-2.0
"""Masks, layouts and documents that the flags of `show` describe.

`--mask` is a key of `MASKS`, or MODULE:NAME of a mask or of a function without arguments that
returns a mask. Parameters of masks have their own flags. `--lengths` restricts a mask to pairs
within the same document.
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
    """Integer parameter of a mask class, and the flag that sets it.

    Attributes:
        flag: Flag that sets the parameter.
        argument: Argument of the mask class.
        default: Value without the flag; None if the flag is required.
        text: Help text.
    """

    flag: str
    argument: str
    default: int | None
    text: str


# Name of a mask -> (class, parameters).
MASKS: dict[str, tuple[type[Mask], tuple[_Number, ...]]] = {
    "causal": (masks.Causal, ()),
    "full": (masks.Full, ()),
    "window": (
        masks.Window,
        (
            _Number("--left", "left", None, "visible keys before the query, for --mask window"),
            _Number("--right", "right", 0, "visible keys after the query, for --mask window (0)"),
        ),
    ),
    "dilated": (
        masks.Dilated,
        (_Number("--stride", "stride", None, "distance of visible keys, for --mask dilated"),),
    ),
    "compressed": (
        masks.Compressed,
        (_Number("--key-rows", "stride", None, "rows per compressed key, for --mask compressed"),),
    ),
    "prefix": (
        masks.Prefix,
        (_Number("--first", "n", None, "number of first keys visible to all, for --mask prefix"),),
    ),
}


def add_mask(parser: argparse.ArgumentParser, default: str | None) -> None:
    """Add `--mask`, and the flags that set parameters of masks, such as `--left`."""
    absent = default or "no mask; the work of ranks is then not drawn"
    parser.add_argument(
        "--mask", default=default, metavar="MASK",
        help=f"which pairs attend: {', '.join(MASKS)}, or MODULE:NAME of a mask or of a function "
        f"without arguments that returns a mask (default: {absent})",
    )  # fmt: skip
    for _, numbers in MASKS.values():
        for number in numbers:
            parser.add_argument(number.flag, type=int, metavar="N", help=number.text)


def add_lengths(parser: argparse.ArgumentParser) -> None:
    """Add `--lengths`, the tokens of each packed document."""
    text = "tokens of each packed document, such as 300,20,5; positions after them count as one "
    parser.add_argument("--lengths", metavar="N,N,...", help=f"{text}more document")


def add_layout(parser: argparse.ArgumentParser, default: str | None) -> None:
    """Add `--layout`, and `--block` for the layout block_striped."""
    parser.add_argument(
        "--layout", default=default, choices=NAMES,
        help="which positions a rank holds "
        f"(default: {default or 'contiguous, zigzag and striped, and with --lengths balanced'})",
    )  # fmt: skip
    parser.add_argument(
        "--block", type=int, metavar="N",
        help="positions per block, for --layout block_striped",
    )  # fmt: skip


def add_per_document(parser: argparse.ArgumentParser) -> None:
    """Add `--per-document`, with which a layout cuts each document separately."""
    parser.add_argument(
        "--per-document",
        action="store_true",
        help="let --layout zigzag cut each document separately, as Megatron does",
    )


# --- documents -----------------------------------------------------------------------------------


def lengths_of(text: str) -> list[int]:
    """Parse the lengths of documents, such as "300,20,5".

    Raises:
        ValueError: The text is not a list of positive integers.
    """
    return [tokens_of(word, "--lengths") for word in text.split(",")]


def least_seq(text: str | None, ranks: int) -> int:
    """Return the smallest sequence length that contains the documents and suits the layouts.

    It is a multiple of twice the number of ranks.

    Args:
        text: Lengths of documents, such as "300,20,5"; None gives 0.
        ranks: Number of ranks.
    """
    return -(-sum(lengths_of(text)) // (2 * ranks)) * 2 * ranks if text else 0


def bounds_of(text: str | None, seq_len: int) -> list[int]:
    """Return the cumulative lengths of documents, from 0 to `seq_len`.

    Args:
        text: Lengths of documents, such as "300,20,5"; None for one document.
        seq_len: Number of positions. Positions after the last document are one more document.

    Raises:
        ValueError: The documents are longer than the sequence.
    """
    lengths = lengths_of(text) if text is not None else []
    if sum(lengths) > seq_len:
        raise ValueError(
            f"--lengths: documents have {sum(lengths)} tokens in total, but --seq is {seq_len}; "
            f"set --seq {sum(lengths)}, or use shorter documents"
        )
    return np.unique([*np.cumsum([0, *lengths]).tolist(), seq_len]).tolist()


# --- masks ---------------------------------------------------------------------------------------


class ShownMask(NamedTuple):
    """Mask, and its description for titles.

    Attributes:
        mask: The mask, restricted to documents if there are any.
        text: Description of the mask for titles.
        documents: Cumulative lengths of the documents of `--lengths`; None without the flag.
        window: For masks window and full, (left, right): how many earlier and later tokens of its
            document a token attends to, None for all of them. None for other masks.
    """

    mask: Mask
    text: str
    documents: list[int] | None
    window: Window | None


def mask_of(arguments: argparse.Namespace, seq_len: int) -> ShownMask:
    """Return the mask that the flags describe; without `--mask` all pairs are visible.

    Args:
        arguments: Flags of `add_mask` and `add_lengths`.
        seq_len: Number of positions.

    Raises:
        ValueError: The mask does not exist or does not fit, or a flag belongs to another mask.
    """
    mask, text = named_mask(arguments, arguments.mask or "full")
    window: Window | None = None  # window within a document; None for other masks
    if isinstance(mask, masks.Window):
        window = mask.left, mask.right
    elif isinstance(mask, masks.Full):
        window = None, None
    bounds = None
    if isinstance(mask, masks.Compressed) and getattr(arguments, "lengths", None) is not None:
        raise ValueError("--lengths is not supported with --mask compressed; remove --lengths")
    if getattr(arguments, "lengths", None) is not None:
        bounds = bounds_of(arguments.lengths, seq_len)
        mask, text = masks.Documents(bounds) & mask, f"{text}, {len(bounds) - 1} documents"
    try:
        mask.check(seq_len)
    except ValueError as error:
        raise ValueError(f"--mask {text}: {error}") from error
    return ShownMask(mask, text, bounds, window)


def named_mask(arguments: argparse.Namespace, name: str) -> tuple[Mask, str]:
    """Return the mask that `--mask` names, without documents, and its description for titles."""
    own = MASKS[name][1] if name in MASKS else ()
    for mask_name, (_, numbers) in MASKS.items():
        for number in numbers:
            if number not in own and _value(arguments, number) is not None:
                raise ValueError(f"{number.flag} applies to --mask {mask_name}, got --mask {name}")
    if ":" in name:
        return imported_mask(name), name
    if name not in MASKS:
        raise ValueError(
            f"--mask {name}: unknown; use {', '.join(MASKS)}, or MODULE:NAME of a mask or of a "
            "function without arguments that returns a mask"
        )
    values: dict[str, int] = {}
    for number in own:
        value = _value(arguments, number)
        value = number.default if value is None else value
        if value is None:
            raise ValueError(f"--mask {name} requires {number.flag} N")
        values[number.argument] = value
    try:
        mask = MASKS[name][0](**values)
    except ValueError as error:
        raise ValueError(f"--mask {name}: {error}") from error
    shown = [f"{number.flag[2:]} {values[number.argument]}" for number in own]
    return mask, " ".join([name, *shown])


def _value(arguments: argparse.Namespace, number: _Number) -> int | None:
    return getattr(arguments, number.flag[2:].replace("-", "_"))


def imported_mask(path: str) -> Mask:
    """Return the mask MODULE:NAME, or the mask that the function MODULE:NAME returns.

    Raises:
        ValueError: The module cannot be imported, or NAME is neither a mask nor a function that
            returns one.
    """
    module, _, name = path.partition(":")
    expected = (
        "MODULE:NAME must be a mask or a function without arguments that returns a mask, in a "
        "module that Python can import (PYTHONPATH)"
    )
    try:
        mask: Any = importlib.import_module(module)
        for part in name.split("."):
            mask = getattr(mask, part)
        if not isinstance(mask, Mask):
            mask = mask()
    except Exception as error:  # the user's module may raise anything
        raise ValueError(f"--mask {path}: {type(error).__name__}: {error}; {expected}") from error
    if not isinstance(mask, Mask):
        raise ValueError(f"--mask {path}: got {type(mask).__name__}; {expected}")
    return mask


# --- layouts -------------------------------------------------------------------------------------


class ShownLayout(NamedTuple):
    """Layout, and its description for titles."""

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
    """Return a layout over the ranks of a grid.

    Args:
        arguments: Flags of `add_layout`, and of `add_per_document` if the picture has them.
        name: Name of the layout.
        grid: Number of nodes and of ranks per node.
        documents: Cumulative lengths of documents; None without documents.
        window: Attention window within a document, for layout balanced; None if causal.
        tree: Prefix tree, for layout balanced; replaces documents.

    Raises:
        ValueError: Flags are inconsistent.
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
        raise ValueError(
            "--layout balanced requires documents; add --lengths, or use another layout"
        )
    layout = make(
        name, cp_size=grid.size, cu_seqlens=documents, per_node=grid.intra,
        windows=None if window is None else [window],
    )  # fmt: skip
    return ShownLayout(layout, name)
