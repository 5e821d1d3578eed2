"""The public op on real processes: gloo ranks against the dense oracle and the byte table."""

import cases
import pytest

GRIDS = [(1, 2), (1, 3), (2, 2)]


@pytest.mark.parametrize("side", cases.SIDES)
@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("algorithm", cases.ALGORITHMS)
@pytest.mark.parametrize(("nodes", "per_node"), GRIDS)
def test_equals_the_dense_oracle_and_the_byte_table(
    ranks, nodes, per_node, algorithm, layout, side
):
    todo = list(cases.grid(nodes, per_node, algorithm, layout, side))
    cases.assert_none(ranks(nodes * per_node).run(cases.faults_on_rank, todo))
