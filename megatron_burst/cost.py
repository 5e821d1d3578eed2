"""What a schedule costs: bytes per link class, and which side is cheaper.

Reads schedules, so the figures cannot drift from what runs. Sizes are plain numbers: no torch.
Source: BurstEngine section 3.1 ("Bytes, exactly"); for grouped-query attention the paper's
saving inverts, which is why the side is computed and not fixed.
"""

from __future__ import annotations

from dataclasses import dataclass

from .schedule import SIDES, Chunk, Grid, Schedule, backward, forward


@dataclass(frozen=True)
class Sizes:
    """One rank's share of one attention call. `*_itemsize` are bytes per element."""

    tokens: int
    batch: int
    heads: int
    kv_heads: int
    width: int
    value_width: int
    itemsize: int
    stat_itemsize: int  # lse and delta
    wire_itemsize: int  # travelling gradients
    needs_grad: tuple[bool, bool, bool]  # q, k, v

    def chunk_bytes(self, chunk: Chunk) -> int:
        """Payload bytes of one chunk; a gradient nobody wants does not travel."""
        rows = self.tokens * self.batch
        q, k, v = self.needs_grad
        query, key, value = (
            rows * self.heads * self.width,
            rows * self.kv_heads * self.width,
            rows * self.kv_heads * self.value_width,
        )
        if chunk.family == "kv":
            return (key + value) * self.itemsize
        if chunk.family == "dkv":
            return (k * key + v * value) * self.wire_itemsize
        if chunk.family == "dquery":
            return q * query * self.wire_itemsize
        stats = 2 * rows * self.heads * self.stat_itemsize
        return (query + rows * self.heads * self.value_width) * self.itemsize + stats

    def gradients_travel(self, side: str) -> bool:
        return self.chunk_bytes(Chunk("d" + side, 0)) > 0


@dataclass(frozen=True)
class Traffic:
    """Payload bytes one rank sends in one pass, by link class."""

    intra: int
    inter: int

    @property
    def total(self) -> int:
        return self.intra + self.inter


def traffic(schedule: Schedule, rank: int, sizes: Sizes) -> Traffic:
    """The bytes `rank` sends when `schedule` runs once."""
    sent = {"intra": 0, "inter": 0}
    for hop in schedule.sends(rank):
        sent[hop.link] += sizes.chunk_bytes(hop.chunk)
    return Traffic(**sent)


def forward_traffic(algorithm: str, grid: Grid, rank: int, sizes: Sizes) -> Traffic:
    return traffic(forward(algorithm, grid), rank, sizes)


def backward_traffic(algorithm: str, grid: Grid, rank: int, sizes: Sizes, side: str) -> Traffic:
    gradients = sizes.gradients_travel(side)
    return traffic(backward(algorithm, grid, side, gradients=gradients), rank, sizes)


def cheaper_side(algorithm: str, grid: Grid, sizes: Sizes) -> str:
    """The side with fewer bytes over all links; "kv" where they are equal.

    On one ring both sides make the same hops, so one side is cheaper on both link classes or
    on neither, and the sum of both decides.
    """
    return min(SIDES, key=lambda s: backward_traffic(algorithm, grid, 0, sizes, s).total)
