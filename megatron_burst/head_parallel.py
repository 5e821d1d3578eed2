"""Head parallelism: an all-to-all that trades sequence rows for heads, around any ring.

The ranks of a head group hold different rows of the sequence and all heads; after `scatter`
each holds the rows of the whole group and its share of the heads, and after `gather` it is as
before. With one head group over all ranks that is DeepSpeed-Ulysses; around a ring it is 2D
attention (LoongTrain section 4.2). Where key/value heads are fewer than ranks each rank takes
the one it needs, and the gradients of its copies are summed at home. Knows heads and rows only.
What goes to one rank is one message, sealed like those of the rings.

Shape letters: s local rows, b batch, n heads, d width; p ranks of the head group.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch

from . import parcels
from .comm import Channel, Endpoint, Receive, Send
from .parcels import Parcel, Seal
from .shares import Share


def scatter(
    endpoint: Endpoint,
    links: Sequence[str],
    tensors: Sequence[torch.Tensor],
    seal: Seal,
    label: str,
) -> Generator[None, None, list[torch.Tensor]]:
    """[s, b, n, d] of this rank -> [p s, b, share of n, d], rows in the order of the group."""
    size, me = len(links), endpoint.rank
    shares = [Share(t.shape[2], size) for t in tensors]
    parts = [
        [t[:, :, share.of(peer)] for t, share in zip(tensors, shares, strict=True)]
        for peer in range(size)
    ]
    whole = [p.new_empty((size, *p.shape)) for p in parts[me]]
    for peer, arrived in (yield from _exchange(endpoint, links, parts, seal, label)):
        for target, part in zip(whole, arrived, strict=True):
            target[peer] = part
    return [w.flatten(0, 1) for w in whole]


def gather(
    endpoint: Endpoint,
    links: Sequence[str],
    tensors: Sequence[torch.Tensor | None],
    heads: Sequence[int],
    seal: Seal,
    label: str,
) -> Generator[None, None, list[torch.Tensor | None]]:
    """The inverse of `scatter`: [p s, b, share of n, d] -> [s, b, n, d], copies of a head summed.

    heads: n of each tensor. None stays None.
    """
    size = len(links)
    present = [(t, n) for t, n in zip(tensors, heads, strict=True) if t is not None]
    parts = [[t.unflatten(0, (size, -1))[peer] for t, _ in present] for peer in range(size)]
    totals = [p.new_zeros((*p.shape[:2], n, p.shape[3])) for p, (_, n) in
              zip(parts[0], present, strict=True)]  # fmt: skip
    for peer, arrived in (yield from _exchange(endpoint, links, parts, seal, label)):
        for total, part in zip(totals, arrived, strict=True):
            total[:, :, Share(total.shape[2], size).of(peer)] += part
    found = iter(totals)
    return [None if t is None else next(found) for t in tensors]


def _exchange(
    endpoint: Endpoint,
    links: Sequence[str],
    parts: Sequence[Sequence[torch.Tensor]],
    seal: Seal,
    label: str,
) -> Generator[None, None, list[tuple[int, Sequence[torch.Tensor]]]]:
    """Send every rank its part; (rank, what it sent) in the order of ranks, this one's included.

    parts: of each rank of the group; what a rank sends to this one has the shapes of parts[me].
    """
    me = endpoint.rank
    if not parts[me]:
        return []
    sends, receives = [], []
    shapes = [(t.shape, t.dtype) for t in parts[me]]
    arriving: dict[int, Parcel] = {}
    for peer, part in enumerate(parts):
        if peer == me:
            continue
        parcel = parcels.pack(part, seal)
        sends.append(Send(peer, links[peer], parcel.tensors, parcel.flat))
        arriving[peer] = parcels.make(shapes, part[0].device, endpoint.room)
        receives.append(Receive(peer, arriving[peer].tensors, arriving[peer], seal))
    pending = endpoint.exchange(Channel("head", False), sends, receives, label)
    yield
    pending.wait()
    return [
        (peer, parts[me] if peer == me else arriving[peer].tensors) for peer in range(len(parts))
    ]
