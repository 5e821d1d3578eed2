"""Megatron's own kinds of context parallelism: bytes, rows and seconds worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

import megatron_burst as mb
from megatron_burst.autotune.gpus import gpu
from megatron_burst.plugins.tools.advise import advice, rivals
from megatron_burst.plugins.tools.advise.account.operators import LayerSizes
from megatron_burst.plugins.tools.advise.shapes import models

MODEL = mb.Model("tiny", layers=2, hidden=32, heads=4, kv_heads=4, ffn=64, vocabulary=128)
# One byte a second within a node; nothing else takes time.
LINKS = mb.Rates(intra=1.0, inter=math.inf, compute=math.inf)
CLUSTER = mb.Cluster(gpu("h100"), 4, 4, rates=LINKS)
RUN = mb.Settings(64, cp=4, intra=4)
KV = 16 * 4 * 8 * 2 * 2  # bytes of one rank's keys and values: rows, heads, width, both, bf16


def timed(kind, model=MODEL, cluster=CLUSTER, run=RUN):
    own = rivals.settings(kind, model, cluster, run)
    found = rivals.attention(kind, model, cluster, own)
    return found.forward, found.backward


def test_p2p_sends_whole_chunks_and_gradients_in_bf16():
    """Three hops of keys and values; in backward three more of their gradients, as large."""
    assert timed("p2p") == (3 * KV, pytest.approx(6 * KV))


def test_a2a_sends_three_quarters_of_four_tensors():
    """q, k, v there and out back; dout there and three gradients back: two pairs like k and v."""
    assert timed("a2a") == (2 * KV * 3 / 4, 2 * KV * 3 / 4)


def test_all_gather_gathers_twice_and_scatters_once():
    """Three ranks' chunks in forward; in backward they again, and the gradients of all."""
    assert timed("all_gather") == (3 * KV, 6 * KV)


def test_a2a_p2p_shares_heads_and_goes_round_the_rest():
    """Of 4 ranks 2 share heads where a node has 2: half of four tensors, then one hop of the other
    pair's keys and values, which take as many bytes on half the heads of twice the rows."""
    links = replace(LINKS, inter=1.0)
    two = mb.Cluster(gpu("h100"), 4, 2, rates=links)
    run = replace(RUN, intra=2)
    assert rivals.shared(MODEL, two, run) == 2
    assert timed("a2a+p2p", cluster=two, run=run) == (2 * KV / 2 + KV, pytest.approx(KV + 2 * KV))


@pytest.mark.parametrize(
    ("length", "cp", "rows"), [(1000, 4, 1000), (1001, 4, 1008), (1, 64, 128), (7, 1, 7)]
)
def test_documents_take_multiples_of_twice_the_ranks(length, cp, rows):
    assert rivals.padded(length, cp) == rows


def test_padding_makes_a_pack_longer():
    own = rivals.settings("p2p", MODEL, CLUSTER, RUN, (33, 30, 1))
    assert own.seq == 40 + 32 + 8


def test_pairs_are_the_triangles_of_the_documents():
    """Two documents on 2 ranks, as a dense matrix: pieces 0 and 3 of four, and 1 and 2."""
    dense = np.zeros((2, 2))
    for length in (8, 16):
        owner = np.repeat([0, 1, 1, 0], length // 4)
        for q in range(length):
            for k in range(q + 1):
                dense[owner[q], owner[k]] += 1
    assert rivals.pairs((8, 16), 2).tolist() == dense.tolist()
    assert rivals.pairs((100,), 2, window=10).sum() == pytest.approx(955)


def test_memory_by_hand():
    """p2p keeps the chunks and the results (bf16, and a sum of fp32 per row and head) of four
    steps; all_gather three halves of everyone's keys and values in forward, twice in backward."""
    x = LayerSizes.of(MODEL, RUN)
    out, lse = KV // 2, 16 * 4 * 4
    p2p = rivals.core("p2p", x, rivals.settings("p2p", MODEL, CLUSTER, RUN))
    assert (p2p.forward, p2p.backward) == (4 * (KV + out + lse), 4 * KV)
    gathered = rivals.core("all_gather", x, rivals.settings("all_gather", MODEL, CLUSTER, RUN))
    assert (gathered.forward, gathered.backward) == (1.5 * 4 * KV, 2 * 4 * KV)
    assert gathered.keys == 64


def test_what_megatron_does_not_run():
    h100 = mb.Cluster(gpu("h100"), 64)
    oss, run = models.named("gpt-oss-20b"), mb.Settings(2**17, cp=8)
    said = {kind: rivals.refused(kind, oss, h100, run) for kind in rivals.KINDS}
    assert said["a2a"] == ""
    assert all("windows" in said[kind] for kind in ("p2p", "a2a+p2p"))
    assert "sinks" in said["all_gather"]
    llama = models.named("llama3-8b")
    assert "CP 16" in rivals.refused("a2a", llama, h100, replace(run, cp=16))
    assert rivals.refused("a2a+p2p", llama, h100, replace(run, cp=16)) == ""
    assert "on a node, below CP 16" in rivals.refused(
        "a2a+p2p", llama, h100, replace(run, cp=16, tp=8)
    )
    hybrid = models.named("qwen3-next-80b-a3b")
    assert "16 heads" in rivals.refused("p2p", hybrid, h100, replace(run, cp=32))


def test_advice_ends_with_megatrons_own():
    """The four kinds at the sizes of the best run, and the fastest that fits at its own: no slower
    than any of the four that fits."""
    found = advice.advise("llama3-8b", "h100", gpus=8, seq="128K", top=1, cp=4, tp=2)
    assert [each.kind for each in found.rivals] == list(rivals.KINDS)
    assert all(each.fits and each.time for each in found.rivals)
    best = found.fastest_rival
    assert best is not None
    assert best.fits
    assert best.time is not None
    assert best.time.seconds <= min(each.time.seconds for each in found.rivals if each.time)
    # Megatron's logits are whole and its results of all steps stay: more memory than ours.
    assert min(each.bytes for each in found.rivals) > found.best.account.peak.bytes


def test_sparse_attention_launches_gathers_and_two_calls():
    """Index keys and latents gathered, keys selected, attention; in backward one call fewer."""
    named, cluster = models.named("deepseek-v3.2"), mb.Cluster("h100", 8, 8)
    run = rivals.settings("all_gather", named, cluster, mb.Settings(8192, cp=8, intra=8))
    found, host = rivals.attention("all_gather", named, cluster, run), cluster.host_time
    there = host.start + 2 * host.call + 2 * host.exchange
    assert found.host == pytest.approx((there, there))  # backward's calls take twice as long
