"""BurstEngine's memory: within the targets with nothing fitted, and a row added up by hand."""

import pytest

from benchmarks.advise import burstengine_memory as bench
from benchmarks.advise.section import spread
from megatron_burst.tools.advise.account.memory import account


def test_ten_rows_within_the_targets():
    section = bench.run()
    found = spread(section.points)
    assert len(section.points) == 10
    assert found.median <= 0.05
    assert found.worst <= 0.07
    assert section.figures[0].met
    assert spread(bench.left_out(bench.rows())).worst <= 0.08
    assert bench.fitted(bench.rows()) == pytest.approx(bench.RESERVE, rel=0.1)


def test_the_store_and_the_states_by_hand():
    """32K rows of 40 layers: out in bf16 and lse in fp32; 13.9e9 parameters over 32 GPUs."""
    runs = {label: run for label, (run, _) in bench.runs().items()}
    none, half, whole = (
        account(bench.MODEL, runs[label], every=False)
        for label in ("+lm_head_loss_fusion", "+seq_selective_ckpt", "selective_ckpt_pp_instead")
    )
    results = 40 * 32768 * (5120 * 2 + 40 * 4)
    assert half.peak.items["attention store"] == pytest.approx(results / 2)
    assert whole.peak.items["attention store"] == pytest.approx(results)
    layer = 4 * 5120**2 + 3 * 5120 * 13824
    parameters = 40 * (layer + 2 * 5120) + 2 * 120_000 * 5120 + 5120
    assert none.states["optimizer"] == pytest.approx(12 * parameters / 32)
    assert none.states["parameters"] == pytest.approx(2 * parameters / 32)
    assert none.states["gradients"] == pytest.approx(4 * parameters / 32)
    assert none.peak.items["gathered weights"] == layer * (2 * 2 + 4)
