"""The public function against the dense oracle, with every rank of the grid in one process.

All combinations of algorithms, layouts, masks, head ratios, sides, batch and d_v, in float64 to
1e-10, and the bytes of each rank against a handwritten table.
"""

import cases
import pytest

# (nodes, ranks per node, part): of the grids of eight ranks, and of those on one node, each has
# another part of the product. The rest is the long tail.
GRIDS = [
    (1, 1, "quarter"), (1, 2, "half"), (1, 3, "other half"), (1, 4, "half"), (2, 2, "half"),
    (2, 3, "eighth"), (2, 4, "eighth"), (4, 2, "other eighth"),
    *(pytest.param(*grid, marks=pytest.mark.slow) for grid in [
        (1, 1, "all"), (1, 2, "other half"), (1, 3, "half"), (1, 4, "other half"),
        (2, 2, "other half"), (2, 3, "all"), (2, 4, "half"), (4, 2, "other half"),
    ]),
]  # fmt: skip
PARTS = {
    "all": slice(None), "half": slice(0, None, 2), "other half": slice(1, None, 2),
    "quarter": slice(0, None, 4), "eighth": slice(0, None, 8), "other eighth": slice(1, None, 8),
}  # fmt: skip


@pytest.mark.parametrize("side", cases.SIDES)
@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("algorithm", cases.ALGORITHMS)
@pytest.mark.parametrize(("nodes", "per_node", "part"), GRIDS)
def test_equals_the_dense_oracle_and_the_byte_table(
    ranks, nodes, per_node, part, algorithm, layout, side
):
    """Two processes share the work; each case has all its ranks in one process."""
    todo = cases.grid(nodes, per_node, algorithm, layout, side)[PARTS[part]]
    cases.assert_none(ranks(2).run(cases.faults_of_my_share, todo))
