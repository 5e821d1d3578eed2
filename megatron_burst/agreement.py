"""What all ranks of a grid must agree on before an exchange may start.

Ranks that were called with different shapes or settings would hang, or, worse, receive a
short message into a long buffer in silence. So a plan begins with one all-gather of a
fixed-size header on the host (`HEADER_BYTES` per rank). A rank that found its own arguments
bad takes part too and tells the others why, so every rank raises the same ValueError.

Knows nothing about schedules or tensors: the caller states what must agree, by name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch

FIELDS = 24
TEXT = 1024
HEADER_BYTES = 8 * FIELDS + TEXT

Facts = dict[str, object]


def agree(
    facts: Sequence[Facts | ValueError],
    gather: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]],
) -> None:
    """Raise the same ValueError on every rank unless all ranks state the same facts.

    facts: for each local rank, name -> value by insertion order (the same names everywhere, at
    most 24), or the ValueError its arguments caused. gather: headers of the local ranks ->
    headers of all ranks, in rank order.
    """
    headers = gather([_pack(fact) for fact in facts])
    unpacked = [_unpack(header) for header in headers]
    for rank, (_, text, bad) in enumerate(unpacked):
        if bad:
            raise ValueError(f"rank {rank}: {text}" if len(headers) > 1 else text)
    names = list(next(fact for fact in facts if isinstance(fact, dict)))
    first_digests, first_values, _ = unpacked[0]
    for rank, (digests, values, _) in enumerate(unpacked):
        if digests == first_digests:
            continue
        differing = [n for n, a, b in zip(names, first_digests, digests, strict=False) if a != b]
        raise ValueError(
            f"ranks disagree on {', '.join(differing)}: rank 0 has {first_values}; rank {rank} "
            f"has {values}; every rank must call attention with the same shapes and settings"
        )


def _pack(fact: Facts | ValueError) -> torch.Tensor:
    """uint8 [HEADER_BYTES]: digests of the values, then readable text, cut to fit."""
    bad = isinstance(fact, ValueError)
    values = [] if bad else [repr(value) for value in fact.values()]
    if len(values) > FIELDS - 1:
        raise AssertionError("more facts than fields")
    text = str(fact) if bad else ", ".join(f"{k} {v}" for k, v in fact.items())
    digests = [hashlib.blake2b(value.encode(), digest_size=8).digest() for value in values]
    raw = bytes([bad]) * 8 + b"".join(digests).ljust(8 * (FIELDS - 1), b"\0")
    raw += text.encode()[:TEXT].ljust(TEXT, b"\0")
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def _unpack(header: torch.Tensor) -> tuple[list[bytes], str, bool]:
    raw = header.numpy().tobytes()
    digests = [raw[i : i + 8] for i in range(8, 8 * FIELDS, 8)]
    text = raw[8 * FIELDS :].rstrip(b"\0").decode(errors="ignore")
    return digests, text, bool(raw[0])
