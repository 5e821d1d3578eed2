"""Tables of bits of partly visible tiles: which tiles look alike, and what each shows.

Decides how a table is made: row by row from intervals, 32 columns at a time, of one tile of all
that have equal parts; where parts are not known, by the mask's answer for every pair of positions.
It needs no torch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..masks import Mask
from ..masks.seen import counted
from .tile_parts import Frame, Pairs, Parts

WORD = 32  # columns in one entry of a table
PARTS = 64  # tiles with more are not compared with others: their tables are made in less time
DRAWN = 8  # intervals of each row: with more, the mask's answer for all positions takes less time
AT_ONCE = 1024  # tables that are drawn together


class Tables(NamedTuple):
    """bits: int32 [n, rows, columns / 32]; column c of a row is bit c % 32 of entry c // 32.
    visible: int64 [n], how many bits are set."""

    bits: np.ndarray
    visible: np.ndarray


def tables_of(
    mask: Mask, pairs: Pairs, frame: Frame, parts: Parts, asked: np.ndarray
) -> tuple[np.ndarray, np.ndarray, Tables]:
    """The tiles that have parts or are asked about, in order; the table of each; the tables."""
    tiles, which = np.unique(parts.tile, return_inverse=True)
    drawn = np.bincount(which, parts.bottom - parts.top)
    many = tiles[drawn > DRAWN * frame.size[0]]
    asked = np.union1d(asked, many)
    if len(asked):
        parts = parts.at(np.flatnonzero(~np.isin(parts.tile, asked)))
    tile, table, example = _alike(parts, frame.size)
    drawn, looked = _drawn(example, frame.size), _looked_up(mask, pairs, frame, asked)
    tables = Tables(*map(np.concatenate, zip(drawn, looked, strict=True)))
    tile = np.concatenate([tile, asked])
    table = np.concatenate([table, len(drawn.bits) + np.arange(len(asked))])
    order = np.argsort(tile, kind="stable")
    return tile[order], table[order], tables


def _alike(parts: Parts, size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, Parts]:
    """The tiles; of each a number, the same for tiles of equal parts; and for every number the
    parts of one such tile, whose `tile` is the number."""
    rows, columns = size
    fields = (*parts[1:5], parts.low + rows, parts.high + rows)
    shape = (rows + 1, rows + 1, columns + 1, columns + 1, *[rows + columns + 1] * 2)
    code = np.ravel_multi_index(fields, shape)  # what a part shows, as one number
    order = np.lexsort((code, parts.tile))
    parts = parts.at(order)
    _, code = np.unique(code[order], return_inverse=True)
    tile, first, count = np.unique(parts.tile, return_index=True, return_counts=True)
    # Equal in the first n parts, and then in one more; tiles with fewer parts got other numbers.
    look, codes = code[first].copy(), int(code.max(initial=0)) + 1
    for n in range(1, min(count.max(initial=0), PARTS)):
        more = np.flatnonzero(count > n)
        _, found = np.unique(look[more] * codes + code[first[more] + n], return_inverse=True)
        look[more] = look.max() + 1 + found
    many = np.flatnonzero(count > PARTS)
    look[many] = look.max(initial=0) + 1 + np.arange(len(many))
    _, example, look = np.unique(look, return_index=True, return_inverse=True)
    count = count[example]
    which = counted(first[example], count)
    example = parts.at(which)._replace(tile=np.repeat(np.arange(len(count)), count))
    return tile, look, example


def _drawn(parts: Parts, size: tuple[int, int]) -> Tables:
    """The tables that these parts show, in the order of `tile`."""
    tables = int(parts.tile.max(initial=-1)) + 1
    bits = np.zeros((tables, size[0], size[1] // WORD), dtype=np.int32)
    visible = np.zeros(tables, dtype=np.int64)
    for low in range(0, tables, AT_ONCE):
        high = min(low + AT_ONCE, tables)
        some = slice(*np.searchsorted(parts.tile, (low, high)))
        _draw(parts.at(some), bits[low:high], visible[low:high], low)
    return Tables(bits, visible)


def _draw(parts: Parts, bits: np.ndarray, visible: np.ndarray, low: int) -> None:
    """Parts of the tables from `low` on, as intervals of every row."""
    (_, rows, words), high = bits.shape, parts.bottom - parts.top
    of, row = np.repeat(np.arange(len(high)), high), counted(parts.top, high)
    begin = np.maximum(parts.begin[of], row + parts.low[of])
    end = np.minimum(parts.end[of], row + parts.high[of] + 1)
    length = np.maximum(end - begin, 0)
    table = parts.tile[of] - low
    visible += np.bincount(table, length, len(bits)).astype(np.int64)
    at = table * rows + row
    for word in range(words):
        # No two parts share a bit, so a sum, exact in float64, is what a bitwise or would be.
        first, stop = (np.clip(x - word * WORD, 0, WORD) for x in (begin, begin + length))
        value = (np.int64(1) << stop) - (np.int64(1) << first)
        total = np.bincount(at, value, len(bits) * rows).astype(np.uint32)
        bits[:, :, word] = total.view(np.int32).reshape(-1, rows)


def _looked_up(mask: Mask, pairs: Pairs, frame: Frame, tiles: np.ndarray) -> Tables:
    """The tables of these tiles, by the mask's answer for all their positions."""
    rows, columns = frame.size
    bits = np.zeros((len(tiles), rows, columns // WORD), dtype=np.int32)
    visible = np.zeros(len(tiles), dtype=np.int64)
    positions: dict[int, list[np.ndarray]] = {}
    for n, (pair, i, j) in enumerate(zip(*(x.tolist() for x in frame.place(tiles)), strict=True)):
        if pair not in positions:
            positions[pair] = [
                np.concatenate([s.positions() for s in side]) for side in pairs[pair]
            ]
        q, k = positions[pair]
        q, k = q[i * rows : (i + 1) * rows], k[j * columns : (j + 1) * columns]
        table = np.zeros((rows, columns), dtype=bool)
        table[: len(q), : len(k)] = mask.visible(q[:, None], k[None, :])
        bits[n] = np.packbits(table, axis=1, bitorder="little").view(np.int32)
        visible[n] = table.sum()
    return Tables(bits, visible)
