"""benchmarks/sparse: the rival gathers and sums what it should, and rows are counted by hand."""

import pytest
import torch
import torch.distributed as dist

import megatron_burst as mb
from benchmarks.sparse import bench
from benchmarks.sparse.gathered import Gathering
from benchmarks.sparse.measure import Device
from benchmarks.sparse.settings import BY_NODE, DIRECT, GATHERS, REGIMES, Layer
from megatron_burst.plugins.sparse.pairs import SelectedPairs


def gathered(way):
    """What rank 0 to 3, two on each node, gathers, sums and sends."""
    here, me = Gathering(way, 2, 2), dist.get_rank()
    found = here.gather(torch.full((3,), float(me)))
    total = here.scatter([torch.full((3,), 10.0 * me + to) for to in range(4)])
    return [each[0].item() for each in found], total[0].item(), here.sent


@pytest.mark.parametrize("way", GATHERS)
def test_both_ways_gather_all_and_sum_all(ranks, way):
    for rank, (found, total, sent) in enumerate(ranks(4).run(gathered, way)):
        assert found == [0, 1, 2, 3]
        assert total == 60 + 4 * rank  # 0 + 10 + 20 + 30, and the number of the rank from each
        # 12 bytes a chunk: to each rank of the other node, or to one of them
        inter = {DIRECT: 2, BY_NODE: 1}[way]
        assert sent["inter"] == 2 * 12 * inter
        assert sent["intra"] == 2 * 12 * {DIRECT: 1, BY_NODE: 2}[way]


def test_a_device_counts_pairs_by_the_keys_that_a_query_sees():
    layer = Layer(rows=4, top_k=2)
    queries, keys = mb.layout.Span(2, 1, 2), mb.layout.Span(0, 1, 3)
    work = SelectedPairs(mb.masks.Causal(), [queries], [keys])
    scores, attention = Device(layer).flops(work)
    # Query 2 sees 3 of 3 keys, query 3 all 3 of its 4; 2 of 3, and 2 of 4 of them, are attended to.
    assert scores == 6 * layer.index_flops
    assert attention == pytest.approx((3 * 2 / 3 + 3 * 2 / 4) * layer.attention_flops)


def test_the_table_compares_within_a_round():
    seconds = {DIRECT: [4.0, 8.0], BY_NODE: [2.0, 4.0], "burst": [2.0, 4.0], "auto": [1.0, 2.0]}
    found = {
        "regime": next(iter(REGIMES)), "compute": 1.0, "says": "ring", "seconds": seconds,
        "sent": {name: {"inter": 8} for name in seconds}, "predicted": {"burst": 2.5},
    }  # fmt: skip
    rows = bench.table([found]).splitlines()
    (auto,) = (row for row in rows if "auto (ring)" in row)
    assert "0.25 (0.25 to 0.25) | 0.50 (0.50 to 0.50)" in auto
