"""The public function on real processes: gloo ranks against the dense oracle and the byte table.

Every algorithm, layout and side runs with some of its 32 cases, different ones each time. In small
worlds, the long tests run all combinations (test_attention.py runs them in one process each time).
"""

from itertools import count, product

import cases
import pytest
import torch
import torch.distributed as dist

ALL, SOME, FEW = 1, 16, 32  # every n-th case
GRIDS = {(1, 2): SOME, (1, 3): SOME, (2, 2): SOME, (2, 3): FEW, (2, 4): FEW, (4, 2): FEW}
COMBINATIONS = [
    pytest.param(*grid, *choice, start, every, marks=[pytest.mark.slow] * (every == ALL))
    for grid, every in [*GRIDS.items(), *((grid, ALL) for grid in GRIDS if GRIDS[grid] == SOME)]
    for start, choice in zip(
        count(), product(cases.ALGORITHMS, cases.LAYOUTS, cases.SIDES), strict=False
    )
]


@pytest.mark.parametrize(
    ("nodes", "per_node", "algorithm", "layout", "side", "start", "every"), COMBINATIONS
)
def test_equals_the_dense_oracle_and_the_byte_table(
    ranks, nodes, per_node, algorithm, layout, side, start, every
):
    todo = cases.grid(nodes, per_node, algorithm, layout, side)[start % every :: every]
    assert todo
    cases.assert_none(ranks(nodes * per_node).run(cases.faults_on_rank, todo))


def same_bits(case):
    """Return on every rank whether its shard is the same, bit by bit, in other runs.

    The other runs are a second one, and the same grid in one process.
    """
    first, _ = cases.run_on_rank(case)
    second, _ = cases.run_on_rank(case)
    alone = cases.run_in_process(case)[0][dist.get_rank()]
    three = zip(first, second, alone, strict=True)
    return [torch.equal(x, y) and torch.equal(x, z) for x, y, z in three]


@pytest.mark.parametrize("side", cases.SIDES)
@pytest.mark.parametrize("algorithm", cases.ALGORITHMS)
@pytest.mark.parametrize("kernel", ["reference", "aten"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_same_bits_every_time_and_on_every_transport(ranks, dtype, kernel, algorithm, side):
    problem = cases.Problem("causal", (4, 2), 1, (8, 8), 32, dtype)
    case = cases.Case(2, 2, algorithm, "zigzag", side, kernel, problem)
    assert ranks(4).run(same_bits, case) == [[True] * 4] * 4


def grouped(case):
    """Return the errors of this rank with two and four head chunks."""
    faults = []
    for number in (2, 4):
        got, counters = cases.run_on_rank(case, head_chunks=number)
        faults += cases.judge(case, dist.get_rank(), got, counters)
    return faults


@pytest.mark.parametrize("side", cases.SIDES)
@pytest.mark.parametrize("algorithm", cases.ALGORITHMS)
@pytest.mark.parametrize("mask", cases.MASKS)
def test_groups_of_heads_are_exact_and_send_no_more(ranks, mask, algorithm, side):
    """Rows that see nothing in a step, chunks that are not sent: programs differ by rank."""
    problem = cases.Problem(mask, (8, 4), 2, (5, 3), 24)
    case = cases.Case(2, 2, algorithm, "contiguous", side, "aten", problem)
    cases.assert_none(ranks(4).run(grouped, case))
