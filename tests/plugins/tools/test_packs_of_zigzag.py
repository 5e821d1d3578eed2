"""Packs that zigzag cuts document by document: padding, work and flags worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

import megatron_burst as mb
from megatron_burst.autotune.gpus import gpu
from megatron_burst.plugins.tools.advise.search.attention_choice import AttentionForecast
from megatron_burst.plugins.tools.advise.search.packed import PackedForecast
from megatron_burst.plugins.tools.advise.search.search_space import TrainingGoal

MODEL = mb.Model("tiny", layers=2, hidden=32, heads=4, kv_heads=4, ffn=64, vocabulary=128)
# One operation a second; nothing else takes time.
COMPUTE = mb.Rates(intra=math.inf, inter=math.inf, compute=1.0, backward=2.0)
CLUSTER = mb.Cluster(gpu("h100"), 4, 4, rates=COMPUTE)
RUN = mb.Settings(64, cp=4, intra=4)
FIXED = {"algorithm": "ring", "side": "kv", "head_chunks": 1, "ulysses": 1}


def computing(lengths, cut, run=RUN):
    return PackedForecast(MODEL, CLUSTER, FIXED, lengths, cut).timed(run).busy["compute"]


def test_rows_are_counted_with_the_padding_of_every_document():
    want = TrainingGoal(16, 1, documents=(5, 8, 3))
    assert want.rows(tp=1, cp=2) == 8 + 8 + 4
    assert want.rows(tp=2, cp=2) == 24  # 12 rows of a rank, 6 of a tensor-parallel one
    assert want.rows(tp=1, cp=1) == 16
    assert TrainingGoal(16, 1).rows(tp=1, cp=2) == 16


def test_padding_of_the_pack_attends_to_nothing():
    """Documents of 32 and 24 rows, pieces of 4 and 3; eight rows are left of 64."""
    pairs = 7 * 16 + 2 * 10 + 7 * 9 + 2 * 6
    assert computing((32, 24), "zigzag") == pytest.approx(3 * pairs * 2 * 4 * 16, rel=1e-12)


@pytest.mark.parametrize("lengths", [(32, 32), (30, 25)])
def test_every_rank_computes_its_pieces_of_every_document(lengths):
    """Two documents of 32 rows, eight pieces of 4: rank i has pieces i and 7 - i, which see 7 whole
    pieces and two triangles: 7 * 16 + 2 * 10 pairs. Two products of 8 columns, 4 heads, and twice
    that in backward."""
    pairs = 2 * (7 * 16 + 2 * 10)
    assert computing(lengths, "zigzag") == pytest.approx(3 * pairs * 2 * 4 * 16, rel=1e-12)


def test_one_document_is_a_sequence():
    """But for its plan, which packs make in every micro-batch."""
    plain = AttentionForecast(MODEL, CLUSTER, FIXED)
    sequence = plain.timed(plain.settled(RUN))
    pack = PackedForecast(MODEL, CLUSTER, FIXED, (64,), "zigzag").timed(RUN)
    assert replace(pack, planning=sequence.planning) == sequence


def test_a_bound_leaves_padding_of_documents_out():
    """Nine tokens are cut as sixteen over eight ranks, 45 pairs as 136."""
    forecast = PackedForecast(MODEL, CLUSTER, None, (9, 9), "zigzag")
    run = mb.Settings(32, cp=8, intra=4, algorithm="ring", side="kv")
    bound = forecast.at_least(MODEL, CLUSTER, run)
    assert bound.busy["compute"] == pytest.approx(3 * 2 * 45 * 2 * 4 * 16 / 8, rel=1e-12)
    assert bound.seconds <= forecast.timed(run).seconds


def test_advice_counts_tokens_without_padding_and_prints_what_such_packs_need():
    lengths = (1000,) * 65 + (536,)  # 64K; padded to 1,008 and 544 over 8 ranks
    found = mb.advise("llama3.2-1b", "h100", gpus=8, seq="64K", packed=lengths, layout="zigzag",
                      cp=8, tp=1, top=1)  # fmt: skip
    run, time = found.best.run, found.best.time
    assert run.seq == 65 * 1008 + 544
    assert time.tokens == found.want.seq * found.want.sequences
    assert found.search is not None
    assert found.search.attention.step(run) == time  # by which changes are compared with it
    flags = found.flags()
    assert {"--burst-layout zigzag", "--calculate-per-token-loss"} <= set(flags)
    assert not [flag for flag in flags if "--burst-pack" in flag]
    assert f"--seq-length {run.seq}" in " ".join(flags)
    assert "--sft, which pads" in found.job()
    assert found.fastest_rival is not None
    assert found.fastest_rival.run is not None
    assert found.fastest_rival.run.seq >= 64 * 1024
