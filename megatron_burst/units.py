# SPDX-License-Identifier: Apache-2.0
"""Formatting and parsing of numbers with units, for messages, plans and reports.

The number of digits and the prefixes are defined only here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

Unit = tuple[str, float]  # name, size

BYTES: Sequence[Unit] = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
SECONDS: Sequence[Unit] = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))
MINUTE, HOUR = 60, 3600  # seconds
PREFIXES: Sequence[Unit] = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0))

# Bytes of logits that a fused LM head holds at once, by device. Each tile costs one pass over the
# fp32 gradient of the weight, so fast devices need large tiles.
LOGITS_TILE = {"cpu": 1 << 27, "cuda": 1 << 30}


def byte_size(count: float) -> str:
    """Format a number of bytes with four digits and a binary unit; 1536 gives "1.5 KiB"."""
    return _scaled(count, BYTES, 4)


def grid_of(per_node: int, nodes: int) -> str:
    """Format a grid of ranks: "8 per node x 4 nodes", or "8 ranks" for one node.

    Ranks per node come first, as in --hierarchical-context-parallel-sizes.
    """
    if nodes > 1:
        return f"{per_node} per node x {nodes} nodes"
    return "1 rank" if per_node == 1 else f"{per_node} ranks"


def duration(seconds: float) -> str:
    """Format a time with three digits; from one minute on, with minutes or hours.

    0.0415 gives "41.5 ms", 117 gives "1 min 57 s", and 18300 gives "5 h 5 min".

    Args:
        seconds: Time in seconds.
    """
    if not MINUTE - 0.05 <= seconds < math.inf:  # 59.95 would be "60 s"
        return _scaled(seconds, SECONDS, 3)
    large, small, unit = ("h", "min", MINUTE) if round(seconds) >= HOUR else ("min", "s", 1)
    count, remainder = divmod(round(seconds / unit), 60)
    return f"{count:,} {large}" + f" {remainder} {small}" * (remainder > 0)


def rate(value: float, unit: str) -> str:
    """Format a rate with three digits and a decimal prefix: 25e9 and "B/s" give "25 GB/s"."""
    if math.isinf(value):
        return f"inf {unit}"
    return _scaled(value, [(prefix + unit, size) for prefix, size in PREFIXES], 3)


def _scaled(value: float, units: Sequence[Unit], digits: int) -> str:
    """Format `value` in the largest unit that does not exceed it, else in the smallest unit."""
    name, size = next((unit for unit in units if value >= unit[1]), units[-1])
    return f"{value / size:.{digits}g} {name}"


def size_of(text: object, title: str) -> int:
    """Parse a size such as "1.5TB", "800GiB" or "1000000" and return its bytes.

    Args:
        text: The size. TB is 10**12 bytes, TiB is 2**40 bytes.
        title: Name of the argument, for the message.

    Raises:
        ValueError: `text` is not a size.
    """
    pattern = r"(\d+(?:\.\d+)?) *([KMGT]?)(i?)B?"
    match = re.fullmatch(pattern, text) if isinstance(text, str) else None
    size = 0
    if match is not None:
        number, prefix, binary = match.groups()
        size = int(float(number) * (1024 if binary else 1000) ** " KMGT".index(prefix or " "))
    if size < 1:
        raise ValueError(f'{title} must be a size such as "1.5TB" or "800GiB", got {text!r}')
    return size


def tokens_of(text: object, title: str) -> int:
    """Parse a number of tokens such as "128K", "5M" or 131072. K is 1,024 and M is 1,048,576.

    Args:
        text: The number.
        title: Name of the argument, for the message.

    Raises:
        ValueError: `text` is not a whole number of tokens.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([KM]?)", str(text).strip().upper())
    count = 0.0
    if match is not None and not isinstance(text, bool):
        count = float(match.group(1)) * {"": 1, "K": 2**10, "M": 2**20}[match.group(2)]
    if count < 1 or count != int(count):
        raise ValueError(
            f"{title} must be a whole number of tokens such as 131072, 128K or 5M, got {text}"
        )
    return int(count)
