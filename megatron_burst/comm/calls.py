"""How far a rank has come: the calls it made on its groups, counted and digested.

Ranks that leave a call out, or make theirs in another order or with another plan, exchange the
wrong tensors. On the CPU every message bears the call's number and says so at once; everywhere
the ranks compare their counts when they make a plan, which needs no device.
"""

from __future__ import annotations

from dataclasses import dataclass
from zlib import crc32

from .packing import CallTag

CALLS = "calls so far"  # the name of the fact that ranks compare


@dataclass
class Calls:
    """Of one rank. order: digest of all calls, with plan, label and direction, in sequence."""

    forwards: int = 0
    backwards: int = 0
    order: int = 0

    def forward(self, plan: int, label: object, sink: bool) -> CallTag:
        """The next call begins; what its messages and those of its backward bear. sink: does it
        have one? A plan does not say so."""
        check_label(label)
        self.forwards += 1
        tag = CallTag(plan, self.forwards, crc32(repr((label, sink)).encode()))
        self._note("forward", tag)
        return tag

    def backward(self, tag: CallTag) -> None:
        """The backward of a call begins."""
        self.backwards += 1
        self._note("backward", tag)

    def _note(self, direction: str, tag: CallTag) -> None:
        self.order = crc32(f"{direction} {tag}".encode(), self.order)

    def __repr__(self) -> str:
        return f"{self.forwards} forward, {self.backwards} backward, order {self.order:08x}"


def check_label(label: object) -> None:
    """Raise ValueError unless `label` is one that reads alike on all ranks."""
    if not _plain(label):
        raise ValueError(
            "label must be a string, an integer or a tuple of them, which are the same on all "
            f"ranks, or None; got {label!r:.100}, of type {type(label).__name__}"
        )


def _plain(label: object) -> bool:
    """Is its repr the same in every process?"""
    if isinstance(label, tuple):
        return all(map(_plain, label))
    return label is None or isinstance(label, (str, int))
