"""Work and imbalance of layouts in `show`, against numbers computed by hand."""

import pytest

from megatron_burst import layout, masks
from megatron_burst.plugins.tools.show.balance import imbalance
from megatron_burst.plugins.tools.show.scene import Shards
from megatron_burst.schedule.topology import Topology


@pytest.mark.parametrize(
    ("mask", "name", "wanted"),
    [
        (masks.Causal(), "contiguous", [10, 26, 42, 58]),
        (masks.Causal(), "zigzag", [34, 34, 34, 34]),
        (masks.Causal(), "striped", [28, 32, 36, 40]),
        (masks.Window(1, 0), "contiguous", [7, 8, 8, 8]),
    ],
)
def test_work_of_four_ranks_by_hand(mask, name, wanted):
    assert Shards(mask, layout.make(name, cp_size=4), 16, "", name).work == wanted


def test_every_step_waits_for_its_busiest_rank():
    assert imbalance(layout.make("contiguous", cp_size=2), masks.Full(), 8) == 1.0
    # Step 0: both ranks 10 pairs; step 1: rank 1 has 16, rank 0 nothing: 26 slots of 18 mean.
    got = imbalance(layout.make("contiguous", cp_size=2), masks.Causal(), 8)
    assert got == pytest.approx(26 * 2 / 36)


def test_nodes_and_shared_heads_change_who_waits():
    """Two documents on four ranks, one document per node of two ranks.

    A ring of nodes works for two steps of four, all ranks at once. One flat ring works at steps 0,
    1 and 3, with half the ranks after the first step. If two ranks share heads, ranks 0 and 1 hold
    the first half together.
    """
    mask, rows = masks.Documents([0, 2, 4]), layout.make("contiguous", cp_size=4)
    nodes = Topology(4, 2)
    assert imbalance(rows, mask, 4) == 3 * 4 / 8
    assert imbalance(rows, mask, 4, topology=nodes) == 3 * 4 / 8
    assert imbalance(rows, mask, 4, topology=nodes, algorithm="burst") == 1.0
    shared = Topology(4, 4, ulysses=2)
    # Halves of four rows: step 0: 10 pairs each; step 1: 16 and nothing.
    got = imbalance(rows, masks.Causal(), 8, topology=shared)
    assert got == pytest.approx(26 * 2 / 36)
    with pytest.raises(ValueError, match="topology has 4 ranks, but the layout has 2"):
        imbalance(layout.make("striped", cp_size=2), mask, 4, topology=nodes)
