"""FPDT's table: how many cells the account meets, and what decides a cell, by hand."""

import pytest

from benchmarks.advise import fpdt
from megatron_burst.tools.advise.account.memory import account

K = 1024


def test_as_many_cells_are_met_as_the_page_says():
    found = fpdt.counts(fpdt.cells())
    assert found["filled"][1] == 23
    assert found["-"][1] == 17
    assert found["filled"][0] >= 21
    assert found["-"][0] >= 15


@pytest.mark.parametrize(
    ("published", "length", "right"),
    [("-", 0, True), ("-", 64 * K, False), ("8M+", 4096 * K, True), ("8M+", 3072 * K, False),
     ("1M", 512 * K, True), ("1M", 2048 * K, True), ("1M", 256 * K, False),
     ("3M", 1024 * K, False), ("512K", 0, False)],
)  # fmt: skip
def test_what_counts_as_met(published, length, right):
    assert fpdt.Cell("8B", "4 x 40g", published, length, "").right is right


def test_states_and_host_by_hand():
    """2.7B on 4 GPUs: 16 bytes of each parameter shared by 4, two layers and gradients of one
    whole; the input of every layer, one layer's q, k, v, out and its gradient on the host."""
    model = fpdt.MODELS["2.7B"]
    seq, rows = 1024 * K, 256 * K
    found = account(model, fpdt.run_of(model, 4, seq), every=False)
    states = sum(found.states.values())
    assert states == pytest.approx(16 * model.parameters / 4, rel=1e-6)
    assert found.peak.items["gathered weights"] == (2 + 1) * 12 * 2560**2 * 2
    chunks = 5 * rows * 2560 * 2 * (1 - 2 / 16)
    assert found.host_bytes == pytest.approx(32 * rows * 2560 * 2 + chunks, rel=1e-6)
