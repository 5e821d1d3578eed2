# SPDX-License-Identifier: Apache-2.0
"""Comparison of facts (shapes, settings, calls) between all ranks before they exchange tensors.

Ranks with different shapes or settings would hang or, worse, silently receive a short message into
a long buffer. So no plan is used before one all-gather of a fixed-size header on the host
(`HEADER_BYTES` per rank). A rank with invalid arguments takes part too and sends its error, so
every rank raises the same ValueError.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, ParamSpec, TypeVar

import torch

from ..layout.identity import text_of_fact

FIELDS = 32
TEXT = 1024
LONGEST = 160  # maximum characters of a quoted value
HEADER_BYTES = 8 * FIELDS + TEXT

Facts = dict[str, object]
T = TypeVar("T")
Arguments = ParamSpec("Arguments")


def attempt(
    make: Callable[Arguments, T], *args: Arguments.args, **named: Arguments.kwargs
) -> T | ValueError:
    """Call `make`; return the result, or the error as a ValueError, which `agree` accepts."""
    try:
        return make(*args, **named)
    except Exception as error:
        return as_value_error(error)


def as_value_error(error: Exception) -> ValueError:
    """Return `error` if it is a ValueError, otherwise a ValueError with its type and message."""
    if isinstance(error, ValueError):
        return error
    value_error = ValueError(f"{type(error).__name__} in the arguments: {error}")
    value_error.__cause__ = error
    return value_error


def agree(facts: Facts | ValueError, gather: Callable[[torch.Tensor], list[torch.Tensor]]) -> None:
    """Raise the same ValueError on every rank unless all ranks have the same facts.

    Args:
        facts: Values by name, with the same names in the same order on all ranks; or the
            ValueError of this rank. With more than 31 facts, errors quote several facts together.
        gather: Function that all-gathers a uint8 tensor [HEADER_BYTES] of this rank and returns the
            tensors of all ranks. The tensor contains a digest of each fact, and as much of the text
            of the facts as fits.

    Raises:
        ValueError: A rank has an error, or facts differ.
    """
    headers = gather(_pack(facts))
    first_header = headers[0]
    if not first_header[0] and all(
        header is first_header or first_header.equal(header) for header in headers
    ):
        return  # fast path: reading the headers of 1,000 ranks takes tens of milliseconds
    unpacked = [_unpack(header) for header in headers]
    for rank, header in enumerate(unpacked):
        if header.bad:
            message = f"rank {rank}: {header.texts[0]}" if len(headers) > 1 else header.texts[0]
            # Keep the cause of this rank's error if it was not a ValueError.
            raise ValueError(message) from getattr(facts, "__cause__", None)
    first = unpacked[0]
    for rank, header in enumerate(unpacked):
        if header.digests == first.digests:
            continue
        differing = [i for i, pair in enumerate(zip(first.digests, header.digests, strict=True))
                     if len(set(pair)) > 1]  # fmt: skip
        raise ValueError(
            f"ranks disagree: rank 0 has {first.quote(differing)}, rank {rank} has "
            f"{header.quote(differing)}; every rank must pass the same shapes and settings, and "
            "make the same calls in the same order"
        )


def identity(facts: Facts) -> int:
    """Return an int64 digest of the facts; it is equal on ranks with equal facts."""
    text = repr([(name, text_of_fact(value)) for name, value in facts.items()])
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


class _Header(NamedTuple):
    bad: bool
    digests: list[bytes]
    texts: list[str]  # "name value" of each fact that fits, or the error

    def quote(self, fields: Sequence[int]) -> str:
        missing = "a value whose text was cut off"
        return ", ".join(self.texts[i] if i < len(self.texts) else missing for i in fields)


def _pack(fact: Facts | ValueError) -> torch.Tensor:
    """Serialize facts or an error as uint8 [HEADER_BYTES]: error flag, digests, truncated text."""
    bad = isinstance(fact, ValueError)
    if isinstance(fact, ValueError):
        texts = complete = [str(fact)]
    else:
        texts = [f"{name} {value!r}" for name, value in fact.items()]
        complete = [f"{name} {text_of_fact(value)}" for name, value in fact.items()]
    together = -(-len(texts) // (FIELDS - 1))  # facts per field
    if together > 1:
        starts = range(0, len(texts), together)
        texts, complete = (
            [", ".join(parts[i : i + together]) for i in starts] for parts in (texts, complete)
        )
    digests = [hashlib.blake2b(text.encode(), digest_size=8).digest() for text in complete]
    texts = texts if bad else [_short(text) for text in texts]
    raw = bytes([bad]).ljust(8, b"\0") + b"".join(digests).ljust(8 * (FIELDS - 1), b"\0")
    raw += "\n".join(texts).encode()[:TEXT].ljust(TEXT, b"\0")
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def _short(text: str) -> str:
    """Join the lines of a text, and replace the middle of a long text by "..."."""
    text = " ".join(text.split())
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]}...{text[-LONGEST // 2 :]}"


def _unpack(header: torch.Tensor) -> _Header:
    raw = header.numpy().tobytes()
    digests = [raw[i : i + 8] for i in range(8, 8 * FIELDS, 8)]
    text = raw[8 * FIELDS :].rstrip(b"\0").decode(errors="ignore")
    return _Header(bool(raw[0]), digests, [text] if raw[0] else text.split("\n"))
