"""`megatron-burst calibrate`: fits, derived figures, and whole runs on CPU ranks."""

import math
from statistics import median
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import Ranks

import megatron_burst as mb
from megatron_burst.autotune import cluster_file, clusters, gpus, measure
from megatron_burst.autotune.host_time import ASSUMED
from megatron_burst.autotune.places import Nodes
from megatron_burst.autotune.rates import Rates
from megatron_burst.cli.main import main
from megatron_burst.plugins.tools.advise.settings import Settings
from megatron_burst.plugins.tools.advise.simulate import simulate
from megatron_burst.plugins.tools.calibrate import kernels, links, ranks
from megatron_burst.plugins.tools.calibrate.ranks import Measurement
from megatron_burst.schedule.topology import Topology

# --- what is concluded from what was timed ---------------------------------------------------


def test_a_figure_is_the_median_and_half_the_middle_half():
    """The middle half of 1, 2, 3, 4, 5 is from 2 to 4."""
    one = ranks.repeated([5.0, 1.0, 4.0, 2.0, 3.0], "by hand")
    assert one == (3.0, pytest.approx(1 / 3), "by hand; median of 5")
    assert one.note == "by hand; median of 5; spread 33.3%"
    assert ranks.middle([[1.0, 10.0], [3.0, 20.0], [2.0, 60.0]]) == [2.0, 20.0]
    assert ranks.worst([[1.0, 10.0], [3.0, 20.0], [2.0, 60.0]]) == 2.0


@pytest.mark.parametrize("half", [0.0, 300.0])
def test_the_fit_finds_what_was_planted(half):
    """100 TFLOP/s, 20 us per call, a backward 2.9 times a forward, with the formula of `Rates`."""
    rows = [8, 1024, 2048, 4096, 8192]
    flops = [4.0 * 32 * 128 * r**2 for r in rows]
    there = np.array([20e-6 + f / 1e14 * (1 + half / r) for r, f in zip(rows, flops, strict=True)])
    there[0] = 20e-6
    back = 20e-6 + 2.9 * (there - 20e-6)
    fit = kernels.fitted(rows, flops, there, back)
    assert fit.compute == pytest.approx(1e14, rel=1e-6)
    assert fit.half_rows == pytest.approx(half, abs=1e-3)
    assert fit.launch == pytest.approx(20e-6)
    assert fit.backward == pytest.approx(2.9)
    assert fit.off < 1e-6


def test_small_tiles_that_are_faster_are_no_negative_rows():
    rows = [8, 100, 200, 400]
    flops = [float(r**2) for r in rows]
    there = np.array([0.0, 0.8e4, 0.9 * 4e4, 16e4])
    fit = kernels.fitted(rows, flops, there, there * 2)
    assert fit.half_rows == 0
    assert 0.8 < 1 / fit.compute < 1
    assert 0 < fit.off < 0.2


@pytest.mark.parametrize(
    ("title", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA A100-SXM4-40GB", "a100-40g"),
        ("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA A800-SXM4-80GB", "a800"),
        ("NVIDIA H200", "h200"), ("NVIDIA B200", "b200"), ("NVIDIA GB200", "gb200"),
        ("NVIDIA H100 PCIe", None), ("NVIDIA H100 NVL", None), ("NVIDIA GH200 480GB", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)  # fmt: skip
def test_what_cuda_calls_a_gpu(title, name):
    assert gpus.of_device(title) == (None if name is None else gpus.GPUS[name])


class Two:
    """Ranks of two nodes with four ranks each, with the attributes that `links` reads."""

    def __init__(self, rank=0):
        self.size, self.per_node, self.nodes = 8, 4, 2
        self.node, self.local = divmod(rank, 4)
        self.groups = self
        self.rank, self.topology = rank, Topology(8, 4)
        self.ring = self.ulysses = None


def test_whom_a_rank_exchanges_with():
    """A rank sends to the next rank and receives from the previous one."""
    assert links.around(Two(5), "intra") == ((6, 4),)
    assert links.around(Two(7), "intra") == ((4, 6),)
    assert links.around(Two(6), "inter", [0, 2]) == ((2, 2),)
    assert links.around(Two(5), "inter", [0, 2]) == []


def test_nics_that_are_shared(monkeypatch):
    """10 GB/s alone; local ranks 0 and 1 share one NIC, and all four ranks share two."""
    asked = []

    def rate(seen, what, pairs, size, latency):
        asked.append(pairs)
        return Measurement(5e9 if len(asked) == 1 else 10e9, 0.0, "")

    monkeypatch.setattr(links, "_rate", rate)
    found, nic_of = links._nics(Two(), 0.5, 1, 10e9, Measurement(0.0, 0.0, ""))
    assert found.value == 2
    assert "shares its NIC with 1 of 3 ranks" in found.method
    assert len(asked) == 3
    assert nic_of == "neighbours"
    asked.clear()
    monkeypatch.setattr(links, "_rate", lambda *of: rate(*of)._replace(value=(
        5e9 if len(asked) == 2 else 10e9)))  # fmt: skip
    found, nic_of = links._nics(Two(), 0.5, 1, 10e9, Measurement(0.0, 0.0, ""))
    assert "shares its NIC with 2 of 3 ranks" in found.method
    assert nic_of == "stride"


def test_what_crosses_from_inner_rings(monkeypatch):
    """The last two of four ranks of a node; a ring of all four is measured before."""
    asked = []
    monkeypatch.setattr(links, "around", lambda ranks, link, members: asked.append([*members]))
    monkeypatch.setattr(links, "_rate", lambda *of: Measurement(11.4e9, 0.0, ""))
    warned = []
    monkeypatch.setattr(Two, "report", lambda ranks, words: warned.append(words), raising=False)

    def said(nics, nic_of, nic=None):
        """20 GB/s alone, and 22 of a NIC that two share."""
        rates = Rates(math.inf, 20e9, nic=nic)
        nodes = Nodes(4, nics, nic_of=nic_of)
        return links._by_inner_size(Two(), 1, Measurement(0.0, 0.0, ""), nodes, rates)

    words = "the last 2 ranks of a node get 1.14e+10 each (forecasts: {})"
    assert said(2, "neighbours", 22e9) == words.format("1.1e+10")
    assert (asked, warned) == ([[2, 3]], [])
    assert said(2, "stride", 22e9) == words.format("2e+10")  # by two NICs, each alone
    assert said(4, "neighbours") == words.format("2e+10")
    assert len(warned) == 2
    assert warned[0].startswith(words.format("2e+10"))


# --- ranks -----------------------------------------------------------------------------------


def one_that_fails():
    groups = mb.Groups.flat(dist.group.WORLD)
    here = ranks.Ranks(groups, torch.device("cpu"), 0.01)

    def measure():
        if here.groups.rank == 1:
            raise RuntimeError("out of memory\nand more")
        return [1.0]

    try:
        return here.locally("attention", measure)
    except ValueError as error:
        return str(error)


def slowest_counts():
    here = ranks.Ranks(mb.Groups.flat(dist.group.WORLD), torch.device("cpu"), 1e9)
    took = here.rounds(lambda: 1.0 + here.groups.rank)
    own = here.locally("own", lambda: [float(here.groups.rank), 5.0])
    return took, own


@pytest.mark.world_size(2)
def test_what_one_rank_cannot_is_said_on_all(ranks):
    words = ranks(2).run(one_that_fails)
    assert set(words) == {"rank 1: attention: RuntimeError: out of memory"}
    for took, own in ranks(2).run(slowest_counts):
        assert took == [2.0] * 25
        assert own == [[0.0, 5.0], [1.0, 5.0]]


# --- whole runs ------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path):
    """Return `run(world, word, ...)`, the command on ranks as torchrun starts them."""
    server = Ranks(tmp_path, [])
    yield lambda world, *words: server.run(world, words, command=["calibrate"])
    server.close()


def sane(cluster):
    """Check bounds for any CPU under any load, in GFLOP/s and GB/s."""
    rates = cluster.rates
    assert 1e8 < rates.compute < 1e14
    assert 1e8 < cluster.gpu.peak < 1e14
    assert 0 < cluster.gpu.linear <= 1
    assert 0 < cluster.gpu.attention <= 1
    assert 1 < rates.backward < 20
    assert 0 <= rates.launch < 0.1
    assert 0 <= rates.half_rows < 1e4
    assert 1e7 < cluster.gpu.memory_rate < 1e13
    assert 1e6 < cluster.host_rate < 1e12
    assert cluster.host_memory > 2**20
    assert cluster.gpu.memory > 2**20


def test_two_nodes_of_two(run, tmp_path):
    """Four ranks as torchrun starts them; the step-time model accepts the file."""
    path = tmp_path / "mine.toml"
    done = run(4, "--out", str(path), "--minutes", "0.02", "--per-node", "2")
    assert done.codes == [0] * 4, done.texts[0]
    cluster = cluster_file.read(path)
    sane(cluster)
    rates = cluster.rates
    assert (cluster.gpus, cluster.per_node) == (4, 2)
    for rate in (rates.intra, rates.inter, rates.copying, rates.adding):
        assert 1e5 < rate < 1e12
    assert rates.adding <= cluster.gpu.memory_rate
    assert cluster.nic_rate == rates.inter
    assert cluster.nics in (1, 2)
    assert 0 < rates.latency < 1
    assert 0 < rates.posting < 1
    assert 0 <= rates.slowdown < 100
    host = cluster.host_time
    for figure in (host.call, host.exchange, host.layer):
        assert 1e-6 < figure < 0.1
    assert 0 <= host.start < 0.1
    assert 1e-4 < host.plan < 1
    assert host.plan != ASSUMED.plan
    assert rates.exchange == 1.0  # two ranks of a node: as a hop
    assert cluster.described.startswith("measured: mine.toml of 20")
    assert "CPU ranks: 2 per node x 2 nodes" in cluster.described
    text = path.read_text()
    assert text.count("median of") >= 6
    assert "NOT MEASURED" not in text
    run = Settings(seq=4096, cp=4, micro_batches=1)
    small = mb.Model("small", 2, 256, 8, 4, 512, 1024)
    advice = mb.advise(small, path, seq=4096, tokens_per_step=16384)
    assert advice.cluster == cluster
    assert 0 < advice.ranked[0].time.mfu <= 1
    step = simulate("llama3-8b", cluster, run)
    call = simulate("llama3-8b", cluster, run, part="attention")
    assert 0 < call.seconds < step.seconds < 1e6
    # Half of the pairs of 4096 tokens are visible, on 4 ranks, at the rate that was measured.
    forward = 4 * 32 * 128 * 4096**2 / 2 / 4 / rates.compute
    assert call.forward > forward


def test_alone(tmp_path, capsys):
    """One process: figures that it cannot measure are no limit, and are listed."""
    path = tmp_path / "alone.toml"
    assert main(["calibrate", "--out", str(path), "--minutes", "0.02"]) == 0
    cluster = cluster_file.read(path)
    sane(cluster)
    assert cluster.rates.intra == cluster.rates.inter == float("inf")
    assert path.read_text().count("NOT MEASURED") == 4  # links, exchange, plan
    told = capsys.readouterr()
    assert "links within a node" in told.err
    assert "links between nodes" in told.err
    assert told.out == ""
    assert not dist.is_initialized()


@pytest.mark.slow
def test_all_ranks_end_alike(run, tmp_path):
    done = run(2, "--out", str(tmp_path / "no" / "x.toml"))
    assert 0 not in done.codes
    said = f"megatron-burst calibrate: error (all ranks): rank 0: --out {tmp_path}"
    assert "".join(done.texts).count(said) == 1


def test_repeats_are_counted(monkeypatch):
    """At least 5 repeats, more while there is time, at most 25; the first does not count."""
    took = iter([9.0] + [1.0] * 100)
    monkeypatch.setattr(ranks, "seconds", lambda call, device: next(took))
    here = ranks.Ranks(None, torch.device("cpu"), 7.5)
    assert here.repeats(lambda: None) == [1.0] * 8
    assert median(ranks.Ranks(None, torch.device("cpu"), 0.0).repeats(lambda: None)) == 1.0
    assert len(ranks.Ranks(None, torch.device("cpu"), 0.0).repeats(lambda: None)) == 5
    assert len(ranks.Ranks(None, torch.device("cpu"), 1e9).repeats(lambda: None)) == 25


def test_traffic_begins_on_an_idle_device_and_before_the_clock(monkeypatch):
    order = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            order.append("clock")

        def elapsed_time(self, end):
            return 2000.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: order.append("idle"))
    device = torch.device("cuda")
    took = measure.seconds(lambda: order.append("call"), device, lambda: order.append("traffic"))
    assert took == 2.0
    assert order == ["idle", "traffic", "clock", "call", "clock", "idle"]


def test_what_a_tile_adds_is_not_its_compute():
    """Results of 4 heads of 8 columns and gradients of 2 key heads are added in fp32."""
    model, rows = mb.Model("small", 1, 32, 4, 2, 64, 64, head_dim=8), np.array([8, 16])
    ranks = mock.Mock(device=torch.device("cpu"), cuda=False)
    there, back = kernels._adding(ranks, model, rows, rate=1e6).T
    assert there == pytest.approx(rows * 4 * 8 * 12 / 1e6)
    assert back == pytest.approx(rows * (4 * 8 + 2 * 16) * 12 / 1e6)


def test_a_call_that_takes_less_than_adding_its_results():
    """As on a busy machine: a tenth of the measured time counts, so that the fit has a solution."""
    model = mb.Model("small", 1, 32, 4, 2, 64, 64, head_dim=8)
    count = 1 + len(kernels.CHUNKS["cpu"])
    ranks = mock.Mock(device=torch.device("cpu"), cuda=False)
    ranks.locally.return_value = [[1e-3] * 2 * count + [0.0] * 2 * count]
    found = kernels.attention(ranks, model, rate=1.0)  # a byte per second: adding takes minutes
    (free,) = (kernels.attention(ranks, model, rate=1e300),)
    for name in ("compute", "half_rows", "backward"):
        assert math.isfinite(found[name].value), name
    assert found["compute"].value == pytest.approx(10 * free["compute"].value)


def test_adding_is_capped_as_memory_is():
    """A cluster file may state more than the memory rate, or nothing, which stays unset."""
    h100 = clusters.GPUS["h100"]
    for given, used in ((9e12, h100.memory_rate), (1e12, 1e12), (math.inf, math.inf)):
        found = clusters.Cluster(h100, 8, rates=Rates(1e9, 1e9, adding=given)).rank_rates()
        assert found.adding == used
    assert clusters.Cluster(h100, 8).rank_rates().adding == math.inf
