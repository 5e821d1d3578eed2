"""The small language in which masks and layouts are written on a command line.

    mask    full  causal  window:LEFT,RIGHT  dilated:STRIDE  documents:LENGTHS  prefix:N
            block:N:TABLE  table:TABLE         combined with & and |, & binds tighter, ( )
    layout  contiguous  zigzag  striped  block_striped:BLOCK  zigzag:LENGTHS (within documents)

LENGTHS are document lengths with commas. TABLE is rows of 0 and 1 with slashes, or for blocks
`random` or `random:SEED`. Knows how masks are written and nothing of what they mean; an error
is a ValueError that shows the place and what would work.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple, NoReturn

import numpy as np

from ... import layout, masks
from ...layout import Layout
from ...masks import Mask

DENSITY = 0.25  # of the blocks of a random table; those on the diagonal are always visible


class _Token(NamedTuple):
    text: str
    place: int


class _Word(NamedTuple):
    usage: str
    make: Callable[[str, int], Mask]  # from what follows the colon, and the length


def mask(text: str, seq_len: int) -> Mask:
    """The mask that `text` describes over a sequence of `seq_len` positions."""
    return _Reader(text, seq_len).whole()


def make_layout(text: str, ranks: int) -> Layout:
    """The layout that `text` describes over `ranks` ranks."""
    name, colon, rest = text.strip().partition(":")
    try:
        if not colon:
            if name == "block_striped":
                raise ValueError(f"give the block: block_striped:{ranks}")
            return layout.make(name, cp_size=ranks)
        if name == "block_striped":
            return layout.make(name, cp_size=ranks, block=_numbers(rest, 1)[0])
        if name == "zigzag":
            return layout.make(name, cp_size=ranks, cu_seqlens=_bounds(_numbers(rest)))
        raise ValueError(
            f"{name} takes no {rest!r}; only block_striped:BLOCK and zigzag:LENGTHS take something"
        )
    except ValueError as error:
        raise ValueError(f"--layout {text!r}: {error}") from None


def _numbers(text: str, count: int | None = None) -> list[int]:
    parts = text.split(",")
    if not all(re.fullmatch(r"\d+", part) for part in parts) or (count or len(parts)) != len(parts):
        many = "whole numbers with commas between them" if count is None else f"{count} of them"
        many = "a whole number" if count == 1 else many
        raise ValueError(f"expected {many}, got {text!r}")
    return [int(part) for part in parts]


def _bounds(lengths: list[int]) -> list[int]:
    return np.cumsum([0, *lengths]).tolist()


def _table(text: str) -> np.ndarray:
    rows = text.split("/")
    if not all(re.fullmatch("[01]+", row) and len(row) == len(rows) for row in rows):
        raise ValueError(f"expected as many rows of 0 and 1 as columns, like 10/11, got {text!r}")
    return np.array([[digit == "1" for digit in row] for row in rows])


# --- words of masks ------------------------------------------------------------------------


def _plain(make: Callable[[], Mask]) -> Callable[[str, int], Mask]:
    def without_arguments(rest: str, seq_len: int) -> Mask:
        if rest:
            raise ValueError(f"takes nothing after a colon, got {rest!r}")
        return make()

    return without_arguments


def _window(rest: str, seq_len: int) -> Mask:
    sides = rest.split(",")
    if len(sides) != 2 or not all(re.fullmatch(r"\d+|none", side) for side in sides):
        raise ValueError(f"expected two whole numbers, or none for no limit, got {rest!r}")
    left, right = (None if side == "none" else int(side) for side in sides)
    return masks.Window(left, right)


def _documents(rest: str, seq_len: int) -> Mask:
    lengths = _numbers(rest)
    if sum(lengths) != seq_len:
        raise ValueError(
            f"the lengths add up to {sum(lengths)}, and the sequence has {seq_len} positions"
        )
    return masks.Documents(_bounds(lengths))


def _block(rest: str, seq_len: int) -> Mask:
    size, _, table = rest.partition(":")
    block = _numbers(size, 1)[0]
    if block < 1 or seq_len % block:
        raise ValueError(f"blocks of {block} do not divide the {seq_len} positions")
    count = seq_len // block
    kind, _, seed = table.partition(":")
    if kind == "random":
        source = np.random.RandomState(_numbers(seed or "0", 1)[0])  # its stream never changes
        return masks.BlockSparse((source.rand(count, count) < DENSITY) | np.eye(count, dtype=bool),
                                 block)  # fmt: skip
    rows = _table(table)
    if len(rows) != count:
        raise ValueError(f"{len(rows)} blocks of {block}, and the sequence has {count} of them")
    return masks.BlockSparse(rows, block)


def _dense(rest: str, seq_len: int) -> Mask:
    mask = masks.Dense(_table(rest))
    mask.check(seq_len)
    return mask


WORDS = {
    "full": _Word("full", _plain(masks.Full)),
    "causal": _Word("causal", _plain(masks.Causal)),
    "window": _Word("window:LEFT,RIGHT", _window),
    "dilated": _Word("dilated:STRIDE", lambda rest, _: masks.Dilated(_numbers(rest, 1)[0])),
    "documents": _Word("documents:LENGTHS", _documents),
    "prefix": _Word("prefix:N", lambda rest, _: masks.Prefix(_numbers(rest, 1)[0])),
    "block": _Word("block:N:random or block:N:ROWS", _block),
    "table": _Word("table:ROWS", _dense),
}


MOST_WORDS = 100


class _Reader:
    """Recursive descent over the tokens; the words above make the masks."""

    def __init__(self, text: str, seq_len: int):
        self.text, self.seq_len = text, seq_len
        found = re.finditer(r"[&|()]|[^\s&|()]+", text)
        self.tokens = [_Token(match.group(), match.start()) for match in found]
        if len(self.tokens) > MOST_WORDS:  # masks nest as deep as their text
            raise ValueError(
                f"--mask: at most {MOST_WORDS} words and brackets, got {len(self.tokens)}"
            )
        self.tokens.append(_Token("", len(text)))
        self.at = 0

    def whole(self) -> Mask:
        mask = self.any_of()
        if self.next.text:
            self.fail(self.next, "expected & or | or the end")
        return mask

    @property
    def next(self) -> _Token:
        return self.tokens[self.at]

    def take(self, text: str) -> bool:
        found = self.next.text == text
        self.at += found
        return found

    def any_of(self) -> Mask:
        mask = self.all_of()
        while self.take("|"):
            mask = mask | self.all_of()
        return mask

    def all_of(self) -> Mask:
        mask = self.one()
        while self.take("&"):
            mask = mask & self.one()
        return mask

    def one(self) -> Mask:
        token = self.next
        if self.take("("):
            mask = self.any_of()
            if not self.take(")"):
                self.fail(self.next, f"expected ) for the ( at character {token.place + 1}")
            return mask
        name, _, rest = token.text.partition(":")
        if name not in WORDS:
            usages = ", ".join(word.usage for word in WORDS.values())
            self.fail(token, f"expected a mask: {usages}, or one in ( )")
        self.at += 1
        try:
            return WORDS[name].make(rest, self.seq_len)
        except ValueError as error:
            self.fail(token, f"{error}; use {WORDS[name].usage}")

    def fail(self, token: _Token, problem: str) -> NoReturn:
        where = f"character {token.place + 1} ({token.text})" if token.text else "the end"
        raise ValueError(f"--mask {self.text!r}, at {where}: {problem}")
