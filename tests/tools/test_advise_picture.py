"""`advise --png`: what is drawn is what the model of time says, and it is drawn."""

import math
from itertools import pairwise

import pytest

import megatron_burst as mb
from megatron_burst.tools.advise import picture
from megatron_burst.tools.advise.forecast.layer_time import (
    ATTENTION,
    EXPERTS,
    HOST,
    LINEAR,
    MEMORY,
    PRODUCTS,
    STATES,
    TENSOR,
    layer_time,
)
from megatron_burst.tools.advise.forecast.pipeline import pipeline_seconds, timeline
from megatron_burst.tools.advise.forecast.step_time import HEAD
from megatron_burst.tools.advise.picture import EXCHANGE, call_of, layer_bars, step_of
from megatron_burst.tools.memory import picture as memory_picture
from megatron_burst.tools.show.colours import MEANINGS


@pytest.fixture(scope="module")
def found():
    """Four ranks that share heads two by two, on two pipeline stages."""
    return mb.advise("llama3.2-1b", "h100", gpus=8, per_node=4, seq="32K", tokens_per_step="128K",
                     cp=4, pp=2, ulysses=2, algorithm="hybrid", top=1)  # fmt: skip


def test_an_attention_call_ends_when_it_is_predicted_to(found):
    call = call_of(found)
    assert call.size == 2
    assert {span.rank for span in call.spans} == {0, 1}
    last = max(span.end for span in call.spans)
    assert math.isclose(last, call.time.seconds)
    computed = [0.0, 0.0]
    for span in call.spans:
        computed[span.rank] += (span.what == "compute") * (span.end - span.start)
    assert math.isclose(max(computed), call.time.busy["compute"], rel_tol=0.1)  # slowed by traffic
    shared = [s for s in call.spans if s.what == EXCHANGE and s.rank == 0]
    assert len(shared) == 4
    assert math.isclose(sum(s.end - s.start for s in shared), sum(call.time.exchange))


def test_every_meaning_has_its_own_colour():
    parts = {ATTENTION, PRODUCTS, MEMORY, LINEAR, STATES, TENSOR, EXPERTS, HOST, HEAD}
    drawn = (
        parts | {"inter"},
        {"forward", "backward", *picture.STATES},
        {"compute", "intra", "inter", EXCHANGE, "wait"},
        set(memory_picture.ORDER) & set(MEANINGS),
    )
    for names in drawn:
        assert len({MEANINGS[name] for name in names}) == len(names), names


def test_a_rank_computes_one_thing_at_a_time(found):
    for rank in (0, 1):
        spans = sorted((s.start, s.end) for s in call_of(found).spans
                       if s.rank == rank and s.what in ("compute", EXCHANGE))  # fmt: skip
        assert all(a[1] <= b[0] + 1e-12 for a, b in pairwise(spans))


def test_the_parts_of_a_layer_follow_one_another(found):
    bars = layer_bars(found)
    assert bars[0].start == 0
    assert all(a.end == b.start for a, b in pairwise(bars))
    whole = layer_time(found.model, found.cluster, found.best.run)
    assert math.isclose(bars[-1].end, whole.seconds)


def test_a_step_takes_as_long_as_advised(found):
    step, run = step_of(found), found.best.run
    assert len(step.turns) == 2 * run.pp * run.vpp * run.micro_batches
    assert math.isclose(step.end, found.best.seconds, rel_tol=0.05)


def test_turns_by_hand():
    """Two stages, two micro-batches, forward 1 s and backward 2 s: 1F1B ends after 9 s."""
    import numpy as np

    one, two = np.ones((2, 2)), 2 * np.ones((2, 2))
    turns = timeline(one, two)
    first = [
        (turn.backward, turn.micro_batch, start, end) for s, turn, start, end in turns if s == 0
    ]
    assert first == [(False, 0, 0, 1), (False, 1, 1, 2), (True, 0, 4, 6), (True, 1, 7, 9)]
    assert pipeline_seconds(one, two) == 9


def test_packed_documents_are_refused(tmp_path):
    packed = mb.advise("llama3.2-1b", "h100", gpus=4, seq="32K", packed=[4096] * 8, top=1, cp=4)
    with pytest.raises(ValueError, match="leave --packed out"):
        picture.draw(packed, tmp_path / "x.png")
