"""Cluster files: what is written is read back, and what is wrong in one is said at once."""

import dataclasses
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_burst.autotune import cluster_file, clusters
from megatron_burst.autotune.host_time import HostTime
from megatron_burst.autotune.rates import Rates

ABOVE = st.floats(1e-300, 1e300)
FROM_0 = st.floats(0, 1e300)
FRACTION = st.floats(1e-300, 1)
WORDS = st.text(max_size=20)


def gpus():
    return st.builds(
        clusters.Gpu, WORDS, st.integers(2**40 + 1, 2**50), ABOVE, ABOVE, WORDS, ABOVE, ABOVE,
        FRACTION, FRACTION, ABOVE, FROM_0,
    )  # fmt: skip


def rates():
    positive = ABOVE | st.just(math.inf)
    return st.builds(
        Rates, positive, positive, FROM_0, st.none() | positive, FROM_0, FROM_0, ABOVE, FROM_0,
        FROM_0, FRACTION, st.none() | ABOVE, FROM_0, FROM_0, positive,
        FROM_0,
    )  # fmt: skip


@st.composite
def measured(draw):
    per_node = draw(st.integers(1, 72))
    gpu = draw(gpus() | st.sampled_from(list(clusters.GPUS.values())))
    return clusters.Cluster(
        gpu,
        per_node * draw(st.integers(1, 512)), per_node, draw(st.integers(0, 16)), draw(FROM_0),
        draw(st.none() | rates()), draw(WORDS), draw(st.integers(0, 2**50)),
        draw(st.integers(0, min(2**40, gpu.memory - 1))), draw(FROM_0), draw(FROM_0), draw(ABOVE),
        draw(FRACTION),
        HostTime(*(draw(FROM_0) for _ in range(5))),
    )  # fmt: skip


@given(measured(), WORDS)
def test_a_file_is_read_back(tmp_path_factory, cluster, note):
    path = tmp_path_factory.getbasetemp() / "cluster.toml"
    cluster_file.write(cluster, path, {"links.intra": note, "host.rate": note})
    assert cluster_file.read(path) == cluster


def file(tmp_path, text):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return path


def test_a_gpu_of_the_table_needs_its_name_only(tmp_path):
    path = file(tmp_path, '[cluster]\ngpus = 16\n[gpu]\nname = "a800"\nmemory_rate = 1_900e9\n')
    found = cluster_file.read(path)
    assert found == clusters.Cluster(replace(clusters.GPUS["a800"], memory_rate=1.9e12), 16)
    assert (found.nics, found.nic_rate, found.rates) == (8, 25e9, None)


def test_a_gpu_of_the_table_in_any_case(tmp_path):
    found = cluster_file.read(file(tmp_path, '[cluster]\ngpus = 8\n[gpu]\nname = "H100"\n'))
    assert found == clusters.Cluster("h100", 8)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    for path in (tmp_path, tmp_path / "none.toml"):
        with pytest.raises(ValueError, match=f"^{path}: cannot be read: "):
            cluster_file.read(path)


def test_memory_that_the_reserve_takes_all_of():
    small = replace(clusters.GPUS["h100"], memory=4 * 2**30)
    with pytest.raises(ValueError, match="--gpu-memory 4 GiB: --reserve 4 GiB leaves no memory"):
        clusters.Cluster(small, 8)
    assert clusters.Cluster(small, 8, reserve=0).room == 4 * 2**30


def test_whole_numbers_are_numbers(tmp_path):
    path = file(
        tmp_path,
        '[cluster]\ngpus=1\n[gpu]\nname="h100"\n[links]\nintra=400_000_000_000\ninter=inf\n',
    )
    found = cluster_file.read(path).rates
    assert found == Rates(4e11, math.inf)
    assert isinstance(found.intra, float)


def test_all_that_is_wrong_is_said_at_once(tmp_path):
    path = file(
        tmp_path,
        'gpus = 3\n[gpu]\nname = "mine"\npeak = "fast"\nmemory = 8e10\nsource = ""\nlaunch = true\n'
        "[links]\nlatancy = 1e-6\n[hosts]\n",
    )
    with pytest.raises(ValueError, match=r"mine\.toml: ") as raised:
        cluster_file.read(path)
    for part in (
        "gpu.memory must be an integer, got 80000000000.0",
        "gpu.peak must be a number, got 'fast'",
        "gpu.launch must be a number, got True",
        "links.latancy is unknown; keys of [links]: nvlink, nics",
        "[hosts] is unknown; sections: cluster, gpu, links, host",
        "[gpus] is unknown",
        "cluster.gpus is missing",
        "links.intra is missing",
        "host.link is missing; a GPU without published figures requires it",
    ):
        assert part in str(raised.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[cluster]\ngpus=8\n[gpu]\nname="h100"\n[host]\nupdate=0.0\n', "host_update 0.0 must"),
        ("[gpu", "not a TOML file"),
        ('[cluster]\ngpus=9\n[gpu]\nname="h100"\n', "--gpus 9 is not a multiple of --per-node"),
        ('[cluster]\ngpus=8\n[gpu]\nname="h100"\nlinear=7.0\n', "linear must be a fraction"),
        ('[cluster]\ngpus=8\n[gpu]\nname="h100"\n[links]\nnic_rate=-1\n', "nic_rate -1"),
        ('[cluster]\ngpus=8\n[gpu]\nname="h100"\n[links]\nintra=nan\ninter=1\n', "intra must be"),
    ],
)
def test_a_bad_file_is_named(tmp_path, text, said):
    with pytest.raises(ValueError, match=r"mine\.toml: ") as raised:
        cluster_file.read(file(tmp_path, text))
    assert said in str(raised.value)


def test_how_a_figure_was_found_is_beside_it(tmp_path):
    cluster = clusters.Cluster("h100", 8, rates=Rates(3e11, math.inf))
    written = cluster_file.text(cluster, {"links.intra": "median of 9,\nspread 2 %"})
    assert "intra = 300000000000.0  # bytes/s of a rank" in written
    assert "one way; median of 9, spread 2 %\n" in written


def test_a_cluster_by_name():
    assert clusters.Cluster("H100", 8).gpu is clusters.GPUS["h100"]
    with pytest.raises(ValueError, match="h99: unknown; use one of a100-40g, "):
        clusters.Cluster("h99", 8)


def test_what_nobody_measured_is_published_and_says_so():
    """Of 450 GB/s of NVLink and 50 GB/s of a NIC, by hand; 0.65 of 989 TFLOP/s."""
    cluster = clusters.Cluster("h100", 16)
    found = cluster.rank_rates()
    assert (found.intra, found.inter, found.nic) == pytest.approx((360e9, 41e9, 45.5e9))
    assert found.compute == pytest.approx(642.85e12)
    assert "published rates, not measured here" in cluster.described
    half = replace(cluster, rates=Rates(1e9, 2e9, latency=1e-5), source="mine", spread=0.04)
    assert half.rank_rates() == Rates(
        1e9, 2e9, latency=1e-5, compute=found.compute, memory=3.35e12, host=half.host_time
    )
    assert half.described == "measured: mine; repeats vary by up to 4%"


def test_every_field_is_in_the_file():
    """But those that are objects, and what follows: who shares a NIC, and the GPU's memory rate."""
    there = {(f.of, f.field) for part in cluster_file.SECTIONS.values() for f in part}
    fields = {(of, each.name) for of in (clusters.Cluster, clusters.Gpu, Rates)
              for each in dataclasses.fields(of)}  # fmt: skip
    fields |= {(HostTime, each.name) for each in dataclasses.fields(HostTime)}
    left = {
        (clusters.Cluster, "gpu"),
        (clusters.Cluster, "rates"),
        (clusters.Cluster, "host_time"),
        (Rates, "shared"),
        (Rates, "host"),
        (Rates, "memory"),
        (Rates, "room"),
    }
    assert there == fields - left
