# SPDX-License-Identifier: Apache-2.0
"""What all ranks of a grid must agree on before an exchange may start.

Ranks that were called with different shapes or settings would hang, or, worse, receive a
short message into a long buffer in silence. So a plan begins with one all-gather of a
fixed-size header on the host (`HEADER_BYTES` per rank). A rank that found its own arguments
bad takes part too and tells the others why, so every rank raises the same ValueError.

The caller states what must agree, by name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, ParamSpec, TypeVar

import torch

FIELDS = 32
TEXT = 1024
LONGEST = 160  # characters of a value that are quoted
HEADER_BYTES = 8 * FIELDS + TEXT

Facts = dict[str, object]
T = TypeVar("T")
Arguments = ParamSpec("Arguments")


def attempt(
    make: Callable[Arguments, T], *args: Arguments.args, **named: Arguments.kwargs
) -> T | ValueError:
    """Return the result of a call, or its error as a ValueError, for `agree` to send."""
    try:
        return make(*args, **named)
    except ValueError as error:
        return error
    except Exception as error:
        told = ValueError(f"{type(error).__name__} in the arguments: {error}")
        told.__cause__ = error
        return told


def agree(facts: Facts | ValueError, gather: Callable[[torch.Tensor], list[torch.Tensor]]) -> None:
    """Raise the same ValueError on every rank unless all ranks state the same facts.

    facts: of this rank, name -> value by insertion order (the same names everywhere, at most 31),
    or the ValueError its arguments caused. gather: this rank's header -> those of all ranks.
    """
    headers = gather(_pack(facts))
    one = headers[0]
    if not one[0] and all(other is one or one.equal(other) for other in headers):
        return  # as nearly always; of a thousand ranks, reading all takes tens of milliseconds
    unpacked = [_unpack(header) for header in headers]
    for rank, header in enumerate(unpacked):
        if header.bad:
            told = f"rank {rank}: {header.texts[0]}" if len(headers) > 1 else header.texts[0]
            # of this rank's error, if it was no ValueError to begin with
            raise ValueError(told) from getattr(facts, "__cause__", None)
    first = unpacked[0]
    for rank, other in enumerate(unpacked):
        if other.digests == first.digests:
            continue
        differing = [i for i, pair in enumerate(zip(first.digests, other.digests, strict=True))
                     if len(set(pair)) > 1]  # fmt: skip
        raise ValueError(
            f"ranks disagree: rank 0 has {first.quote(differing)}, rank {rank} has "
            f"{other.quote(differing)}; every rank must pass the same shapes and settings, and "
            "make the same calls in the same order"
        )


def identity(facts: Facts) -> int:
    """A digest of these facts that fits an int64; equal on ranks that agreed on them."""
    digest = hashlib.blake2b(repr(list(facts.items())).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


class _Header(NamedTuple):
    bad: bool
    digests: list[bytes]
    texts: list[str]  # "name value" of each fact as far as they fitted, or the error

    def quote(self, fields: Sequence[int]) -> str:
        return ", ".join(self.texts[i] if i < len(self.texts) else "another" for i in fields)


def _pack(fact: Facts | ValueError) -> torch.Tensor:
    """uint8 [HEADER_BYTES]: a flag, digests of the values, then readable text, cut to fit."""
    bad = isinstance(fact, ValueError)
    texts = [str(fact)] if bad else [f"{name} {value!r}" for name, value in fact.items()]
    digests = [hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts]
    texts = texts if bad else [_short(text) for text in texts]
    assert len(digests) < FIELDS, "more facts than fields"
    raw = bytes([bad]).ljust(8, b"\0") + b"".join(digests).ljust(8 * (FIELDS - 1), b"\0")
    raw += "\n".join(texts).encode()[:TEXT].ljust(TEXT, b"\0")
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def _short(text: str) -> str:
    """On one line, and of long values both ends, so that one leaves room for the others."""
    text = " ".join(text.split())
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]}...{text[-LONGEST // 2 :]}"


def _unpack(header: torch.Tensor) -> _Header:
    raw = header.numpy().tobytes()
    digests = [raw[i : i + 8] for i in range(8, 8 * FIELDS, 8)]
    text = raw[8 * FIELDS :].rstrip(b"\0").decode(errors="ignore")
    return _Header(bool(raw[0]), digests, [text] if raw[0] else text.split("\n"))
