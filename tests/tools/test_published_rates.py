"""What published rates predict of published steps, to which none of them was fitted."""

from functools import partial

import numpy as np
import pytest

from benchmarks.advise import burstengine_steps, loongtrain_steps
from megatron_burst.autotune.clusters import GB, OFF, Cluster
from megatron_burst.tools.advise.forecast.attention_time import Rings, attention_time
from megatron_burst.tools.advise.forecast.step_time import step_time


def test_steps_are_off_by_no_more_than_is_said():
    """58 steps: LoongTrain's 48 on 32 A100 with four NICs per node, BurstEngine's 10 on A800."""
    attention = partial(attention_time, rings=Rings())
    there = Cluster("a100", 32, nics=4, nic_rate=25 * GB)
    found = [
        row.published / step_time(row.model, there, row.run, attention=attention).tokens_per_gpu(32)
        for row in loongtrain_steps.published()
    ]
    found += [
        step_time(
            burstengine_steps.MODEL, Cluster("a800", row.gpus), row.run, attention=attention
        ).seconds
        / row.seconds
        for row in burstengine_steps.published()
    ]
    off = np.abs(np.array(found) - 1)
    assert len(off) == 58
    assert np.median(off) == pytest.approx(0.037, abs=0.001)  # as the documentation says
    assert off.max() == pytest.approx(0.177, abs=0.002)
    assert off.max() <= OFF
