"""Keys of other ranks in host memory between row chunks, as `advise` and `memory` forecast them:
bytes and times by hand."""

from dataclasses import replace

import pytest

import megatron_burst as mb
from megatron_burst.autotune.clusters import Cluster
from megatron_burst.autotune.host_time import HostTime
from megatron_burst.plugins.tools.advise.account.memory import account
from megatron_burst.plugins.tools.advise.forecast.attention_time import attention_time
from megatron_burst.plugins.tools.advise.forecast.layer_time import layer_time
from megatron_burst.plugins.tools.advise.search.attention_choice import AttentionForecast
from megatron_burst.plugins.tools.advise.settings import Settings
from megatron_burst.plugins.tools.advise.shapes.model import Model

K = 1024
MODEL = Model("small", 4, 1024, 8, 2, 4096, 32000)
NODES = Cluster("h100", 8, 8, host_time=HostTime(0.0, 0.0, 0.0, 0.0))
RUN = Settings(
    256 * K, cp=8, algorithm="ring", side="query", sequence_chunks=4, mlp_tiles=4, offload=1.0
)
# A row's key and value: 2 heads of 128, in bf16.
ROW = 2 * 2 * 128 * 2
SHARD = 256 * K // 8


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({}, True),
        ({"offload": 0.1}, True),
        ({"offload": 0.0}, False),
        ({"sequence_chunks": 1}, False),
        ({"algorithm": "tile"}, False),
        ({"algorithm": "hybrid", "ulysses": 2}, True),
        ({"algorithm": "ulysses", "ulysses": 8}, False),
    ],
)
def test_which_runs_keep_keys_on_the_host(fields, kept):
    assert replace(RUN, **fields).keys_on_host is kept


def test_host_memory_has_the_keys_of_one_layer():
    """Inputs of four layers, and keys and values of seven ranks."""
    found = account(MODEL, RUN).host
    assert found["keys of other ranks"] == 7 * SHARD * ROW
    assert found["layer inputs and store"] == 4 * SHARD * 1024 * 2
    assert "keys of other ranks" not in account(MODEL, replace(RUN, algorithm="tile")).host


def test_windows_keep_the_rows_that_they_see():
    """Zigzag: 1,023 rows before each of two pieces."""
    windows = replace(MODEL, pattern="WWWW", window=K)
    assert account(windows, RUN).host["keys of other ranks"] == 2 * 1023 * ROW
    mixed = replace(MODEL, pattern="WWFW", window=K)
    assert account(mixed, RUN).host["keys of other ranks"] == 7 * SHARD * ROW


def test_a_slow_ring_sends_keys_once():
    """Links between ranks are slow and those to the host fast: forward takes a quarter."""
    rates = mb.Rates(1e8, 1e8, compute=1e15)
    slow = replace(NODES, rates=rates, host_rate=1e15)
    once, again = (
        attention_time(MODEL, slow, replace(RUN, offload=offload)) for offload in (1.0, 0.0)
    )
    sent = 7 * SHARD * ROW / 1e8
    assert once.forward == pytest.approx(sent, rel=0.02)
    assert again.forward == pytest.approx(4 * sent, rel=0.02)
    assert once.backward == again.backward


def test_a_slow_host_fetches_keys_for_every_later_chunk():
    """The other way round: three chunks wait for the keys of seven ranks, and the copies out take
    as long as one fetch."""
    slow = replace(NODES, rates=mb.Rates(1e15, 1e15, compute=1e18), host_rate=1e8)
    fetch = 7 * SHARD * ROW / slow.link
    assert attention_time(MODEL, slow, RUN).forward == pytest.approx(3 * fetch, rel=0.02)
    inputs = SHARD * 1024 * 2 / slow.link
    layer = layer_time(MODEL, slow, RUN)
    assert layer.forward["attention"] == pytest.approx(3 * fetch, rel=0.02)
    # Copies out of keys and inputs run beside these fetches.
    assert inputs < fetch
    assert "host link" not in layer.forward
    fewer = layer_time(MODEL, slow, replace(RUN, offload=0.0))
    assert fewer.forward.total < fetch


def test_a_search_knows_both():
    """Runs that differ in offload alone are remembered apart."""
    forecast = AttentionForecast(MODEL, replace(NODES, rates=mb.Rates(1e8, 1e8, compute=1e15)))
    both = [
        forecast.time(MODEL, NODES, replace(RUN, offload=offload)).forward for offload in (1.0, 0.0)
    ]
    assert both[0] < both[1] / 2
