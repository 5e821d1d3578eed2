"""`megatron-burst patch`, the patch series, and a patched Megatron."""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import Ranks

from megatron_burst.cli import patch
from megatron_burst.cli.main import main
from megatron_burst.megatron.entrance import entrance
from megatron_burst.seam import PLACES, inside, marked, seam

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
IMPORTED = ["megatron.training.arguments", "megatron.training.argument_utils", "pretrain_gpt"]
SERIES = sorted(patch.SERIES.iterdir())


def installed():
    """Return the folder of the installed megatron, and its version."""
    core = pytest.importorskip("megatron.core")
    tree = Path(core.__file__).parents[2]
    return tree, tuple(map(int, patch.version_of(tree).split(".")[:2]))


def load_make():
    spec = importlib.util.spec_from_file_location("make", ROOT / "patches" / "make.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """Return a copy of the files of the installed Megatron that the patches change."""
    tree, version = installed()
    if version < (0, 19):
        pytest.skip("no series for this version")
    target = tmp_path_factory.mktemp("megatron")
    for part in ("core", "training"):
        shutil.copytree(tree / "megatron" / part, target / "megatron" / part)
    subprocess.run(["git", "init", "-q", target], check=True)
    return target


@pytest.fixture(scope="module")
def patched(copy):
    """Return a copy of the installed Megatron, patched with the printed command."""
    status, lines = patch.check(copy)
    assert status == patch.PATCHABLE
    subprocess.run(lines[-1], shell=True, check=True)
    return copy


@pytest.fixture(scope="module")
def on_patched(patched, tmp_path_factory):
    """Return ranks that run scripts on the patched Megatron."""
    server = Ranks(tmp_path_factory.mktemp("patched"), IMPORTED, EXAMPLES, tree=patched)
    yield server
    server.close()


@pytest.fixture(scope="module")
def on_installed(tmp_path_factory):
    """Return ranks that run scripts on the installed Megatron."""
    server = Ranks(tmp_path_factory.mktemp("installed"), IMPORTED, EXAMPLES)
    yield server
    server.close()


# --- the seam ------------------------------------------------------------------------------


def test_a_seam_calls_its_function_until_it_is_filled():
    @seam
    def double(x):
        return 2 * x

    assert double(3) == 6
    assert double.__name__ == "double"
    inside(double).inner = lambda x: -inside(double).bare(x)
    assert double(3) == -6
    inside(double).inner = None
    assert double(3) == 6
    assert inside(print) is None


def test_an_entrance_installs_when_it_is_called(monkeypatch):
    calls = []
    home = sys.modules[entrance.__module__]
    monkeypatch.setattr(home, "install", lambda: calls.append("install"))

    @entrance
    def add_arguments(parser):
        return [*parser, "theirs"]

    assert calls == []
    assert add_arguments([]) == ["theirs"]
    assert calls == ["install"]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("@seam\ndef checkpoint(): pass", True),
        ("@seam\n@other\ndef checkpoint(): pass", True),
        ("@other\n@seam\ndef checkpoint(): pass", False),
        ("def checkpoint(): pass", False),
        ("@seam\ndef check(): pass", False),
        ("class A:\n    @seam\n    def checkpoint(self): pass", False),
    ],
)
def test_what_counts_as_a_seam(source, found):
    place = next(p for p in PLACES if p.name == "checkpoint")
    assert marked(source, place) == found


# --- the series ----------------------------------------------------------------------------


@pytest.mark.parametrize("series", SERIES, ids=lambda s: s.name)
def test_a_series_only_adds_two_lines_per_file_and_one_per_further_place(series):
    added = []
    for one in sorted(series.glob("*.patch")):
        body = one.read_text().split("\n---\n", 1)[1].splitlines()
        assert not [x for x in body if x.startswith("-") and not x.startswith("---")]
        added += [x for x in body if x.startswith("+") and not x.startswith("+++")]
    assert len(added) == len(PLACES) + len({p.file for p in PLACES})
    assert {x.strip("+ ") for x in added} <= {
        "@seam",
        "@entrance",
        "from megatron_burst.seam import seam",
        "from megatron_burst.megatron.entrance import entrance",
    }


def test_the_wheel_has_the_series(tmp_path):
    data = (ROOT / "pyproject.toml").read_text()
    assert '"patches/*/*.patch"' in data
    package = ROOT / "megatron_burst"
    assert len(list(package.glob("patches/*/*.patch"))) == 5 * len(SERIES) > 0


def test_the_installed_megatron(capsys):
    tree, version = installed()
    status = main(["patch", "--check", str(tree)])
    told = capsys.readouterr().out
    if version >= (0, 19):
        assert status == patch.PATCHABLE
        assert told.startswith("patchable: Megatron-Core 0.19")
        assert "series 0.19" in told
    else:
        assert status == patch.NEITHER
        assert told.startswith("not patchable: Megatron-Core 0.16")
        assert (
            "0003-recompute.patch: patch failed: megatron/core/tensor_parallel/random.py:" in told
        )
        assert "megatron/training/arguments.py: No such file" in told


def test_the_series_is_what_make_writes(copy, tmp_path):
    def lines(text):  # but for where the hunks are
        return [line for line in text.splitlines() if not line.startswith("@@")]

    fresh = tmp_path / "tree"
    tree, _ = installed()
    for place in PLACES:
        (fresh / place.file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(tree / place.file, fresh / place.file)
    for name, text in load_make().series(fresh).items():
        assert lines(text) == lines((patch.SERIES / "0.19" / name).read_text())


@pytest.mark.parametrize("path", ["nowhere", "."])
def test_a_folder_without_megatron(path, tmp_path, capsys):
    assert main(["patch", "--check", str(tmp_path / path)]) == 2
    assert "pass the folder that contains the folder megatron" in capsys.readouterr().err


def small_tree(tmp_path, change):
    """Return the patched files of the installed Megatron, modified."""
    tree, version = installed()
    if version < (0, 19):
        pytest.skip("no series for this version")
    info = "megatron/core/package_info.py"
    for file in {info, *(place.file for place in PLACES)}:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(tree / file, tmp_path / file)
    change(tmp_path)
    return tmp_path


def test_a_fork_that_changed_a_place(tmp_path):
    def rename(tree):
        file = tree / "megatron/core/tensor_parallel/random.py"
        file.write_text(file.read_text().replace("\ndef checkpoint(", "\ndef checkpointed("))

    status, lines = patch.check(small_tree(tmp_path, rename))
    assert status == patch.NEITHER
    (problem,) = [line for line in lines if ".patch:" in line]
    assert "0003-recompute.patch: patch failed: megatron/core/tensor_parallel/random.py:" in problem


def test_a_hunk_that_fits_another_function(tmp_path):
    def hide(tree):  # the constructor looks otherwise, and those of other classes look as it did
        file = tree / "megatron/core/transformer/attention.py"
        head, tail = file.read_text().split("    def __init__(\n        self,\n", 1)
        file.write_text(f"{head}    def __init__(  #\n        self,\n{tail}")

    status, lines = patch.check(small_tree(tmp_path, hide))
    assert status == patch.NEITHER
    assert "the hunk for Attention.__init__ fits another function" in "\n".join(lines)


def test_half_a_series_asks_for_the_rest(tmp_path):
    def half(tree):
        files = sorted((patch.SERIES / "0.19").glob("000[12]*"))
        subprocess.run(["git", "init", "-q", tree], check=True)
        subprocess.run(["git", "apply", *map(str, files)], cwd=tree, check=True)

    status, lines = patch.check(small_tree(tmp_path, half))
    assert status == patch.PATCHABLE
    assert "0001" not in lines[-1]
    assert "0003" in lines[-1]


# --- a patched Megatron --------------------------------------------------------------------

PROBE = """
import importlib, inspect, json, sys
from megatron_burst.seam import PLACES, inside
import megatron_burst.megatron as burst
from megatron_burst.plugins.testing import cpu
from megatron_burst.megatron.patching import patched_places
import megatron.training.arguments, megatron.training.argument_utils
cpu.enable()

def owners():
    for place in PLACES:
        owner = importlib.import_module(place.module)
        *classes, name = place.name.split(".")
        for one in classes:
            owner = getattr(owner, one)
        yield place, inspect.getattr_static(owner, name)

def filled():
    return {place.name for place, function in owners() if inside(function).inner is not None}

before = [function for _, function in owners()]
assert patched_places() and set(patched_places()) == set(PLACES)
assert not filled()
burst.install("striped")
assert [function for _, function in owners()] == before  # nothing is replaced
core = {place.name for place in PLACES if place.module.startswith("megatron.core")}
assert core <= filled(), core - filled()
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import random
assert tensor_parallel.checkpoint is random.checkpoint
assert burst.uninstall() and not filled()
assert [function for _, function in owners()] == before
try:
    burst.install("zagzig")
except ValueError:
    assert [function for _, function in owners()] == before and not filled()

from argparse import ArgumentParser
from megatron.training.arguments import add_megatron_arguments
parser = ArgumentParser()
add_megatron_arguments(parser)  # installs
assert "--burst-layout" in parser.format_usage()
print(json.dumps(importlib.import_module("megatron.core").__file__))
"""


def test_a_file_that_is_not_python_is_named(tmp_path):
    core = tmp_path / "a b" / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 19\nPATCH = 2\n")
    for broken in (b"def f(:", b"x = '\xff'"):
        (core / "utils.py").write_bytes(broken)
        with pytest.raises(ValueError, match=r"megatron/core/utils\.py cannot be parsed as Python"):
            patch.check(tmp_path / "a b")


@pytest.mark.slow
def test_installing_fills_the_seams_and_replaces_nothing(patched, on_patched, tmp_path):
    assert patch.check(patched)[0] == patch.PATCHED
    script = tmp_path / "probe.py"
    script.write_text(PROBE)
    done = on_patched.run(1, [], script=script)
    assert done.codes == [0], done.texts[0][-9000:]
    assert Path(json.loads(done.texts[0].splitlines()[-1])).is_relative_to(patched)


def write_text(prefix):
    """Write a Megatron dataset of 40 documents with 50 tokens each."""
    import numpy as np
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    draw = np.random.default_rng(0)
    for _ in range(40):
        builder.add_document(torch.from_numpy(draw.integers(0, 60, 50)), [50])
    builder.finalize(f"{prefix}.idx")
    prefix.with_suffix(".json").write_text(json.dumps({"vocab_size": 61}))


@pytest.mark.slow
def test_a_patched_megatron_trains_as_an_unpatched_one(on_patched, on_installed, tmp_path):
    prefix = tmp_path / "text"
    write_text(prefix)
    metrics = []
    for ranks in (on_patched, on_installed):
        file = tmp_path / f"metrics-{len(metrics)}"
        flags = (
            f"--data-path {prefix} --seq-length 64 --num-layers 2 --hidden-size 32 "
            "--ffn-hidden-size 48 --num-attention-heads 4 --global-batch-size 2 --train-iters 2 "
            "--context-parallel-size 2 --burst-layout striped --recompute-granularity full "
            "--recompute-method uniform --recompute-num-layers 1 --burst-attention-store 0.5 "
            f"--burst-lm-head-loss single_pass --metrics {file}"
        ).split()
        done = ranks.run(2, flags, script=EXAMPLES / "pretrain_gpt.py")
        assert done.codes == [0, 0], done.texts[0][-9000:]
        records = [json.loads(line) for line in file.read_text().splitlines()]
        metrics.append([(r["loss"], r["grad_norm"]) for r in records if "loss" in r])
    assert len(metrics[0]) == 2
    assert metrics[0] == metrics[1]
