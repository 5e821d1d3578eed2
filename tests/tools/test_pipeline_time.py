"""The event model of pipelines: by hand, and bubbles by the papers' formulas."""

import numpy as np
import pytest

from megatron_burst.tools.advise.forecast.pipeline import Turn, pipeline_seconds, turns


def equal(stages, micro_batches, vpp=1, forward=1.0, backward=2.0):
    shape = stages * vpp, micro_batches
    return np.full(shape, forward / vpp), np.full(shape, backward / vpp)


def test_one_stage_has_no_bubble():
    assert pipeline_seconds(*equal(1, 5), hop=9.0) == 15.0


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (4, 4), (4, 8), (8, 32), (4, 3)])
def test_the_bubble_of_1f1b(stages, micro_batches):
    """(p - 1) / m of the time without one (arXiv 2104.04473, section 2.2.1)."""
    got = pipeline_seconds(*equal(stages, micro_batches))
    assert got == 3 * micro_batches * (1 + (stages - 1) / micro_batches)


@pytest.mark.parametrize(
    ("stages", "micro_batches", "vpp"), [(2, 4, 2), (4, 8, 2), (4, 16, 4), (8, 8, 2)]
)
def test_the_bubble_of_interleaved_stages(stages, micro_batches, vpp):
    """(p - 1) / (m v) (the same, section 2.2.2)."""
    got = pipeline_seconds(*equal(stages, micro_batches, vpp), vpp=vpp)
    assert got == pytest.approx(3 * micro_batches * (1 + (stages - 1) / (micro_batches * vpp)))


def test_two_stages_by_hand():
    """F 1, B 2, hops of 0.5. Stage 0: F0 0-1, F1 1-2, waits for B0; stage 1: F0 1.5-2.5, B0
    2.5-4.5, F1 4.5-5.5, B1 5.5-7.5. Stage 0: B0 5-7, B1 8-10."""
    assert pipeline_seconds(*equal(2, 2), hop=0.5) == 10.0


def test_the_order_of_two_ranks_with_two_chunks_each():
    """As drawn in arXiv 2104.04473, figure 4: rank 0 runs ahead by 2 + 2 forwards."""
    first = [(t.backward, t.chunk, t.micro_batch) for t in turns(0, 2, 4, 2)]
    assert first[:8] == [
        (False, 0, 0), (False, 0, 1), (False, 2, 0), (False, 2, 1), (False, 0, 2), (True, 2, 0),
        (False, 0, 3), (True, 2, 1),
    ]  # fmt: skip
    last = turns(1, 2, 4, 2)
    assert last[:4] == [Turn(False, 1, 0), Turn(False, 1, 1), Turn(False, 3, 0), Turn(True, 3, 0)]
    for stage in range(2):
        ran = turns(stage, 2, 4, 2)
        assert sorted(ran) == sorted(
            Turn(back, chunk, each)
            for back in (False, True) for chunk in (stage, stage + 2) for each in range(4)
        )  # fmt: skip


def test_a_last_group_that_is_not_full():
    """Three micro-batches on two ranks of two chunks: the third goes round alone."""
    assert pipeline_seconds(*equal(2, 3, 2), vpp=2) >= 9 + 3 / 2


def test_the_slowest_stage_sets_the_pace():
    """Of 4 stages the second takes 1.5 times as long. It starts at 1, runs F0 to F2 until 5.5 and
    has B0 at 8.5, from stages 2 (F 2.5-3.5, B 6.5-8.5) and 3 (3.5-4.5, 4.5-6.5); it waits for
    nothing else, and stage 0's last backward (2) follows its own."""
    forward, backward = equal(4, 64)
    forward[1] *= 1.5
    backward[1] *= 1.5
    assert pipeline_seconds(forward, backward) == 1 + 64 * 4.5 + 3 + 2


def test_a_long_micro_batch_delays_every_stage_once():
    """Micro-batch 0 takes twice as long on both stages: F 0-2, 2-4; B 4-8, 8-12; stage 1 then
    runs F1 8-9, B1 9-11, and stage 0, which has run F1, B1 12-14."""
    forward, backward = equal(2, 2)
    forward[:, 0] *= 2
    backward[:, 0] *= 2
    assert pipeline_seconds(forward, backward) == 14.0


def test_shapes_that_are_no_table():
    with pytest.raises(ValueError, match="alike"):
        pipeline_seconds(np.ones((2, 3)), np.ones((2, 4)))
    with pytest.raises(ValueError, match="vpp 2 does not divide 3"):
        pipeline_seconds(np.ones((3, 4)), np.ones((3, 4)), vpp=2)
