"""Head parallelism: an all-to-all that trades sequence rows for heads, around any ring.

The ranks of a head group hold different rows of the sequence and all heads; after `scatter`
each holds the rows of the whole group and its share of the heads, and after `gather` it is as
before. With one head group over all ranks that is DeepSpeed-Ulysses; around a ring it is 2D
attention (LoongTrain section 4.2). Where key/value heads are fewer than ranks each rank takes
the one it needs, and the gradients of its copies are summed at home. Knows heads and rows only.

Shape letters: s local rows, b batch, n heads, d width; p ranks of the head group.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple

import torch

from .comm import Channel, Endpoint, Receive, Send


class Share(NamedTuple):
    """Which of `heads` the ranks of a head group of `size` take."""

    heads: int
    size: int

    def of(self, peer: int) -> slice:
        """The heads of `peer`: an equal share, or the one head that it and others need."""
        if self.heads >= self.size:
            each = self.heads // self.size
            return slice(peer * each, (peer + 1) * each)
        head = peer * self.heads // self.size
        return slice(head, head + 1)

    @property
    def each(self) -> int:
        return max(1, self.heads // self.size)


def check_heads(heads: int, kv_heads: int, size: int) -> None:
    """Raise ValueError unless `size` ranks can share the heads."""
    if heads % size:
        raise ValueError(
            f"groups: {size} head-parallel ranks must divide the {heads} query heads; "
            f"use head={_largest_divisor(heads, size)}"
        )
    if kv_heads % size and size % kv_heads:
        raise ValueError(
            f"groups: {size} head-parallel ranks must divide the {kv_heads} key/value heads, or "
            "be a multiple of them"
        )


def scatter(
    endpoint: Endpoint, links: Sequence[str], tensors: Sequence[torch.Tensor], label: str
) -> Generator[None, None, list[torch.Tensor]]:
    """[s, b, n, d] of this rank -> [p s, b, share of n, d], rows in the order of the group."""
    size, me = len(links), endpoint.rank
    shares = [Share(t.shape[2], size) for t in tensors]

    def part(peer: int) -> list[torch.Tensor]:
        pairs = zip(tensors, shares, strict=True)
        return [t[:, :, share.of(peer)].contiguous() for t, share in pairs]

    whole = [t.new_empty((size, *p.shape)) for t, p in zip(tensors, part(me), strict=True)]
    others = [peer for peer in range(size) if peer != me]
    yield from _exchange(
        endpoint,
        [Send(peer, links[peer], part(peer)) for peer in others],
        [Receive(peer, [w[peer] for w in whole]) for peer in others],
        label,
    )
    for target, own in zip(whole, part(me), strict=True):
        target[me] = own
    return [w.flatten(0, 1) for w in whole]


def gather(
    endpoint: Endpoint,
    links: Sequence[str],
    tensors: Sequence[torch.Tensor | None],
    heads: Sequence[int],
    label: str,
) -> Generator[None, None, list[torch.Tensor | None]]:
    """The inverse of `scatter`: [p s, b, share of n, d] -> [s, b, n, d], copies of a head summed.

    heads: n of each tensor. None stays None.
    """
    size, me = len(links), endpoint.rank
    present = [(t, n) for t, n in zip(tensors, heads, strict=True) if t is not None]
    parts = [t.unflatten(0, (size, -1)) for t, _ in present]
    received = [torch.empty_like(p) for p in parts]
    others = [peer for peer in range(size) if peer != me]
    yield from _exchange(
        endpoint,
        [Send(peer, links[peer], [p[peer].contiguous() for p in parts]) for peer in others],
        [Receive(peer, [r[peer] for r in received]) for peer in others],
        label,
    )
    results: list[torch.Tensor] = []
    for (_, n), own, theirs in zip(present, parts, received, strict=True):
        theirs[me] = own[me]
        total = own.new_zeros((*own.shape[1:3], n, own.shape[4]))
        for peer in range(size):
            total[:, :, Share(n, size).of(peer)] += theirs[peer]
        results.append(total)
    found = iter(results)
    return [None if t is None else next(found) for t in tensors]


def _exchange(
    endpoint: Endpoint, sends: list[Send], receives: list[Receive], label: str
) -> Generator[None, None, None]:
    if not any(send.tensors for send in sends):
        return
    pending = endpoint.exchange(Channel("head", False), sends, receives, label)
    yield
    pending.wait()


def _largest_divisor(number: int, limit: int) -> int:
    return max(d for d in range(1, limit + 1) if number % d == 0)
