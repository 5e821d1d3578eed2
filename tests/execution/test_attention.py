"""The public function against the dense oracle, with every rank of the grid in one process.

All combinations of algorithms, layouts, masks, head ratios, sides, batch and d_v, in float64 to
1e-10, and the bytes of each rank against a handwritten table.
"""

import cases
import pytest

# (nodes, ranks per node): which eighth of the product of masks, heads, batches and widths. The rest
# is the long tail.
SHORT = {
    (1, 1): {4}, (1, 2): {6}, (1, 3): {5}, (1, 4): {2}, (2, 2): {3}, (2, 3): {7}, (2, 4): {0},
    (4, 2): {1},
}  # fmt: skip
GRIDS = [
    *((*grid, eighths) for grid, eighths in SHORT.items()),
    *(
        pytest.param(*grid, {*range(8)} - eighths, marks=pytest.mark.slow)
        for grid, eighths in SHORT.items()
    ),
]


@pytest.mark.parametrize("side", cases.SIDES)
@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("algorithm", cases.ALGORITHMS)
@pytest.mark.parametrize(("nodes", "per_node", "eighths"), GRIDS)
def test_equals_the_dense_oracle_and_the_byte_table(
    ranks, nodes, per_node, eighths, algorithm, layout, side
):
    """Two processes share the work; each case has all its ranks in one process."""
    product = cases.grid(nodes, per_node, algorithm, layout, side)
    todo = [case for number, case in enumerate(product) if number % 8 in eighths]
    cases.assert_none(ranks(2).run(cases.faults_of_my_share, todo))
