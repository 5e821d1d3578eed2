"""Whole steps of LoongTrain and BurstEngine: errors with stored constants and with published rates,
to which nothing was fitted, and what is fitted."""

from dataclasses import astuple
from functools import partial

import numpy as np
import pytest

from benchmarks.advise import burstengine_steps as burstengine
from benchmarks.advise import loongtrain_steps as loongtrain
from benchmarks.advise.fitting import errors, fit
from megatron_burst.autotune.clusters import GB, OFF, Cluster
from megatron_burst.tools.advise.forecast.attention_time import Rings, attention_time
from megatron_burst.tools.advise.forecast.layer_time import visible
from megatron_burst.tools.advise.forecast.step_time import model_operations, step_time


@pytest.fixture(scope="module")
def rings():
    return Rings()


def loongtrain_errors(constants, rings):
    rows = loongtrain.published()
    found = [loongtrain.predicted(row, constants, rings).tokens_per_gpu(32) for row in rows]
    return rows, found, errors(found, [row.published for row in rows])


def burstengine_errors(constants, rings):
    rows = burstengine.published()
    found = [burstengine.predicted(row, constants, rings).seconds for row in rows]
    return errors(found, [row.seconds for row in rows])


def test_loongtrain_table_2(rings):
    rows, found, off = loongtrain_errors(loongtrain.Constants(), rings)
    assert len(rows) == 48
    assert off.median < 0.015
    assert off.p90 < 0.05
    order = loongtrain.ranking(rows, found)
    assert order.pairs == 89
    assert len(order.wrong) <= 3


def test_steps_are_off_by_no_more_than_is_said(rings):
    """58 steps: LoongTrain's 48 on 32 A100 with four NICs per node, BurstEngine's 10 on A800."""
    attention = partial(attention_time, rings=rings)
    there = Cluster("a100", 32, nics=4, nic_rate=25 * GB)
    found = [
        row.published / step_time(row.model, there, row.run, attention=attention).tokens_per_gpu(32)
        for row in loongtrain.published()
    ]
    found += [
        step_time(
            burstengine.MODEL, Cluster("a800", row.gpus), row.run, attention=attention
        ).seconds
        / row.seconds
        for row in burstengine.published()
    ]
    off = np.abs(np.array(found) - 1)
    assert len(off) == 58
    assert np.median(off) == pytest.approx(0.037, abs=0.001)  # as the documentation says
    assert off.max() == pytest.approx(0.177, abs=0.002)
    assert off.max() <= OFF


def test_a_ranking_finds_what_is_out_of_order():
    rows = loongtrain.published()
    assert loongtrain.ranking(rows, [row.published for row in rows]).wrong == []
    order = loongtrain.ranking(rows, [-row.published for row in rows])
    assert len(order.wrong) == order.pairs


def test_burstengine_tables_2_and_5(rings):
    off = burstengine_errors(burstengine.Constants(), rings)
    assert off.median < 0.01
    assert off.worst < 0.03


def test_burstengine_table_3():
    found = burstengine.speedups()
    assert [point.published for point in found] == [1.72, 3.68]
    assert max(abs(point.error) for point in found) < 0.1


def test_pairs_of_masks():
    """Eight blocks of the window's length: half of each and seven whole ones, of 32 causal."""
    seq = 8 * burstengine.WINDOW
    blocks = seq / burstengine.WINDOW * visible(seq) / burstengine.WINDOW
    found = burstengine.pairs_of("sliding_window_32k_blockwise_balanced", seq)
    assert found * blocks == pytest.approx(8 * 0.5 + 7)
    assert burstengine.pairs_of("attention_masking", seq) == pytest.approx(2, rel=1e-4)


def test_the_published_mfu_is_ours():
    """From token rates of table 2, and of table 5 with 32,000 tokens for 32,768."""
    for name, seq, scale in (("table2_ablation", 1 << 20, 1.0), ("table5_intra_node", 0, 1.024)):
        for row in burstengine.table(f"burstengine_{name}"):
            done = model_operations(burstengine.MODEL, seq or int(row["sequence"]))
            mfu = done * float(row["tgs"]) * scale / 312e12
            assert 100 * mfu == pytest.approx(float(row["mfu_percent"]), rel=2e-3)


@pytest.mark.parametrize("module", [loongtrain, burstengine])
def test_constants_are_within_what_is_plausible(module):
    values = zip(*map(astuple, (module.LOW, module.Constants(), module.HIGH)), strict=True)
    assert all(low < value < high for low, value, high in values)


def test_a_fit_finds_the_constants_that_made_the_numbers():
    """Of y = a x^b, one point far off."""
    x = np.linspace(1, 5, 20)
    y = 3.0 * x**1.5
    y[7] *= 2

    def off(c):
        return np.log(c[0] * x ** c[1] / y)

    found = fit(off, (1.0, 1.0), (0.1, 0.1), (10.0, 10.0))
    assert found == pytest.approx([3.0, 1.5], rel=0.01)
    held = fit(off, (1.0, 1.0), (0.1, 0.1), (2.0, 10.0))
    assert held[0] == pytest.approx(2.0)


@pytest.mark.slow
def test_fitting_again_finds_the_stored_constants(rings):
    again = loongtrain.fitted(loongtrain.published(), rings=rings)
    assert loongtrain_errors(again, rings)[2].median == pytest.approx(
        loongtrain_errors(loongtrain.Constants(), rings)[2].median, abs=0.002
    )
    again = burstengine.fitted(burstengine.published(), rings=rings)
    assert astuple(again) == pytest.approx(astuple(burstengine.Constants()), rel=0.02)


@pytest.mark.slow
def test_each_row_of_burstengine_from_the_others():
    left = burstengine.leave_one_out(burstengine.published())
    off = errors([point.predicted for point in left], [point.published for point in left])
    assert off.median < 0.03
