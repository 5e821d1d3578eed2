"""Cases of row chunks: made, run with all ranks in one process or on real ones, and judged."""

from functools import cache
from typing import NamedTuple

import numpy as np
import oracle
import torch
import torch.distributed as dist

import megatron_burst as mb
from megatron_burst import masks
from megatron_burst.plugins.testing import in_process

BLIND = 5  # every fifth position sees nothing


def _table(length, rule):
    query, key = np.ogrid[:length, :length]
    return np.broadcast_to(rule(query, key, length), (length, length))


# name: the rule by hand, and the mask.
MASKS = {
    "full": (lambda q, k, n: (q >= 0) & (k >= 0), lambda n: masks.Full()),
    "causal": (lambda q, k, n: k <= q, lambda n: masks.Causal()),
    "window": (lambda q, k, n: (k <= q) & (q - k <= 5), lambda n: masks.Window(5, 0)),
    "packed": (
        lambda q, k, n: (k <= q) & ((q < n // 3) == (k < n // 3)),
        lambda n: masks.Documents([0, n // 3, n]) & masks.Causal(),
    ),
    # The second half sees nothing: whole ranks, and whole chunks.
    "blind": (
        lambda q, k, n: (k <= q) & (q < n // 2) & (k % 3 > 0),
        lambda n: masks.Dense(_table(n, MASKS["blind"][0])),
    ),
}


class Case(NamedTuple):
    grid: tuple[int, int, int]  # nodes, ranks per node, ranks that share heads
    algorithm: str
    chunks: int
    side: str = "auto"
    mask: str = "causal"
    layout: str = "zigzag"
    blocks: int = 1
    rows: int = 12
    batch: int = 1
    heads: tuple[int, int] = (4, 2)
    widths: tuple[int, int] = (8, 4)
    sink: bool = False
    head_chunks: int = 1  # 0: one per key/value head
    kernel: str = "aten"

    @property
    def size(self):
        return self.grid[0] * self.grid[1]

    @property
    def length(self):
        return self.rows * self.size

    def laid(self):
        """The layout, and the positions of every rank: by hand where no solver finds them."""
        if self.layout not in ("balanced", "documents"):
            return self.layout, oracle.permutation(self.layout, self.size, self.length)
        if self.layout == "balanced":
            cuts = [0, self.length // 3, self.length // 2, self.length]
            layout = mb.layout.make("balanced", cp_size=self.size, cu_seqlens=cuts)
        else:
            cuts = [0, 2 * self.size, self.length]
            layout = mb.layout.make("zigzag", cp_size=self.size, cu_seqlens=cuts)
        return layout, [layout.positions(r, self.length).tolist() for r in range(self.size)]

    def choices(self):
        return {
            "algorithm": self.algorithm, "side": self.side, "layout": self.laid()[0],
            "mask": MASKS[self.mask][1](self.length), "sequence_chunks": self.chunks,
            "row_blocks": self.blocks, "kernel": self.kernel,
            "head_chunks": self.head_chunks or self.heads[1],
        }  # fmt: skip


@cache
def solve(mask, length, batch, heads, widths, has_sink):
    """((q, k, v, dout), sink, (out, dq, dk, dv, dsink)) of the whole sequence."""
    generator = torch.Generator().manual_seed(3)
    (h, k), (d, w) = heads, widths
    shapes = (h, d), (k, d), (k, w), (h, w)
    inputs = [
        torch.randn((length, batch, *shape), generator=generator, dtype=torch.float64)
        for shape in shapes
    ]
    sink = torch.linspace(-1, 1, h, dtype=torch.float64) if has_sink else None
    seen = torch.from_numpy(_table(length, MASKS[mask][0]).copy())
    out, lse, *grads = oracle.attention(*inputs, seen, sink=sink)
    dsink = oracle.sink_gradient(sink, lse, out, inputs[3]) if has_sink else None
    return inputs, sink, (out, *grads, dsink)


def problem(case):
    return solve(case.mask, case.length, case.batch, case.heads, case.widths, case.sink)


def shards(case):
    """q, k, v, dout: of each a list with one tensor per rank."""
    return [[x[at].clone() for at in case.laid()[1]] for x in problem(case)[0]]


def groups_of(case):
    nodes, per_node, ulysses = case.grid
    return in_process.groups(inter=nodes, intra=per_node, ulysses=ulysses)


def chunk_by_chunk(plan, q, k, v, dout, sink, again, **more):
    """(out, dq, dk, dv, dsink) of one rank by `plan.chunked`, backward from the last chunk on.

    again: backward is that of a second call.
    """
    call = plan.chunked(k, v, sink, label="layer 1", **more)
    results = [call.forward(c, q[at]) for c, at in enumerate(plan.row_chunks)]
    if again:
        call = plan.chunked(k, v, sink, label="layer 1 again", **more)
    out, dq = torch.zeros_like(dout), torch.zeros_like(q)
    for c, at in reversed(list(enumerate(plan.row_chunks))):
        out[at] = results[c][0]
        dq[at] = call.backward(c, q[at], *results[c], dout[at])
    return out, dq, *call.gradients()


def one_by_one(case, again):
    """((out, dq, dk, dv) of each rank, dsink) by `plan.chunked`."""
    groups, given = groups_of(case), shards(case)
    sink = problem(case)[1]
    plan = in_process.prepare(
        *given[:3], groups=groups, sink=sink, needs_grad=(True,) * 3, **case.choices()
    )
    found = groups.run(chunk_by_chunk, plan.ranks, *given, [sink] * case.size, [again] * case.size)
    dsink = sum(each[4] for each in found) if sink is not None else None
    return [each[:4] for each in found], dsink


def error(case, results):
    """The largest difference from the oracle."""
    (each, dsink), truth = results, problem(case)[2]
    worst = [
        oracle.worst(mine, right[at])
        for got, at in zip(each, case.laid()[1], strict=True)
        for mine, right in zip(got, truth[:4], strict=True)
    ]
    return max([*worst, oracle.worst(dsink, truth[4])] if case.sink else worst)


@cache
def _groups_on_rank(nodes, per_node, ulysses):
    return mb.Groups.from_topology(dist.group.WORLD, intra=per_node, ulysses=ulysses)


def error_on_rank(case):
    """This rank's largest difference; chunk by chunk, and the bytes that it sends beside."""
    groups, rank = _groups_on_rank(*case.grid), dist.get_rank()
    given = [each[rank] for each in shards(case)]
    sink, truth = problem(case)[1:]
    plan = mb.prepare(
        *given[:3], groups=groups, sink=sink, needs_grad=(True,) * 3, **case.choices()
    )
    groups.counters.reset()
    got = chunk_by_chunk(plan, *given, sink, again=False)
    there, back = plan.traffic()
    assert (groups.counters.intra, groups.counters.inter) == (
        (there + back).intra, (there + back).inter
    )  # fmt: skip
    at = case.laid()[1][rank]
    pairs = zip(got[:4], truth[:4], strict=True)
    return max(oracle.worst(mine, right[at]) for mine, right in pairs)
