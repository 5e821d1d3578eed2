"""examples/million.py: the step at a tiny length on four and two ranks, and what is said of it."""

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import launch
import million
import million_plot
import pytest

JOB = million.Job(
    seq_length=4096, layers=2, hidden=32, ffn=64, window=256, full_every=2, offload="0",
    sequence_chunks=2, mlp_tiles=2, dtype="fp32",
)  # fmt: skip


def found(**changes):
    """What a rank leaves."""
    return {
        "loss": 5.0, "grad_norm": 2.0, "peaks": {"forward": 900, "backward": 1000}, "host": 500,
        "resident": {"before": 100, "peak": 2000}, "seconds": {"forward": 30.0, "backward": 90.0},
        "processor": {"forward": 20.0}, "timeline": [[0.0, 10, 0], [60.0, 1000, 500]],
        "at_peak": [], "startup": "burst | [4]", "states": 10,
    } | changes  # fmt: skip


def run_of(ranks, job=JOB, **changes):
    told = {"activations": 1000, "host": 500, "plain": 4000}
    return million.Run(ranks, [found(**changes) for _ in range(ranks)], 130.0, told, "some text")


def main(monkeypatch, tmp_path, *more):
    sizes = asdict(JOB)
    words = [f"--tokens={sizes.pop('seq_length')}"]
    words += [f"--{name.replace('_', '-')}={value}" for name, value in sizes.items()]
    text = tmp_path / "text.py"
    text.write_text(Path(million.__file__).read_text()[: JOB.seq_length + 8])
    words += ["--out", str(tmp_path / "million"), "--data", str(text)]
    monkeypatch.setattr(sys, "argv", ["million", *words, *more])
    return million.main()


def test_the_speed_of_attention_is_measured():
    """`announce` divides by both rates; the operator's arguments once changed without it."""
    forward, backward = million.speed(8)
    assert 1e6 < forward < 1e13
    assert 1e6 < backward < 1e13


@pytest.mark.parametrize("causal", [True, False])
def test_the_progress_counts_the_pairs_of_a_call(causal):
    """The dispatcher omits trailing arguments that have their default value."""
    import torch
    from million_step import BACKWARD, Watch
    from torch.utils._python_dispatch import TorchDispatchMode

    works = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            works.append(Watch._work(func.name().partition("::")[2].partition(".")[0], args))
            return func(*args, **(kwargs or {}))

    q, aten = torch.randn(2, 3, 8, 16), torch.ops.aten
    forward = aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = forward(q, q, q, 0.0, causal, scale=1.0)
    with Calls():
        forward(q, q, q, 0.0, causal, scale=1.0)
        aten._scaled_dot_product_flash_attention_for_cpu_backward(
            q, q, q, q, out, lse, 0.0, causal, scale=1.0
        )
    pairs = 36 if causal else 64
    assert works == [6 * pairs, 6 * pairs * BACKWARD]


def test_a_length_without_meaning_is_one_line(monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(monkeypatch, tmp_path, "--tokens", "half")
    said = capsys.readouterr().err.splitlines()[-1]
    assert "length must be a whole number of tokens such as 131072, 128K or 5M, got half" in said


def test_pairs_by_hand():
    """Of 8 positions: a triangle of 36, and a window of 3, where position i sees min(i + 1, 3)."""
    job = million.Job(seq_length=8, layers=3, full_every=3, window=3, heads=2)
    assert job.pairs == 2 * (36 + 2 * (1 + 2 + 6 * 3))
    assert replace(job, window=100).pairs == 2 * 3 * 36


def test_the_flags_are_those_of_the_job():
    words = " ".join(JOB.flags("/data/text", 4))
    assert "--context-parallel-size 4 --context-parallel-algo burst" in words
    assert "--window-size 255,0 --window-attn-skip-freq 2" in words
    assert "--burst-offload 0 --burst-sequence-chunks 2 --burst-mlp-tiles 2" in words
    assert "--bf16" not in words
    assert "--bf16" in replace(JOB, dtype="bf16").flags("x", 4)


@pytest.fixture
def stand_in(monkeypatch, tmp_path):
    """Ranks that find what `changes` say, without running."""
    changes = {}

    def train(name, ranks, flags, folder, script, keep_memory):
        report = flags[flags.index("--report") + 1]
        for rank in range(ranks):
            with open(f"{report}.{rank}", "w") as file:
                json.dump(found(**changes), file)

    monkeypatch.setattr(launch, "train", train)
    monkeypatch.setattr(million, "speed", lambda width: (2e9, 1e9))
    return changes


@pytest.mark.megatron
def test_another_number_of_ranks_is_compared(stand_in, monkeypatch, tmp_path, capsys):
    assert main(monkeypatch, tmp_path) == 0
    assert "compared with" not in capsys.readouterr().out
    stand_in["loss"] = 5.0 * (1 + 1e-6)
    assert main(monkeypatch, tmp_path, "--ranks", "2") == 0
    said = capsys.readouterr().out
    assert "compared with 4 ranks" in said
    assert "loss equal to 6.0 digits, gradient norm equal to all digits" in said
    stand_in["loss"] = 5.0 * (1 + 1e-3)  # no longer the same
    assert main(monkeypatch, tmp_path, "--ranks", "2") == 1
    assert main(monkeypatch, tmp_path, "--ranks", "2", "--window", "128") == 0  # another step


@pytest.mark.megatron
def test_more_memory_than_allowed_fails(stand_in, monkeypatch, tmp_path):
    stand_in["resident"] = {"before": 0, "peak": 7 << 30}  # four of them
    assert main(monkeypatch, tmp_path) == 1


def test_the_page_says_what_was_found(tmp_path):
    (tmp_path / "performance.md").write_text("# Performance\n")
    runs = [run_of(4), run_of(2, grad_norm=2.00001)]
    million_plot.document(tmp_path, JOB, runs)
    assert "agree to" not in (tmp_path / "performance.md").read_text()
    runs[0].agrees = {"2": 5e-6}
    million_plot.document(tmp_path, JOB, runs)
    page = (tmp_path / "performance.md").read_text()
    assert page.startswith("# Performance\n\n## A million tokens on a CPU\n")
    assert page.count("One step on") == 1
    assert "agree to 5.0e-06" in page
    assert "| 2 | 5.0000000 | 2.0000100 | 2.0 |" in page
    assert (tmp_path / "million.png").read_bytes().startswith(b"\x89PNG")
    kept = json.loads((tmp_path / "million.json").read_text())
    assert [run["ranks"] for run in kept["runs"]] == [4, 2]
    assert "timeline" not in kept["runs"][0]["found"][0]


@pytest.mark.megatron
@pytest.mark.slow
def test_the_step_itself_on_four_and_two_ranks(monkeypatch, tmp_path, capfd):
    """Real ranks: the same loss and gradient norm; progress and the account are printed."""
    assert main(monkeypatch, tmp_path) == 0
    said = capfd.readouterr().out
    assert "forward of layer 1/2" in said
    assert "recompute and backward of layer 1/2" in said
    assert "memory account:" in said
    assert "at the peak of a rank; the account predicted" in said
    assert main(monkeypatch, tmp_path, "--ranks", "2") == 0
    assert "compared with 4 ranks  loss equal to" in capfd.readouterr().out
    assert len(list((tmp_path / "million").glob("ranks-*.json"))) == 2
