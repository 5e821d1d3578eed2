"""`advise --kernel`: forecasts at the published rate of the attention kernel that a run takes."""

import json
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

import megatron_burst as mb
from benchmarks.advise import kernel_rates
from benchmarks.advise.band_cells import nemo_h100
from megatron_burst.autotune import bands, cluster_file
from megatron_burst.autotune.clusters import GPUS, Cluster
from megatron_burst.autotune.gpus import (
    KERNELS,
    Gpu,
    assumed_kernel,
    other_kernels,
    with_kernel,
)
from megatron_burst.autotune.rates import Rates
from megatron_burst.cli.main import main
from megatron_burst.kernels import presence
from megatron_burst.kernels.registry import KERNELS as RUN
from megatron_burst.plugins.tools.advise import kernel as assumed
from megatron_burst.plugins.tools.advise import rivals
from megatron_burst.plugins.tools.advise.flags import cluster_of
from megatron_burst.plugins.tools.advise.search import pasted
from megatron_burst.plugins.tools.advise.search.packed import PackedForecast
from megatron_burst.plugins.tools.advise.settings import Settings
from megatron_burst.plugins.tools.advise.shapes.models import named
from megatron_burst.units import duration

H100 = GPUS["h100"]


def test_rates_by_hand():
    """FlashAttention 2 forward on H100: 370 TFLOP/s; cuDNN 595. The fastest is that of --gpu."""
    for kernel, rate in (("aten", 370e12), ("aten_cudnn", 595e12)):
        cluster = Cluster(with_kernel(H100, kernel), 8)
        assert cluster.rank_rates().compute == pytest.approx(rate)
        assert f"published rates of kernel {kernel}, not measured here" in cluster.described
        assert cluster.band is bands.HOPPER
    assert with_kernel(H100, "flash3").attention == H100.attention
    assert with_kernel(GPUS["h200"], "aten_cudnn").attention == GPUS["h200"].attention
    assert "of kernel" not in Cluster(H100, 8).described


def test_kernels_are_those_of_runs_and_none_is_above_the_fastest():
    assert set(KERNELS) == set(GPUS)
    for name, rates in KERNELS.items():
        assert set(rates) <= set(RUN)
        assert max(rates.values()) == GPUS[name].attention


def test_rates_over_documents_by_hand():
    """FlashAttention 3 reaches 585 and 425 TFLOP/s over documents, FlashAttention 2 284 and 246: a
    backward of 2.5 times the operations takes 2.5 x 585 / 425 times as long. Half the peak is half
    the rate. What was measured stays, and so do GPUs of which nobody knows."""
    for gpu, rate, backward in (
        (H100, 585e12, 2.5 * 585 / 425),
        (with_kernel(H100, "aten"), 284e12, 2.5 * 284 / 246),
        (with_kernel(H100, "aten_cudnn"), 424e12, 2.5 * 424 / 350),
        (replace(H100, peak=H100.peak / 2), 585e12 / 2, 2.5 * 585 / 425),
        (replace(H100, attention=0.65 / 5), 585e12 / 5, 2.5 * 585 / 425),  # stated by the user
        (replace(H100, name="GPU", memory=90 * 2**30), 585e12, 2.5 * 585 / 425),  # --gpu-memory
    ):
        found = Cluster(gpu, 8).rank_rates(documents=True)
        assert (found.compute, found.backward) == pytest.approx((rate, backward))
        assert Cluster(gpu, 8).rank_rates().compute == gpu.peak * gpu.attention
    known = Cluster(H100, 8, rates=Rates(1e11, 4e10, compute=5e14))
    mine = Cluster(replace(H100, kernel="mine", attention=0.3), 8)
    for same in (known, mine, Cluster("a100", 8), Cluster("b200", 8)):
        assert same.rank_rates(documents=True) == same.rank_rates()


@pytest.mark.parametrize("cp", [1, 2])
def test_packs_take_the_rates_over_documents(cp):
    """Of long documents, whose launches are little: 585 / 284 and 425 / 246 times as long."""
    model, run, times = named("llama3-8b"), Settings(1 << 18, cp=cp), []
    for kernel in ("flash3", "aten"):
        where = Cluster(with_kernel(H100, kernel), 8)
        times.append(PackedForecast(model, where, lengths=[1 << 17] * 2).timed(run))
    fast, slow = times
    assert slow.forward / fast.forward == pytest.approx(585 / 284, rel=0.01)
    assert slow.backward / fast.backward == pytest.approx(425 / 246, rel=0.01)
    ours, theirs = (Cluster(with_kernel(H100, kernel), 8) for kernel in ("flash3", "aten"))
    took = [
        rivals.attention("a2a", model, where, replace(run, ulysses=cp), lengths=[1 << 17] * 2)
        for where in (ours, theirs)
    ]
    assert took[1].forward / took[0].forward == pytest.approx(585 / 284, rel=0.02)


def test_the_zigzag_ring_of_ring_flash_attention_by_hand():
    """Half of 65,536^2 pairs, 4 x 32 x 128 operations each, over 8 GPUs: 4.398e12 operations, 11.89
    ms at 370 TFLOP/s. Published: 15.87 ms of a forward (63 calls a second), forecast: 13.5 ms, with
    launches and what short chunks lose; at the fastest kernel's rate 7.9 ms, half the published."""
    operations = 65536**2 / 2 * 4 * 32 * 128 / 8
    assert operations == pytest.approx(4.398e12, rel=1e-3)
    calls = {call.label: call for call in kernel_rates.ring_calls()}
    call = calls["h800, zigzag, fwd"]
    assert call.published == 63
    assert 11.89e-3 < 1 / call.predicted < 15.87e-3
    assert 1 / call.predicted == pytest.approx(13.5e-3, rel=0.01)
    assert call.fastest / call.published == pytest.approx(2.0, abs=0.02)
    both = [calls[f"h800, {way}, fwd + bwd"] for way in ("ring", "zigzag")]
    assert all(-0.09 < each.error < 0 for each in both)
    assert all(c.fastest == c.predicted for c in calls.values() if c.gpu == "a100")


def test_nvidias_runs_take_longer_the_faster_the_kernel():
    """At 32K tokens 1.19 times the forecast of the fastest kernel, at 1M 1.63."""
    h100 = GPUS["h100"]
    found = {
        kernel: [cell for cell in nemo_h100(gpu=with_kernel(h100, kernel)) if cell.counts]
        for kernel in KERNELS["h100"]
    }
    assert list(found) == ["aten", "aten_cudnn", "flash3"]
    first, last = ([cells[at].ratio for cells in found.values()] for at in (0, -1))
    assert first == sorted(first)
    assert last == sorted(last)
    assert (first[-1], last[-1]) == pytest.approx((1.188, 1.627), abs=0.002)


def test_advise_by_kernel(capsys):
    words = ["advise", "--model", "llama3-8b", "--gpus", "8", "--seq", "64K", "--tp", "4", "--cp",
             "2", "--pp", "1", "--top", "1"]  # fmt: skip
    assert main([*words, "--kernel", "aten"]) == 0
    shown = capsys.readouterr().out
    assert "rates: published rates of kernel aten, not measured" in shown
    # The pasted command takes the kernel whose rate the forecast has.
    assert "--burst-kernel aten \\" in shown


@pytest.mark.parametrize(
    ("gpu", "documents", "name", "others"),
    [
        (H100, False, "flash3", ["aten_cudnn", "aten"]),
        (replace(H100, name="GPU", memory=90 * 2**30), False, "flash3", ["aten_cudnn", "aten"]),
        (with_kernel(H100, "aten"), False, "aten", ["flash3", "aten_cudnn"]),
        (GPUS["h200"], False, "aten_cudnn", ["flash3", "aten"]),
        (GPUS["h200"], True, "flash3", ["aten_cudnn", "aten"]),
        (GPUS["a100"], False, "aten", []),
        (GPUS["b200"], True, "flash4", ["aten_cudnn"]),
        (replace(H100, attention=0.5), False, None, []),
        (replace(H100, attention=0.5, kernel="mine"), False, "mine", []),
        (Gpu("mine", 2**36, 1e15, 1e10, "a test"), False, None, []),
    ],
)
def test_the_assumed_kernel_and_the_others(gpu, documents, name, others):
    assert assumed_kernel(gpu, documents) == name
    assert other_kernels(gpu, documents) == others
    on = Cluster(gpu, 8)
    found = assumed.of_forecast(on, lambda other: other.gpu.attention, documents)
    assert (found.name, list(found.seconds)) == (name, others)
    assert found.seconds == {each: with_kernel(gpu, each).attention for each in others}
    assert mb.simulate("llama3-8b", on, Settings(4096, cp=2)).kernel == assumed_kernel(gpu)


def test_advise_names_the_kernel_and_times_the_best_row_with_others(capsys, monkeypatch):
    """The whole of attention takes 0.65 / (370 / 989) times as long with FlashAttention 2, short
    of launches; all else of the step as long. A run that is forecast with it agrees."""
    words = ["advise", "--model", "llama3-8b", "--gpus", "8", "--seq", "1M", "--tp", "1", "--cp",
             "8", "--store", "1", "--offload", "1", "--algorithm", "burst", "--ulysses", "1",
             "--side", "kv", "--head-chunks", "1", "--mlp-tiles", "64"]  # fmt: skip
    monkeypatch.setattr(assumed, "DRIVER", ())
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    best, named_kernel = found["ranked"][0], found["kernel"]
    assert named_kernel["assumed"] == "flash3"
    assert named_kernel["title"] == "FlashAttention 3"
    assert named_kernel["here"] == "not checked: no GPU here"
    assert not named_kernel["measured"]
    longer = best["parts"]["attention"] * (0.65 * 989 / 370 - 1)
    taken = named_kernel["seconds_with"]["aten"]
    assert taken == pytest.approx(best["seconds"] + longer, rel=0.01)
    assert main([*words, "--json", "--kernel", "aten"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ranked"][0]["seconds"] == pytest.approx(taken)
    assert found["kernel"]["assumed"] == "aten"
    assert main(words) == 0
    above, _ = capsys.readouterr().out.split("\nTP  PP")
    assert "attention kernel: flash3 (FlashAttention 3) is assumed; not checked: no GPU" in above
    assert f"{duration(taken)} with aten (FlashAttention 2 of torch)" in above


def test_a_measured_kernel_has_no_other(capsys, tmp_path):
    rates = Rates(1e11, 4e10, compute=5e14)
    found = assumed.of_forecast(Cluster(H100, 8, rates=rates), lambda other: 1.0)
    assert found.facts() == {
        "assumed": None, "title": None, "measured": True, "here": "", "seconds_with": {},
    }  # fmt: skip
    assert "measured by calibrate" in found.described


def test_what_the_doctor_finds_of_a_kernel(monkeypatch):
    """With a GPU that torch sees: packages as they are installed, and kernels of torch."""
    assert presence.kernel_here("flash3") is None  # no GPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for version, said in (
        (91500, "`auto` does not choose it here (cuDNN 91500)"),
        (91900, f"part of torch {torch.__version__} here"),
    ):
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda version=version: version)
        assert presence.kernel_here("aten_cudnn") == said
    assert presence.kernel_here("aten") == f"part of torch {torch.__version__} here"
    assert presence.kernel_here("flash3") == "not installed here"
    monkeypatch.setattr(assumed, "DRIVER", (Path("/"),))
    assert assumed.installed_here("flash3") == "not installed here"
    assert assumed.installed_here("mine") == ""
    monkeypatch.setitem(sys.modules, "flash_attn_interface", ModuleType("flash_attn_interface"))
    assert "has no function _flash_attn_forward here" in presence.kernel_here("flash3")


def test_a_kernel_that_no_run_takes_is_no_flag():
    """A cluster file may say in words whose rate it has."""
    for kernel, stated in (("flash3", "flash3"), ("FlashAttention-2", "auto")):
        run = Settings(65536, cp=2, kernel=kernel)
        assert pasted.choices(run).get("kernel", "auto") == stated


@pytest.mark.parametrize(
    ("words", "reason"),
    [(["--kernel", "triton"], "--kernel triton: it has no published rate on h100; use one of "
      "aten, aten_cudnn, flash3"),
     (["--kernel", "aten", "--gpu", "b200"], "--kernel aten: it has no published rate on b200; "
      "use one of aten_cudnn, flash4")],
)  # fmt: skip
def test_kernels_without_a_rate_are_refused(capsys, words, reason):
    assert main(["advise", "--model", "llama3-8b", "--gpus", "8", "--seq", "64K", *words]) == 2
    assert reason in capsys.readouterr().err


def test_measured_kernels_have_their_own_rate(tmp_path):
    """Links alone measured: the kernel's published rate; the kernel too: refused."""
    flags = Namespace(gpus=None, per_node=None, gpu_memory=None, host_memory=None)
    rates = Rates(1e11, 4e10)
    links = Cluster(H100, 8, rates=rates)
    found = cluster_of(flags, links, "aten")
    assert found.rank_rates().compute == pytest.approx(370e12)
    measured = replace(links, rates=replace(rates, compute=5e14))
    assert cluster_of(flags, measured) == measured
    with pytest.raises(ValueError, match="--kernel aten selects a published rate"):
        cluster_of(flags, measured, "aten")
    cluster_file.write(found, tmp_path / "one.toml")
    assert cluster_file.read(tmp_path / "one.toml") == found
