"""Head parallelism: an all-to-all that trades sequence rows for heads, around any ring.

The ranks of a ulysses group hold different rows of the sequence and all heads; after `scatter`
each holds the rows of the whole group and its share of the heads, and after `gather` it is as
before. `schedule.head_shares` decides in which order the ring sees these rows. With one ulysses
group over all ranks that is DeepSpeed-Ulysses; around a ring it is 2D attention (LoongTrain section
4.2). Where key/value heads are fewer than ranks each rank takes
the one it needs, and the gradients of its copies are summed at home, in a dtype of the caller's
choice: what travels may be narrower. Knows heads and rows only.
What goes to one rank is one message, with an envelope like those of the rings.

Shape letters: s local rows, b batch, n heads, d width; p ranks of the ulysses group.
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import torch

from ..comm import packing
from ..comm.packing import CallTag, Envelope, Message
from ..comm.transport import Channel, Endpoint, Receive, Send
from ..schedule.head_shares import Share
from .job import Job, Tensors


def heads_here(job: Job) -> slice:
    """The query heads that this rank's ring computes."""
    return Share(job.heads, len(job.ulysses_links)).of(job.ulysses.rank)


def heads_to_rows(
    job: Job, call: CallTag, name: str, tensors: Tensors, order: torch.Tensor | None
) -> Tensors:
    """What the ring sees: all rows of the ranks that share heads, and this rank's heads.

    name: of the pass, the same on every rank, for envelopes and errors. order: of the rows, as
    `Job.order`.
    """
    if len(job.ulysses_links) == 1:
        return tensors
    envelope = Envelope(call, crc32(f"{name} heads to rows".encode()))
    label = f"{name}, ulysses rank {job.ulysses.rank}"
    whole = scatter(job.ulysses, job.ulysses_links, tensors, envelope, label)
    if order is not None:
        for index, tensor in enumerate(whole):  # one by one: the first are free before the last
            whole[index] = tensor.index_select(0, order)
            del tensor
    return tuple(whole)


def rows_to_heads(
    job: Job,
    call: CallTag,
    name: str,
    tensors: Sequence[torch.Tensor | None],
    heads: Sequence[int],
    sums: torch.dtype,
    order: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    """The inverse of `heads_to_rows`. heads: of each tensor, on this rank; sums: as in `gather`."""
    if len(job.ulysses_links) == 1:
        return tuple(tensors)
    if order is not None:
        tensors = [
            t if t is None else torch.empty_like(t).index_copy_(0, order, t) for t in tensors
        ]
    envelope = Envelope(call, crc32(f"{name} rows to heads".encode()))
    label = f"{name}, ulysses rank {job.ulysses.rank}"
    return tuple(gather(job.ulysses, job.ulysses_links, tensors, heads, sums, envelope, label))


def scatter(
    endpoint: Endpoint,
    links: Sequence[str],
    tensors: Sequence[torch.Tensor],
    envelope: Envelope,
    label: str,
) -> list[torch.Tensor]:
    """[s, b, n, d] of this rank -> [p s, b, share of n, d], rows in the order of the group."""
    size, me = len(links), endpoint.rank
    shares = [Share(t.shape[2], size) for t in tensors]
    parts = [
        [t[:, :, share.of(peer)] for t, share in zip(tensors, shares, strict=True)]
        for peer in range(size)
    ]
    whole = [p.new_empty((size, *p.shape)) for p in parts[me]]
    into = [[w[peer] for w in whole] for peer in range(size)]
    _exchange(endpoint, links, parts, into, envelope, label)
    return [w.flatten(0, 1) for w in whole]


def gather(
    endpoint: Endpoint,
    links: Sequence[str],
    tensors: Sequence[torch.Tensor | None],
    heads: Sequence[int],
    sums: torch.dtype,
    envelope: Envelope,
    label: str,
) -> list[torch.Tensor | None]:
    """The inverse of `scatter`: [p s, b, share of n, d] -> [s, b, n, d], copies of a head summed.

    heads: n of each tensor. sums: the dtype of these sums; a tensor whose heads have no copies
    keeps its own. None stays None.
    """
    size = len(links)
    present = [(t, n) for t, n in zip(tensors, heads, strict=True) if t is not None]
    parts = [[t.unflatten(0, (size, -1))[peer] for t, _ in present] for peer in range(size)]
    received = [[p.new_empty(p.shape) for p in parts[0]] for _ in range(size)]
    _exchange(endpoint, links, parts, received, envelope, label)
    totals = []
    for index, (part, (_, n)) in enumerate(zip(parts[0], present, strict=True)):
        arrived = [each[index] for each in received]
        if n >= size:  # nobody has a copy
            totals.append(torch.cat(arrived, dim=2))
            continue
        total = part.new_zeros((*part.shape[:2], n, part.shape[3]), dtype=sums)
        for peer, copy in enumerate(arrived):
            total[:, :, Share(n, size).of(peer)].add_(copy)  # += would also write it back
        totals.append(total)
    rest = iter(totals)
    return [None if t is None else next(rest) for t in tensors]


def _exchange(
    endpoint: Endpoint,
    links: Sequence[str],
    parts: Sequence[Sequence[torch.Tensor]],
    into: Sequence[Sequence[torch.Tensor]],
    envelope: Envelope,
    label: str,
) -> None:
    """Send every rank its part; what a rank sends to this one, and what it keeps, lies in `into`.

    Where messages have envelopes (the CPU) what goes to a rank is one message, and what comes is
    copied out of it; elsewhere tensors go straight from and to where they belong.
    """
    me = endpoint.rank
    if not parts[me]:
        return
    packed = parts[me][0].device.type == "cpu"
    sends, receives = [], []
    for peer, (part, targets) in enumerate(zip(parts, into, strict=True)):
        if peer == me:
            continue
        own = () if packed else tuple(t.contiguous() for t in part)
        sent, room = Message(None, own), None
        if packed:
            sent = packing.pack(part, envelope)
            shapes = [(t.shape, t.dtype) for t in targets]
            room = packing.empty(shapes, part[0].device, endpoint.room)
        sends.append(Send(peer, links[peer], sent.tensors, sent.flat))
        receives.append(Receive(peer, room.tensors if room else targets, room, envelope))
    pending = endpoint.exchange(Channel("ulysses", False), sends, receives, label)
    pending.wait()
    for target, own in zip(into[me], parts[me], strict=True):
        target.copy_(own)
    for receive in receives if packed else ():
        for target, arrived in zip(into[receive.peer], receive.tensors, strict=True):
            target.copy_(arrived)
