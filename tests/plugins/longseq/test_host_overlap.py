"""Overlap of copies with layers: steps in counted time, through the benchmark's emulated links."""

import importlib
import sys
from pathlib import Path

import pytest

from megatron_burst.plugins.longseq.host.copies import HostCopy
from megatron_burst.plugins.longseq.host.frames import FrameOrder
from megatron_burst.recompute.host_limits import choose_fraction

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
NBYTES = 1000 * 64  # that a layer leaves


@pytest.fixture
def offload(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("benchmarks.offload")


def steps(offload, layers, link, fraction):
    """Return the times of the first and second step, in forwards, and the host memory."""
    stack = offload.Stack(layers, 1.0, NBYTES / link, 64)
    times = [stack.step(fraction) for _ in range(2)]
    return times, stack.host


@pytest.mark.parametrize("layers", [8, 16])
def test_a_link_of_nine_tenths_costs_its_tail_only(offload, layers):
    times, host = steps(offload, layers, 0.9, 1.0)
    # The copies out hide, and so do those back, but for the first: of 0.9 of a forward.
    assert times == pytest.approx([3 * layers + 0.9] * 2)
    assert times[1] <= 1.1 * 3 * layers
    assert host.bytes_out == host.bytes_back == 2 * layers * NBYTES


@pytest.mark.parametrize("layers", [8, 16])
def test_the_fraction_chosen_for_a_slow_link_is_about_the_best(offload, layers):
    chosen = choose_fraction(NBYTES, 1.0, NBYTES / 2.0, 1e9, layers)
    assert chosen[:2] == (0.5, "link")
    times = {f / 8: steps(offload, layers, 2.0, f / 8)[0][1] for f in range(9)}
    assert times[chosen.fraction] <= 1.1 * min(times.values())
    assert times[1.0] > 1.1 * min(times.values())  # the choice matters


@pytest.mark.parametrize("fault", ["no prefetch", "copies one behind the other"])
def test_what_does_not_overlap_is_seen(offload, monkeypatch, fault):
    if fault == "no prefetch":
        monkeypatch.setattr(FrameOrder, "_following", lambda self, number: None)
    else:
        made = HostCopy.__init__

        def waits(self, *args):
            made(self, *args)
            self.release()

        monkeypatch.setattr(HostCopy, "__init__", waits)
    times, _ = steps(offload, 8, 0.9, 1.0)
    assert times[1] > 1.1 * 3 * 8


def test_the_benchmark_prints_its_table(offload, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["offload.py", "--quick"])
    assert offload.main() == 0
    shown = capsys.readouterr().out
    assert "| auto: 1.0 (none) | 1.037" in shown
    assert "| auto: 0.5 (link) | 1.208" in shown
