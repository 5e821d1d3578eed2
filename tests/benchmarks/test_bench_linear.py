"""benchmarks/linear: formulas by hand, what is right, a tiny run on four ranks, tables."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.cluster.mail import LINKS
from benchmarks.cluster.network import Network, Rates
from benchmarks.linear import bench, exchange, maps, measure, simulated, tables
from benchmarks.linear.settings import (
    ALGORITHMS,
    ALL_TO_ALL,
    CONVOLUTION,
    FORMS,
    GATHER,
    LAYOUTS,
    Setting,
    refusal,
    settings,
)
from megatron_burst.layout import chains, make
from megatron_burst.schedule.scans import SCANS
from megatron_burst.schedule.scans.hops import Task
from megatron_burst.schedule.scans.sizes import ScanSizes
from megatron_burst.schedule.scans.timing import Links
from megatron_burst.schedule.topology import Topology

ROOT = Path(__file__).parents[2]
TINY = {"heads": 4, "width": 8, "tokens": 16}


def test_scans_send_a_small_share_of_an_all_to_all():
    """Sixteen heads of 128, two nodes of four; 4K tokens a rank, then 64K."""
    topology, state = Topology(8, 4), ScanSizes(1, 16, 128, 128, "scalar")
    each = simulated.HeadwiseRowBytes(3 * 16 * 128 * 2, 16 * 128 * 2)
    hops = SCANS["scan"](Task(chains(make("contiguous", cp_size=8), 32), topology, 8))
    scan, sent = state.sent(hops, 8, topology).sum(axis=1).max(), simulated.exchange_sent
    assert sent(topology, 4096, each) == (4096 * 16384 * 3 // 8, 4096 * 16384 // 2)
    assert scan == 2**20
    assert scan / sum(sent(topology, 4096, each)) < 0.018
    assert scan / sum(sent(topology, 65536, each)) < 0.0012


def test_an_all_to_all_by_hand():
    """Four ranks on two nodes, 10 rows of 40 and 8 bytes: shares of 100 and 20 bytes."""
    links, each = Links(100.0, 10.0, 1.0, 2.0), simulated.HeadwiseRowBytes(40, 8)
    assert simulated.exchange_seconds(Topology(4, 2), 10, each, links) == 2 * (12 + 4)
    found = simulated.exchange_seconds(Topology(4, 4), 10, each, links)
    assert found == pytest.approx(3 * (2 + 1.2))
    assert simulated.exchange_sent(Topology(4, 2), 10, each) == (120, 240)


def test_the_all_to_all_sends_what_megatrons_layers_exchange():
    """GatedDeltaNet: q, k, v and z of 16 heads x 128, alpha and beta of each head; then the output.
    Mamba-2: z and x, B and C of 8 groups, dt of each head."""
    assert Setting("matrix", "zigzag").exchanged(8) == (
        (4 * 2048 + 32) * 2 * 4096 // 8, 2048 * 2 * 4096 // 8,
    )  # fmt: skip
    assert Setting("scalar", "zigzag").exchanged(8)[0] == (2 * 2048 + 2 * 1024 + 16) * 1024
    assert [Setting(form, "zigzag").convolved for form in FORMS] == [2048 + 2048, 0, 3 * 2048]
    assert Setting("vector", "zigzag").state_bytes == 1 << 20
    assert Setting("matrix", "zigzag").transition_bytes == 1 << 20


def test_few_heads_are_not_shared():
    small = Setting("matrix", "zigzag", 4, 64)
    assert refusal(small, ALL_TO_ALL, 8) == "8 ranks cannot share 4 heads"
    assert refusal(small, GATHER, 8) is None
    assert refusal(Setting("vector", "zigzag"), CONVOLUTION, 8) == "the layer has none"
    assert {s.layout for s in settings(quick=False)} == set(LAYOUTS)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", FORMS)
def test_the_truth_is_that_of_autograd(form, layout):
    """The states of all ranks in the order of the chain are one recurrence; so are gradients."""
    setting, size = Setting(form, layout, heads=2, width=3, tokens=8), 3
    chain = maps.chains_of(setting, size)
    shares = [maps.share(setting, size, rank) for rank in range(size)]
    order = np.argsort(np.concatenate([chain.of(rank) for rank in range(size)]))

    def whole(parts):
        return torch.cat(list(parts))[torch.from_numpy(order)].double()

    a, b, upstream = (whole(share[i] for share in shares) for i in range(3))
    a.requires_grad_(), b.requires_grad_()
    state, entering = torch.zeros_like(b[0]), []
    for i in range(len(chain)):
        entering.append(state)
        state = maps.apply(a[i], state) + b[i]
    out = torch.stack(entering)
    grads = torch.autograd.grad(out, (a, b), upstream)
    for x, i in zip((out, *grads), range(3), strict=True):
        torch.testing.assert_close(whole(share.truth[i] for share in shares), x)


class Quiet(Network):
    """Two nodes of two; a network that counts nothing."""

    def sent_from_here(self, rank):
        return {"intra": 0, "inter": 0}


def all_rivals(settings):
    """On a rank: what every rival of some settings costs and gives."""
    state = {
        "rank": torch.distributed.get_rank(),
        "network": Quiet(2, 2, Rates(1, 1)),
        "module": None,
    }
    found = []
    for setting in settings:
        measure.load(state, setting)
        names = bench.rivals(setting, 4)
        works = {n: measure.prepare(state, n, None) for n in names}
        found.append({n: (work, measure.timed(state, n)) for n, work in works.items()})
    return found


@pytest.fixture(scope="module")
def tiny(ranks):
    todo = [Setting(form, layout, **TINY) for form in FORMS for layout in LAYOUTS]
    return todo, ranks(4).run(all_rivals, todo, timeout=120)


def test_every_rival_is_right_and_sends_what_the_formula_says(tiny):
    todo, found = tiny
    for index, setting in enumerate(todo):
        assert set(found[0][index]) >= {ALL_TO_ALL, GATHER, *ALGORITHMS}
        for name in found[0][index]:
            for rank in range(4):
                work, run = found[rank][index][name]
                assert run.error <= measure.TOLERANCE, (setting, name, run.error)
                both = {link: sum(work.bytes[p][link] for p in work.bytes) for link in LINKS}
                sent = [sum(work.sent[p][to] for p in work.sent) for to in range(4)]
                assert both["intra"] == sum(sent[2 * (rank // 2) : 2 * (rank // 2) + 2])
                assert both["inter"] == sum(sent) - both["intra"]
                assert run.counted == (both if name in (*ALGORITHMS, CONVOLUTION) else None)
        assert found[0][index][ALL_TO_ALL][0].says == exchange.TORCH


def test_the_ring_sends_a_state_from_rank_to_rank(tiny):
    """Contiguous: each rank one state to the next, there, and back to the one before."""
    todo, found = tiny
    setting = Setting("matrix", "contiguous", **TINY)
    sent = [each[todo.index(setting)]["ring"][0].sent for each in found]
    one = setting.state_bytes
    assert [s["forward"] for s in sent] == [[0, one, 0, 0], [0, 0, one, 0], [0, 0, 0, one], [0] * 4]
    assert [s["backward"] for s in sent] == [
        [0] * 4,
        [one, 0, 0, 0],
        [0, one, 0, 0],
        [0, 0, one, 0],
    ]


def record(form="matrix", heads=16, names=(ALL_TO_ALL, GATHER, *ALGORITHMS)):
    seconds = dict(zip((ALL_TO_ALL, GATHER, *ALGORITHMS), (8, 4, 3, 2, 1, 5, 1.5), strict=True))
    return {
        "setting": Setting(form, "contiguous", heads)._asdict(), "grid": [2, 4],
        "rivals": [
            {"name": name, "says": "x",
             "seconds": [{"forward": s / 2, "backward": s / 2}, {"forward": s, "backward": s}],
             "bytes": {"intra": {"formula": 8 << 20, "kernel": 9 << 20}, "inter": {
                 "formula": 0, "kernel": 5}}}
            for name, s in seconds.items() if name in names
        ],
    }  # fmt: skip


def test_a_number_that_is_none_is_an_error():
    nan = torch.tensor([float("nan")])
    assert not measure.worst_error((nan, nan + 1), (torch.ones(1), torch.ones(1))) <= 1.0
    assert not measure.worst_error((torch.ones(1), nan), (torch.ones(1),) * 2) <= 1.0
    assert measure.worst_error((torch.full((1,), 0.5),), (torch.zeros(1),)) == 0.5


def test_tables_of_what_was_measured():
    """Ratios are of the same round; headers: 9 MiB counted for 8."""
    records = [record(), record("scalar", 4, (GATHER, *ALGORITHMS))]
    text = tables.cluster(records)
    assert "| 0.19 (0.19 to 0.19)" in text  # auto over the all-to-all
    assert "| 4.00 (4.00 to 4.00)" in text  # the gather over scan
    assert "`auto` over the fastest of our algorithms: 1.500 to 1.500." in text
    assert "| 1.00 + 0.00 | 12.5 %" in text
    assert "- matrix, contiguous, 16 heads of 128: scan: x, two_level: x, auto: x" in text


@pytest.mark.slow
def test_quick_mode_measures_on_the_emulated_cluster(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = ["--quick", "--parts", "cluster", "--repeats", "1", "--out", str(tmp_path)]
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.linear", *words], cwd=ROOT, env=environment,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    if run.returncode == 2:
        pytest.skip(run.stderr.strip())
    assert run.returncode == 0, run.stderr
    assert "| matrix, contiguous | 16 of 128 |" in run.stdout
