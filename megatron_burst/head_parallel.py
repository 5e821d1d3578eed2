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

import torch

from .comm import Channel, Endpoint, Receive, Send
from .shares import Share


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
