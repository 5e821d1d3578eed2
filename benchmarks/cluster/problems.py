"""Masks of the benchmark by name, documents of packed batches, and attention in one process.

Tables and the command line use these names. Document lengths are log-normal with a cap, drawn until
the sequence is full; the last document is cut. A seed gives the same documents on every machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from megatron_burst.masks import (
    BlockSparse,
    Causal,
    Documents,
    Full,
    Mask,
    Window,
)


class Lengths(NamedTuple):
    """Log-normal document lengths in tokens, at most `cap`."""

    median: int
    sigma: float
    cap: int


DOCUMENTS = {"500": Lengths(500, 1.5, 8 * 1024), "1K": Lengths(1024, 1.8, 64 * 1024),
             "tail": Lengths(2048, 1.8, 512 * 1024)}  # fmt: skip
MASKS = f"causal, full, window N, blocks N, documents {'|'.join(DOCUMENTS)} seed N"
ROWS = 512  # queries per call if the mask is a table
SHOWN = 0.2  # fraction of the block pairs of a block-sparse mask, in addition to the diagonal


def bounds(name: str, seed: int, length: int) -> list[int]:
    """Return cumulative lengths of the documents of one batch of `length` tokens."""
    median, sigma, cap = DOCUMENTS[name]
    generator = np.random.default_rng(seed)
    document_bounds = [0]
    while document_bounds[-1] < length:
        document_length = int(np.clip(round(generator.lognormal(np.log(median), sigma)), 1, cap))
        document_bounds.append(min(document_bounds[-1] + document_length, length))
    return document_bounds


def bounds_of(text: str, length: int) -> list[int] | None:
    """Return cumulative lengths of the documents of a named mask; None if it has none."""
    match = re.fullmatch(rf"documents ({'|'.join(DOCUMENTS)}) seed (\d+)", text)
    return match and bounds(match[1], int(match[2]), length)


def mask_of(text: str, length: int) -> Mask:
    """Return the named mask over `length` tokens; raise ValueError if there is none."""
    if text in ("causal", "full"):
        return Causal() if text == "causal" else Full()
    if window := re.fullmatch(r"window (\d+)", text):
        return Window(int(window[1]) - 1, 0)
    if blocks := re.fullmatch(r"blocks (\d+)", text):
        count = length // int(blocks[1])
        table = np.random.default_rng(0).random((count, count)) < SHOWN
        return BlockSparse(table | np.eye(count, dtype=bool), int(blocks[1])) & Causal()
    if documents := bounds_of(text, length):
        return Documents(documents) & Causal()
    raise ValueError(f"--masks: there is {MASKS}, got {text!r}")


class _Piece(NamedTuple):
    """Consecutive queries and all keys that they see, as ranges (first, stop)."""

    rows: tuple[int, int]
    keys: tuple[int, int]
    kind: str  # "full", "causal", or "table", which requires the mask


def pieces(text: str, length: int) -> Iterator[_Piece]:
    whole = (0, length)
    if text in ("causal", "full"):
        yield _Piece(whole, whole, text)
    elif text.startswith("window"):
        width = int(text.split()[1])
        for first in range(0, length, width):
            stop = min(first + width, length)
            yield _Piece((first, stop), (max(0, first - width + 1), stop), "table")
    elif text.startswith("blocks"):
        for first in range(0, length, ROWS):
            yield _Piece((first, min(first + ROWS, length)), whole, "table")
    else:
        for first, stop in pairwise(bounds_of(text, length) or ()):
            yield _Piece((first, stop), (first, stop), "causal")


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, text: str) -> torch.Tensor:
    """Compute attention of a whole sequence under a named mask with torch's own operator.

    Args:
        q: [s, 1, h, d].
        k, v: [s, 1, k, d].

    Returns:
        The output, [s, 1, h, d].
    """
    group = q.shape[2] // k.shape[2]
    first = [x.permute(1, 2, 0, 3) for x in (q, *(y.repeat_interleave(group, 2) for y in (k, v)))]
    parts, mask = [], mask_of(text, q.shape[0])
    for piece in pieces(text, q.shape[0]):
        rows, keys = slice(*piece.rows), slice(*piece.keys)
        table = None
        if piece.kind == "table":
            table = torch.from_numpy(mask.visible(np.r_[rows][:, None], np.r_[keys][None, :]))
        parts.append(
            F.scaled_dot_product_attention(
                first[0][:, :, rows], first[1][:, :, keys], first[2][:, :, keys],
                attn_mask=table, is_causal=piece.kind == "causal",
            )
        )  # fmt: skip
    return torch.cat(parts, dim=2).permute(2, 0, 1, 3)
