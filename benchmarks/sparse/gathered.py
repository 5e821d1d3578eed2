"""Rival: every rank gathers the keys of all ranks, and computes when all have arrived.

As in Megatron, gathered keys are kept for backward, and a reduce-scatter after backward sums the
gradients. There are two ways of gathering. Either every rank sends its rows to every other rank, or
rows are sent to each other node once (the best case of NCCL): the rank with the sender's number on
that node receives and forwards them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from .settings import DIRECT


class Gathering:
    """Gathers and reduce-scatters over all ranks, in one of two ways; it counts sent bytes."""

    def __init__(self, way: str, nodes: int, per_node: int):
        self.way, self.per_node, self.size = way, per_node, nodes * per_node
        self.rank = dist.get_rank()
        self.sent = {"intra": 0, "inter": 0}
        self.node_ranks = [r for r in range(self.size) if self._link(r) == "intra"]
        self.alike = [r for r in range(self.size) if r % per_node == self.rank % per_node]

    def _link(self, rank: int) -> str:
        return "intra" if rank // self.per_node == self.rank // self.per_node else "inter"

    def _start(self, pairs: Sequence[tuple[int, torch.Tensor, torch.Tensor]]) -> list[dist.Work]:
        """Start an exchange with each (peer, tensor to send, buffer to receive)."""
        works = []
        for peer, outgoing, incoming in pairs:
            works += [dist.irecv(incoming, peer), dist.isend(outgoing, peer)]
            self.sent[self._link(peer)] += outgoing.numel() * outgoing.element_size()
        return works

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return x of all ranks, in order."""
        parts = [x if r == self.rank else torch.empty_like(x) for r in range(self.size)]

        def exchange(ranks: Sequence[int]) -> list[dist.Work]:
            return self._start([(r, x, parts[r]) for r in ranks if r != self.rank])

        if self.way == DIRECT:
            _wait(exchange(range(self.size)))
            return parts
        first = exchange(self.alike)  # across nodes, concurrently with the rows within the node
        beside = exchange(self.node_ranks)
        _wait(first)
        for came in self.alike:
            if came != self.rank:
                place = came - came % self.per_node
                beside += self._start(
                    [(r, parts[came], parts[place + r % self.per_node]) for r in self.node_ranks
                     if r != self.rank]
                )  # fmt: skip
        _wait(beside)
        return parts

    def scatter(self, grads: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the gradients of this rank's rows, summed over ranks."""
        total = grads[self.rank].clone()
        if self.way == DIRECT:
            return self._sum(total, {r: grads[r] for r in range(self.size) if r != self.rank})
        # First within the node: this rank sums gradients for the ranks with its number on all
        # nodes.
        sums = {r: grads[r].clone() for r in self.alike}
        rooms, works = [], []
        for r in self.node_ranks:
            if r == self.rank:
                continue
            for to in self.alike:
                room = torch.empty_like(total)
                place = to - to % self.per_node + r % self.per_node
                works += self._start([(r, grads[place], room)])
                rooms.append((to, room))
        _wait(works)
        for to, room in rooms:
            sums[to] += room
        return self._sum(sums[self.rank], {r: sums[r] for r in self.alike if r != self.rank})

    def _sum(self, total: torch.Tensor, parts: dict[int, torch.Tensor]) -> torch.Tensor:
        rooms = [torch.empty_like(total) for _ in parts]
        _wait(self._start([(r, parts[r], room)
                           for r, room in zip(parts, rooms, strict=True)]))  # fmt: skip
        for room in rooms:
            total += room
        return total


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()
