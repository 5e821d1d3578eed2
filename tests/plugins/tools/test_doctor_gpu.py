"""`megatron-burst doctor --gpu-report`: findings, and removal of private data."""

import getpass
import json
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import megatron_burst as mb
from megatron_burst.cli.doctor import installed, library
from megatron_burst.cli.doctor.kernels import dense
from megatron_burst.cli.doctor.report import problem
from megatron_burst.cli.main import main
from megatron_burst.kernels import registry
from megatron_burst.plugins.tools.calibrate.ranks import Ranks
from megatron_burst.plugins.tools.gpu_report import accuracy, document, times

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return (exit status, text of the file, its JSON) of a dry run with private data."""
    path = tmp_path_factory.mktemp("report") / "report.md"
    secret = f"cannot open /home/somebody/run/lib.so on {socket.gethostname()}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "library", lambda: iter([problem("csrc", secret, "rm ~/x/y.so")]))
        patch.setattr(installed, "hooks", lambda: iter(()))
        status = main(["doctor", "--gpu-report", str(path), "--device", "cpu"])
    return status, path.read_text(), facts_of(path)


def facts_of(path):
    return json.loads(path.read_text().partition("```json\n")[2].partition("\n```")[0])


def test_the_file_has_every_kernel_and_says_that_a_cpu_is_none(written):
    status, text, facts = written
    assert status == 1  # the problem above
    assert document.DRY in text.splitlines()[2]
    assert facts["finished"]
    assert document.UNFINISHED not in text
    assert facts["device"] == "cpu"
    assert facts["gpus"] == []
    assert {record["kernel"] for record in facts["accuracy"]} == set(registry.KERNELS)
    assert len(facts["accuracy"]) == len(registry.KERNELS) * 3 * 2
    aten = [record for record in facts["accuracy"] if record["kernel"] == "aten"]
    assert all(0 < accuracy.ratio(record) < accuracy.BOUND for record in aten)
    assert "- aten_cudnn: kernel aten_cudnn runs on cuda tensors" in text
    timed = {(record["kernel"], record["pass"]) for record in facts["times"]}
    assert ("aten", "backward") in timed
    assert "selects aten (causal), aten (full), aten (window 64)" in text
    assert "One GPU: not measured." in text
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["versions"]["NCCL"] == "-"


def test_the_file_names_nobody_and_no_path(written):
    _, text, _ = written
    assert "lib.so" in text
    assert "somebody" not in text
    for name in (socket.gethostname(), getpass.getuser(), str(Path.home()), str(ROOT)):
        assert name == "root" or not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text), name


def test_what_is_no_path_stays():
    said = "and/or 3/4, https://a.b/c, kv/query; ~/a/b.c /x/y/z.py:3 C:\\Users\\me\\f.txt gpu-7 me"
    found = document.impersonal({"a": [said, 1, None]}, {"gpu-7", "me"})["a"]
    assert found[0] == "and/or 3/4, https://a.b/c, kv/query; b.c z.py:3 f.txt ... ..."
    assert found[1:] == [1, None]


@pytest.mark.parametrize(
    ("said", "stays"),
    [
        ("host node-17.cluster.acme.com:29500 refused", "host ... refused"),
        ("connect to [10.1.2.3]:29500, [node-3]:80 (errno: 22)", "connect to ..., ... (errno: 22)"),
        ("any network address of (node17, 29500)", "any network address of (...)"),
        ("peer node-23.acme.com<10.11.12.13:4321> or 10.1.2.3<4321>", "peer ... or ..."),
        ("from 10.1.2.3, fe80::1%eth0 and fd00:12::3", "from ..., ... and ..."),
        ("tcp://node17:29500 on boss at boss.acme.com", "tcp://... on ... at ..."),
        ("file:///home/bob/secret/x.py:3", "x.py:3"),
        ("loading:/home/bob/lib/x.so", "loading:x.so"),
        ("no '/scratch/bob smith/x.so' there", "no 'x.so' there"),
    ],
)
def test_other_machines_and_paths_in_any_guise_are_taken_out(said, stays, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "boss.acme.com")
    assert document.impersonal(said, document.names()) == stays
    monkeypatch.setenv("MASTER_ADDR", "10.1.2.3")
    assert "10" not in document.names()  # or every 10 of the file would go


def test_what_is_no_machine_stays():
    said = "ProcessGroupNCCL.cpp:1234 at::add c10::Error 12:30:45 cuda:0 32:8 torch 2.13.0+cpu "
    said += "z.py:3333 vector<int> (64, 4096) std::vector<at::Tensor> https://a.b/c '/a' 3/4"
    assert document.impersonal(said, ()) == said


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("how", ["wrong", "nan"])
def test_a_wrong_part_of_a_kernel_is_a_problem(part, how, monkeypatch):
    """Any part with more than four times torch's error is wrong; a correct kernel passes."""
    right = accuracy.by_pairs

    def ring(kernel, *rest):
        results = right("reference", *rest)
        if kernel == "aten":
            results[part] = results[part].float()
            results[part][5, 0, 0, 0] += 0.5 if how == "wrong" else float("nan")
        return results

    monkeypatch.setattr(accuracy, "by_pairs", ring)
    monkeypatch.setattr(accuracy, "KERNELS", ("aten", "reference"))
    monkeypatch.setattr(accuracy, "CASES", accuracy.CASES[:1])
    records = []
    wrong, fine, _ = accuracy.kernels(CPU, records)
    assert (wrong.level, fine.level) == ("problem", "ok")
    assert "wrong result" in wrong.what
    text = document._accuracy(json.loads(json.dumps(records)))
    assert text.count("WRONG") == 2
    assert text.count("not finite") == (2 if how == "nan" else 0)


def test_a_kernel_that_breaks_is_told_and_the_others_run(monkeypatch):
    right = accuracy.by_pairs

    def ring(kernel, *rest):
        if kernel == "aten":
            raise RuntimeError("an illegal memory access\nsecond line")
        return right(kernel, *rest)

    monkeypatch.setattr(accuracy, "by_pairs", ring)
    monkeypatch.setattr(accuracy, "KERNELS", ("aten", "reference"))
    records = []
    broken, fine, _ = accuracy.kernels(CPU, records)
    assert (broken.level, fine.level) == ("problem", "ok")
    assert "RuntimeError: an illegal memory access" in broken.what
    assert "FAILED: RuntimeError" in document._accuracy(records)


@pytest.mark.parametrize("case", accuracy.CASES, ids=lambda case: case.name)
def test_masks_by_hand_and_the_dense_formula(case):
    """Compare with autograd, which does not use the formula; heads may be shared."""
    torch.manual_seed(0)
    every = torch.arange(128)
    seen = case.visible(every[:, None], every[None, :])
    assert torch.equal(
        seen, torch.as_tensor(case.mask.visible(every.numpy()[:, None], every.numpy()))
    )
    q, k, v, dout = (torch.randn(128, 1, h, 8, dtype=torch.float64) for h in (4, 2, 2, 4))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(2, dim=2) for x in leaves[1:])
    scores = torch.einsum("sbhd,tbhd->bhst", leaves[0], keys) * 8**-0.5
    out = torch.einsum("bhst,tbhd->sbhd", scores.masked_fill(~seen, -1e300).softmax(-1), values)
    wanted = out.detach(), *torch.autograd.grad(out, leaves, dout)
    for mine, right in zip(dense(q, k, v, dout, seen), wanted, strict=True):
        assert (mine - right).abs().max() < 1e-10


def test_times_are_medians_with_their_spread_and_rates_of_what_attends():
    assert times.spread([4.0, 1.0, 2.0, 3.0, 9.0]) == {"median": 3.0, "low": 2.0, "high": 4.0}
    forward, backward = (
        times._record("aten", way, 64, CPU, [0.5] * 7) for way in ("forward", "backward")
    )
    pairs = sum(range(1, 65))
    assert forward["tflops"] == pytest.approx(2 * 2 * pairs * 4 * 128 / 0.5 / 1e12)
    assert backward["tflops"] == pytest.approx(2.5 * forward["tflops"])


def hidden(kind):
    """Return the hidden fraction of two sleeps, in the background or in the foreground."""

    def begin(seconds):
        if kind == "behind":
            thread = threading.Thread(target=time.sleep, args=(seconds,))
            thread.start()
            return thread.join
        time.sleep(seconds)
        return lambda: None

    here = Ranks(mb.Groups.flat(dist.group.WORLD), CPU, 0.0)
    return times.compared(here, lambda: begin(0.15), lambda: begin(0.1))["hidden"]


def test_what_runs_at_once_is_hidden_and_what_waits_is_not(ranks):
    both = ranks(2).run(hidden, "behind")
    assert min(both) > 0.6
    assert both[0] == both[1]  # the slowest rank's, on all
    assert max(ranks(2).run(hidden, "one after the other")) < 0.4


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "--gpu-report requires a GPU, and torch"),
        (["--device", "cpu", "--distributed"], "--gpu-report excludes --distributed"),
        (["--device", "cpu", "--json", "--", "x.py"], "excludes --json, COMMAND"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(words, told, tmp_path, capsys):
    if not words and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    path = tmp_path / "report.md"
    assert main(["doctor", "--gpu-report", str(path), *words]) == 2
    said = capsys.readouterr().err
    assert told in said
    assert said.count("\n") == 1
    assert not path.exists()


def test_a_place_that_is_none_is_refused_with_the_missing_gpu(tmp_path, capsys):
    assert main(["doctor", "--gpu-report", str(tmp_path / "no" / "r.md")]) == 2
    said = capsys.readouterr().err
    assert "its folder does not exist" in said
    assert torch.cuda.is_available() or "requires a GPU" in said
    assert main(["doctor", "--gpu-report", str(tmp_path), "--device", "cpu"]) == 2
    assert "is a folder" in capsys.readouterr().err
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert main(["doctor", "--gpu-report", str(tmp_path / "loop"), "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert f"--gpu-report {tmp_path / 'loop'}: Too many levels of symbolic links" in said


def test_what_was_measured_before_the_end_of_the_process_is_in_the_file(monkeypatch, tmp_path):
    def kernels(device, records):
        sys.exit("as by a signal")
        yield

    monkeypatch.setattr(accuracy, "KERNELS", ("aten",))
    monkeypatch.setattr(accuracy, "CASES", accuracy.CASES[:1])
    monkeypatch.setattr(times, "kernels", kernels)
    path = tmp_path / "report.md"
    with pytest.raises(SystemExit):
        main(["doctor", "--gpu-report", str(path), "--device", "cpu"])
    text = path.read_text()
    assert "| aten | causal | kv |" in text
    assert document.UNFINISHED in text
    assert not facts_of(path)["finished"]


BROKEN = """
import sys
from megatron_burst.plugins.tools.gpu_report import times
from megatron_burst.cli.main import main

def pairs(ranks, record):
    raise RuntimeError("NCCL error: unhandled system error")
    yield

times._pairs = pairs
sys.exit(main(["doctor", "--gpu-report", sys.argv[1], "--device", "cpu", "--quick"]))
"""


def torchrun(ranks, *words):
    command = f"-m torch.distributed.run --standalone --nproc-per-node {ranks}".split()
    return subprocess.run(
        [sys.executable, *command, *words], cwd=ROOT, capture_output=True, text=True
    )


@pytest.mark.slow
def test_under_torchrun_a_failed_overlap_ends_no_rank_before_the_file_is_whole(tmp_path):
    """torchrun ends all ranks as soon as one fails."""
    (tmp_path / "broken.py").write_text(BROKEN)
    path = tmp_path / "report.md"
    done = torchrun(2, str(tmp_path / "broken.py"), str(path))
    assert done.returncode == 1, done.stderr  # rank 0's, which has told the problem
    assert "unhandled system error" in facts_of(path)["overlap"]["failed"]
    assert facts_of(path)["finished"]
    assert facts_of(path)["times"]


@pytest.mark.slow
def test_under_torchrun_one_rank_writes_and_both_rings_are_measured(tmp_path):
    path = tmp_path / "report.md"
    words = ["-m", "megatron_burst", "doctor", "--gpu-report", str(path)]
    done = torchrun(4, *words, "--device", "cpu", "--quick")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("overlap, two rings") == 1
    found = facts_of(path)["overlap"]
    assert found["grid"] == [2, 2]
    assert list(found["pairs"]) == ["attention and ring", "two rings"]
    for pair in found["pairs"].values():
        alone, other, both = (pair[name] for name in ("first", "second", "both"))
        assert min(alone, other, both) > 0
        assert pair["hidden"] == pytest.approx((alone + other - both) / min(alone, other))
