"""One case of the attention grid: build it, run it in process or on a rank, judge it.

A case is small on purpose; the grid is large. Every rank of a case solves the whole problem
with the oracle, once per problem, and judges its own shard, so no tensors travel to pytest.
"""

import random
from collections import Counter
from functools import cache, lru_cache
from itertools import product
from typing import NamedTuple

import oracle
import torch
import torch.distributed as dist

import megatron_burst as mb
from megatron_burst.plugins.testing import in_process

ALGORITHMS = ("ring", "double_ring", "burst")
LAYOUTS = ("contiguous", "zigzag", "striped")
SIDES = ("kv", "query")
MASKS = {"full": mb.masks.Full(), "causal": mb.masks.Causal()}
HEADS = ((4, 4), (4, 2), (4, 1), (3, 1))  # ratios 1, 2, 4, and MQA with an odd number of heads
WIDTHS = ((4, 4), (5, 3))  # (d, w)
ROWS = {1: 6, 2: 6, 3: 6, 4: 6, 6: 4, 8: 4}  # per rank; zigzag halves them
TOLERANCE = 1e-10


class Problem(NamedTuple):
    mask: str
    heads: tuple[int, int]
    batch: int
    widths: tuple[int, int]
    length: int
    dtype: torch.dtype = torch.float64


class Case(NamedTuple):
    nodes: int
    per_node: int
    algorithm: str
    layout: str
    side: str
    kernel: str
    problem: Problem

    @property
    def size(self):
        return self.nodes * self.per_node


@lru_cache(maxsize=64)
def solve(problem):
    """((q, k, v, dout), (out, dq, dk, dv)): random inputs of the whole sequence, and the truth."""
    (h, k), (d, w), s, b = problem.heads, problem.widths, problem.length, problem.batch
    generator = torch.Generator().manual_seed(7)
    shapes = (s, b, h, d), (s, b, k, d), (s, b, k, w), (s, b, h, w)
    wide = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    inputs = [x.to(problem.dtype) for x in wide]
    out, _, dq, dk, dv = oracle.attention(*inputs, oracle.visible(problem.mask, s))
    return inputs, (out, dq, dk, dv)


def grid(nodes, per_node, algorithm, layout, side):
    """All masks x head ratios x batches x widths, shuffled, so that any part is a fair sample;
    neighbours in the product differ in the kernel."""
    length = ROWS[nodes * per_node] * nodes * per_node
    sizes = product(enumerate(MASKS), enumerate(HEADS), enumerate((1, 2)), enumerate(WIDTHS))
    todo = []
    for (i, mask), (j, heads), (m, batch), (n, width) in sizes:
        problem = Problem(mask, heads, batch, width, length)
        kernel = ("reference", "aten")[(i + j + m + n) % 2]
        todo.append(Case(nodes, per_node, algorithm, layout, side, kernel, problem))
    return random.Random(0).sample(todo, len(todo))


def shards(case, tensors):
    """For each rank its rows of every tensor, by handwritten positions, as fresh leaves."""
    positions = oracle.permutation(case.layout, case.size, case.problem.length)
    return [[x[rows].clone() for x in tensors] for rows in positions]


def choices(case):
    return {
        "layout": case.layout,
        "algorithm": case.algorithm,
        "side": case.side,
        "kernel": case.kernel,
        "mask": MASKS.get(case.problem.mask),
    }


def judge(case, rank, got, counters):
    """What is wrong with one rank's (out, dq, dk, dv) and byte counters: a list of sentences."""
    faults = []
    truth = shards(case, solve(case.problem)[1])[rank]
    for name, mine, right in zip(("out", "dq", "dk", "dv"), got, truth, strict=True):
        error = oracle.worst(mine, right)
        if not error <= TOLERANCE:
            faults.append(f"rank {rank}: {name} is off by {error:.3g}: {case}")
    wanted = expected_bytes(case, rank)
    if (counters.intra, counters.inter) != wanted:
        faults.append(
            f"rank {rank} sent {(counters.intra, counters.inter)} bytes, wanted {wanted}: {case}"
        )
    return faults


def expected_bytes(case, rank, wire=None):
    """(intra, inter) bytes that `rank` sends in one forward and one backward.

    A hop carries the rows that somebody further along has to do with; each ring goes round the way
    that sends fewer bytes, and chunks go straight to their users if that is fewer bytes between
    nodes, then within.
    """
    (h, k), (d, w) = case.problem.heads, case.problem.widths
    item = case.problem.dtype.itemsize
    stat = 8 if item == 8 else 4
    sizes = (case.problem.batch, h, k, d, w)
    sent = {"intra": 0, "inter": 0}
    for side, gradient in (
        ("kv", 0),
        (case.side, oracle.gradient_bytes(case.side, *sizes, wire or stat)),
    ):
        row = oracle.activation_bytes(side, *sizes, item, stat), gradient
        for link, count in _cheapest(case, side, row)[rank].items():
            sent[link] += count
    return sent["intra"], sent["inter"]


def _cheapest(case, side, row):
    """`cheapest` of one pass of a case."""
    problem = case.problem
    users = users_of_rows(case.size, case.layout, problem.mask, problem.length, side)
    return cheapest(case.algorithm, (case.nodes, case.per_node), users, row)


def cheapest(algorithm, grid, users, row):
    """For every rank {link: bytes} of one pass, by the route that sends least over all ranks.

    users: as of `oracle.row_hops`. row: bytes of one row, of activations and of gradients.
    """

    def sent(algorithm, ways=(1, 1)):
        return [
            {link: there[link] * row[0] + back[link] * row[1] for link in there}
            for there, back in oracle.row_hops(algorithm, *grid, users, ways)
        ]

    def total(route, links):
        return [sum(rank[link] for rank in route) for link in links]

    # On one flat ring all hops decide, on two levels each level by its own.
    links = [["inter"], ["intra"]] if algorithm != "ring" else [["inter", "intra"]] * 2
    ways = [
        min((1, -1), key=lambda way, on=on: sum(total(sent(algorithm, (way, way)), on)))
        for on in links
    ]
    routes = sent(algorithm, ways), sent("direct")
    return min(routes, key=lambda route: total(route, ("inter", "intra")))


@cache
def users_of_rows(size, layout, mask, length, side):
    """For each owner {ranks that have to do with a row: how many such rows it has}."""
    seen = oracle.visible(mask, length)
    seen = seen if side == "kv" else seen.T  # [what stays, what travels]
    positions = oracle.permutation(layout, size, length)
    return [
        Counter(
            frozenset(r for r, mine in enumerate(positions) if seen[mine, row].any())
            for row in rows
        )
        for rows in positions
    ]


def run_in_process(case, **more):
    """(out, dq, dk, dv) of every rank, and the counters of every rank."""
    groups = in_process.groups(inter=case.nodes, intra=case.per_node)
    *qkv, douts = zip(*shards(case, solve(case.problem)[0]), strict=True)
    leaves = [x.requires_grad_() for xs in qkv for x in xs]
    outs = in_process.attention(*map(list, qkv), groups=groups, **choices(case), **more)
    grads = torch.autograd.grad(outs, leaves, douts)
    size = case.size
    results = list(zip(outs, grads[:size], grads[size : 2 * size], grads[2 * size :], strict=True))
    return results, [rank.counters for rank in groups.ranks]


def faults_in_process(case):
    results, counters = run_in_process(case)
    return [
        fault
        for rank, (got, counter) in enumerate(zip(results, counters, strict=True))
        for fault in judge(case, rank, got, counter)
    ]


@cache
def groups_on_rank(nodes, per_node):
    """The groups of a grid over all processes, made once: making them is collective."""
    assert nodes * per_node == dist.get_world_size()
    return mb.Groups.from_topology(dist.group.WORLD, intra=per_node)


def run_on_rank(case, **more):
    """(out, dq, dk, dv) of this rank, and its counters."""
    groups = groups_on_rank(case.nodes, case.per_node)
    groups.counters.reset()
    *qkv, dout = shards(case, solve(case.problem)[0])[groups.rank]
    leaves = [x.requires_grad_() for x in qkv]
    out = mb.attention(*leaves, groups=groups, **choices(case), **more)
    return (out, *torch.autograd.grad(out, leaves, dout)), groups.counters


def faults_on_rank(cases):
    """To be run on every rank of the grid: what was wrong here with each case."""
    faults = []
    for case in cases:
        got, counters = run_on_rank(case)
        faults += judge(case, dist.get_rank(), got, counters)
    return faults


def faults_of_my_share(cases):
    """To be run on any number of processes: each takes its share of in-process cases."""
    mine = cases[dist.get_rank() :: dist.get_world_size()]
    return [fault for case in mine for fault in faults_in_process(case)]


def assert_none(faults_by_rank):
    """No rank found a fault; else say the first ten."""
    faults = [fault for faults in faults_by_rank for fault in faults]
    assert not faults, f"{len(faults)} faults\n" + "\n".join(faults[:10])


class Failing:
    """A kernel that raises at the `count`-th call of `method`."""

    def __init__(self, kernel, method, count):
        self.kernel, self.method, self.count = kernel, method, count

    def __getattr__(self, name):
        self.count -= name == self.method
        if self.count < 0:
            raise MemoryError(f"no room for {name}")
        return getattr(self.kernel, name)
