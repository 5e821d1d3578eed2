"""Features that work with each version of Megatron, from tests of the Megatron folders.

    make compatibility                            # releases of megatron-core, from the registry
    make compatibility ARGS='--tree main=PATH'    # also a checkout of Megatron-LM

    make compatibility ARGS='--only delta'        # only the rows with this text in their names

    make test-te                                  # the rows of Transformer Engine's layers (TE)

Each version replaces the installed one in its own pytest process, which runs the tests of each
feature. A cell is "works" if all tests of the feature passed, "refused" if they passed and assert
an error, "fails" if a test failed, and "-" if a test did not run. Results are kept in
docs/compatibility.json, so that one version can be tested alone. This module decides which tests
belong to each feature, and writes the generated section of docs/compatibility.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "docs" / "compatibility.json"
# Appended, not inserted: other folders have modules with the same names, and tests import this.
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "tests" / "te")]
from report import markdown, progress, write_section  # noqa: E402
from rows import ROWS  # noqa: E402

PARITY = "tests/megatron/test_parity.py::test_split_run_equals_one_rank"
HEAD = "tests/megatron/test_lm_head.py::test_the_fused_loss_changes_nothing"
HEADS = "tests/megatron/test_mtp.py::test_heads_look_no_further_than_their_document"
LOOP = "tests/megatron_lm/test_training.py::"
GPT = "tests/megatron_lm/test_hybrid_training.py::"
BAD = "tests/megatron/test_bad_input.py::test_a_bad_flag_is_named_on_every_rank"
MODELS = "tests/megatron_lm/test_hybrid_model_training.py::"
SCRIPT = "tests/megatron_lm/test_hybrid_script.py::test_split_like_one_rank"
OFFLOAD = "tests/megatron_lm/test_offload_training.py::test_the_log_is_the_same"
RELEASES = ("0.16.1", "0.17.1", "0.18.2", "0.19.2")


class Feature(NamedTuple):
    """A row of the table: its name, its tests, and the text of a cell if all tests passed."""

    name: str
    tests: tuple[str, ...]
    shows: str = "works"


def _parity(name: str, *cases: str) -> Feature:
    return Feature(name, tuple(f"{PARITY}[{case}]" for case in cases))


def _hybrid(name: str, *cases: str) -> Feature:
    tests = tuple(f"{MODELS}test_split_like_one_rank[{case}]" for case in cases)
    return Feature(f"HybridModel: {name}", tests)


FEATURES = (
    _parity("CP 2 x DP 2", "cp2"),
    _parity("CP 4, flat and 2 x 2", "cp4", "cp2x2"),
    _parity("distributed optimizer", "distributed-optimizer"),
    _parity("TP", "tp2"),
    _parity("TP x SP", "sequence-parallel"),
    _parity("PP", "pp2"),
    _parity("VPP", "vpp2"),
    _parity("GQA, qk-norm, untied", "gqa-qknorm-untied", "gqa-qknorm-untied-striped"),
    _parity("MQA x TP", "mqa", "tp2-mqa"),
    _parity("MLA", "latent", "latent-striped"),
    _parity("MLA x TP", "latent-tp2"),
    _parity("MTP", "mtp"),
    _parity("MTP x layouts other than zigzag", "mtp-striped", "mtp-contiguous"),
    _parity("sliding windows", "window", "window-striped-skip"),
    _parity("softmax sinks", "sink-learnable", "sink-learnable-tp2", "sink-off-by-one"),
    _parity("packed", "packed", "packed-striped", "packed-contiguous"),
    _parity("packed x TP x GQA", "packed-gqa-tp2"),
    _parity("packed x PP", "packed-pp2"),
    _parity("packed x VPP", "packed-vpp2"),
    Feature("packed x MTP", tuple(f"{HEADS}[{case}]" for case in (
        "cp2", "cp2x2-striped", "cp4-contiguous", "cp2x2-lm-head", "vpp2"))),
    _parity("packed x MLA", "packed-latent"),
    _parity("recompute: uniform, block, selective", "recompute-uniform", "recompute-block",
            "recompute-selective"),
    _parity("recompute x PP", "pp2-recompute"),
    _parity("attention store", "store-half-uniform", "store-all-block"),
    _parity("attention store x VPP", "store-vpp2", "store-vpp2-block"),
    _parity("ulysses, hybrid", "ulysses", "hybrid"),
    Feature("fused LM head: TP x SP, PP, MTP",
            tuple(f"{HEAD}[{case}-single_pass]" for case in ("tp2-cp2-sp", "pp2", "mtp"))),
    Feature("bf16", ("tests/megatron/test_parity.py::"
                     "test_in_bf16_splitting_costs_less_than_the_format",)),
    Feature("checkpoint at another CP size", (
        "tests/megatron/test_checkpoint.py::"
        "test_a_resumed_run_repeats_the_rest[another cp size and layout]",)),
    Feature("Megatron-LM's loop: evaluation, CP 2, CP 2 x 2",
            (f"{LOOP}test_two_ranks_train_like_one", f"{LOOP}test_four_ranks_on_two_nodes")),
    Feature("Megatron-LM's loop: save, resume at another CP size",
            (f"{LOOP}test_resumes_on_four_ranks_and_says_what_changed",)),
    Feature("MoE x EP, in Megatron-LM's loop", (f"{LOOP}test_experts_on_two_ranks",)),
    Feature("bf16 and fp16, in Megatron-LM's loop", tuple(
        f"{LOOP}test_in_half_precision_two_ranks_train_like_one_within_its_rounding[{dtype}]"
        for dtype in ("bf16", "fp16 --initial-loss-scale 1024"))),
    Feature("packed, in Megatron-LM's loop",
            tuple(f"{LOOP}test_packed_documents_of_any_length[{n}]" for n in (2, 4))),
    Feature("PP x VPP x attention store, in Megatron-LM's loop",
            (f"{LOOP}test_interleaved_pipeline_with_attention_kept",)),
    Feature("`--spec`", (f"{LOOP}test_chosen_by_a_spec_alone",)),
    Feature("gated delta nets in a GPT model, zigzag and contiguous",
            tuple(f"{GPT}test_ranks_train_like_one[{case}]" for case in ("cp2", "contiguous-2x2"))),
    Feature("gated delta nets, packed",
            (f"{GPT}test_packed_documents_are_each_alone[zigzag]",)),
    Feature("gated delta nets with gates of channels (gdn2)", (
        *(f"{GPT}test_gates_of_channels_train_like_on_one_rank[{case}]"
          for case in ("cp2", "contiguous-2x2", "tp2")),
        f"{GPT}test_gates_of_channels_on_packed_documents",
        f"{GPT}test_gates_of_channels_in_a_hybrid_model")),
    _hybrid("gated delta nets, zigzag", "delta-nets"),
    _hybrid("gated delta nets, more ranks than heads", "delta-nets-more-ranks-than-heads"),
    _hybrid("Mamba-2, zigzag", "mamba"),
    _hybrid("contiguous", "delta-nets-contiguous", "mamba-contiguous"),
    _hybrid("TP x SP", "mamba-tensor-parallel"),
    _hybrid("PP", "mamba-pipeline"),
    _hybrid("VPP", "mamba-interleaved"),
    _hybrid("MoE", "mamba-experts"),
    _hybrid("MTP", "mamba-further-heads", "mamba-further-heads-contiguous"),
    _hybrid("distributed optimizer", "mamba-sharded-optimizer"),
    _hybrid("fused LM head", "mamba", "mamba-further-heads-contiguous"),
    _hybrid("full and selective recompute, attention store", "mamba-recompute", "mamba-selective"),
    _hybrid("Megatron's own exchange of heads", "megatrons-delta-nets", "megatrons-mamba"),
    Feature("HybridModel: packed", tuple(
        f"{MODELS}test_packed_documents_like_each_alone[{case}]"
        for case in ("mamba-contiguous", "delta-nets", "mamba-balanced"))),
    Feature("HybridModel: checkpoint at another CP size",
            (f"{MODELS}test_a_checkpoint_goes_on_at_another_size_and_layout",)),
    Feature("HybridModel: offload", tuple(f"{OFFLOAD}[{case}]" for case in (
        "mixers, experts and attention", "further heads of a hybrid model, recomputed",
        "gated delta nets, more ranks than heads"))),
    Feature("`pretrain_hybrid.py`: CP, PP, MoE, MTP", tuple(
        f"{SCRIPT}[{case}]"
        for case in ("zigzag", "contiguous", "experts", "pipeline", "further-heads"))),
    Feature("attention dropout", (
        f"{BAD}[--context-parallel-size 4 --attention-dropout 0.1]",), "refused"),
)  # fmt: skip
TE_FEATURES = tuple(Feature(name, tests) for name, tests in ROWS)
UNTESTED = ("fp8 computation", "heterogeneous layers")

# Python runs this first in each process. It makes `megatron` the tested tree only. Otherwise a
# release without megatron.training would import the installed megatron.training.
ONLY = """
import sys
from importlib.machinery import ModuleSpec

class Only:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "megatron":
            spec = ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = [{path!r}]
            return spec

sys.meta_path.insert(0, Only)
"""


def main() -> int:
    args = arguments()
    if args.te:
        return record_te(args.te)
    with tempfile.TemporaryDirectory() as scratch, progress("versions", len(args.versions)) as step:
        for version in args.versions:
            step(version)
            tree = args.trees.get(version) or release(version, Path(scratch) / version)
            rows = [feature for feature in FEATURES if args.only in feature.name]
            found = {
                "date": str(date.today()),
                "python": ".".join(map(str, sys.version_info[:3])),
                "torch": metadata.version("torch"),
                "tests": outcomes(tree, args.limit, rows),
            }
            if version in args.trees:
                found["commits"] = {row.name: commit(tree) for row in rows}
            known = json.loads(RECORD.read_text()) if RECORD.exists() else {}
            if args.only and version in known:
                found = added(known[version], found, rows)
            if "te" in known.get(version, {}):
                found["te"] = known[version]["te"]
            keep(known | {version: found})
    return 0


def added(
    earlier: dict[str, Any], found: dict[str, Any], rows: Sequence[Feature]
) -> dict[str, Any]:
    """Return the earlier results of a version with rows that ran later, and their dates."""
    later = {row.name: found["date"] for row in rows}
    return earlier | {
        "tests": earlier["tests"] | found["tests"],
        "later": earlier.get("later", {}) | later,
        "commits": earlier.get("commits", {}) | found.get("commits", {}),
    }


def commit(tree: Path) -> str:
    """Return the commit of a checkout; "unknown" if the folder is not a git repository."""
    command = ["git", "-C", str(tree), "rev-parse", "--short=8", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def record_te(files: list[Path]) -> int:
    """Keep results of `make test-te`, for the installed version of megatron-core."""
    ran = {test: end for file in files if file.exists() for test, end in _parsed(file).items()}
    known, version = json.loads(RECORD.read_text()), metadata.version("megatron-core")
    entry = known.get(version, {"date": "-", "tests": {}})
    found = te_entry(entry.get("te"), ran, metadata.version("transformer_engine"), date.today())
    if found is None:
        print("compatibility: no row of Transformer Engine ran completely: nothing is kept")
        return 0
    keep(known | {version: entry | {"te": found}})
    return 0


def te_entry(
    earlier: dict[str, Any] | None, ran: dict[str, str], release: str, day: date
) -> dict[str, Any] | None:
    """Return the rows whose tests all ran, with the date; None if there is no such row.

    Other rows keep their earlier results if these are for the same release of Transformer Engine.
    """
    rows = [f for f in TE_FEATURES if all(ran.get(t, "skipped") != "skipped" for t in f.tests)]
    if not rows:
        return None
    if earlier is None or earlier["transformer_engine"] != release:
        earlier = {"tests": {}, "dates": {}}
    return {
        "transformer_engine": release,
        "dates": earlier["dates"] | {row.name: str(day) for row in rows},
        "tests": earlier["tests"] | {test: ran[test] for row in rows for test in row.tests},
    }


def keep(known: dict[str, dict[str, Any]]) -> None:
    RECORD.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    write_section(ROOT / "docs" / "compatibility.md", "compatibility", table(known))


def table(known: dict[str, dict[str, Any]]) -> str:
    """Return the tables of all recorded versions, oldest first, and a line about their tests.

    Versions with equal results share a column. The second table has the rows of Transformer Engine,
    for the versions that were tested with it.
    """
    versions = sorted(known)
    theirs = {v: te for v in versions if (te := known[v].get("te")) and te["tests"]}
    columns: dict[tuple[str, ...], list[str]] = {}
    for version in versions:
        columns.setdefault(_column(known[version]), []).append(version)
    names = [*(f.name for f in FEATURES), "run on", "commit"]
    rows = [[*row] for row in zip(names, *columns, strict=True)]
    te_rows = [[f.name, *(cell(f, te["tests"]) for te in theirs.values())] for f in TE_FEATURES]
    te_rows += [["run on", *(_days(te["dates"]) for te in theirs.values())]]
    first = known[versions[0]]
    return (
        f"{markdown(['', *map(', '.join, columns.values())], rows)}\n\n"
        f"{markdown(['', *theirs], te_rows)}\n\n"
        f"Not tested: {', '.join(UNTESTED)}. `make compatibility` writes these tables from results "
        f"of tests on the CPU with gloo, Python {first['python']} and torch {first['torch']}. "
        f"{_te_line(theirs)}"
    )


def _column(entry: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of a version in the first table."""
    days = {"": entry["date"], **entry.get("later", {})}
    cells = (cell(feature, entry["tests"]) for feature in FEATURES)
    return (*cells, _days(days), _commits(entry.get("commits", {})))


def _commits(commits: dict[str, str]) -> str:
    """Return the commits of a checkout's rows: "earlier" if not recorded; "-" for a release."""
    each = {commits.get(feature.name, "earlier") for feature in FEATURES}
    return ", ".join(sorted(each)) if commits else "-"


def _days(dates: dict[str, str]) -> str:
    """Return the first and the last date."""
    return " to ".join(sorted({min(dates.values()), max(dates.values())})) if dates else "-"


def _te_line(theirs: dict[str, dict[str, Any]]) -> str:
    releases = {one["transformer_engine"] for one in theirs.values() if one["tests"]}
    return (
        'Rows "TE" use models of Transformer Engine\'s layers '
        f"({', '.join(sorted(releases)) or 'not tested'}), which `make test-te` builds on the CPU. "
        'In rows "TE trains", Transformer Engine\'s linear and norm modules compute with torch.'
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--releases", nargs="*", default=list(RELEASES), metavar="VERSION")
    parser.add_argument("--tree", action="append", default=[], metavar="NAME=PATH",
                        help="a checkout of Megatron-LM")  # fmt: skip
    parser.add_argument("--only", default="", metavar="TEXT",
                        help="test only rows whose name contains TEXT")  # fmt: skip
    parser.add_argument("--te", type=Path, nargs="+", metavar="JUNIT",
                        help="keep the results of make test-te; runs no tests")  # fmt: skip
    parser.add_argument("--limit", type=float, default=1800, help="seconds for one version")
    args = parser.parse_args()
    args.trees = {}
    for named in args.tree:
        name, _, path = named.partition("=")
        if not (Path(path) / "megatron" / "core").is_dir():
            raise SystemExit(f"--tree {named}: {path or 'nothing'} holds no megatron/core")
        args.trees[name] = Path(path)
    args.versions = [*args.releases, *args.trees]
    return args


def release(version: str, folder: Path) -> Path:
    """Install a release of megatron-core without dependencies, and return the folder."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    wanted = ["--no-deps", "--target", str(folder), f"megatron-core=={version}"]
    subprocess.run(pip + wanted, check=True)
    return folder


def outcomes(tree: Path, limit: float, rows: Sequence[Feature]) -> dict[str, str]:
    """Run the tests of the rows with ``tree``'s Megatron: test -> "passed", "failed", "skipped"."""
    tests = list(dict.fromkeys(test for feature in rows for test in feature.tests))
    interface = tree / "megatron" / "training" / "models" / "gpt.py"  # from 0.19 on
    if not interface.is_file():  # the script of these tests requires it
        tests = [test for test in tests if not test.startswith("tests/megatron_lm/")]
    with tempfile.TemporaryDirectory() as folder:
        tree = _with_helpers(tree, Path(folder))
        (Path(folder) / "sitecustomize.py").write_text(ONLY.format(path=str(tree / "megatron")))
        found = Path(folder) / "junit.xml"
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([folder, str(ROOT)]),
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",  # main compiles functions that the CPU stand-ins replace
        }
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", f"--junitxml={found}", *tests],
            cwd=ROOT, env=environment, timeout=limit, check=False, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        if done.returncode == pytest.ExitCode.USAGE_ERROR:  # a test does not exist
            raise SystemExit(f"compatibility: pytest ran nothing:\n{done.stdout[-2000:]}")
        return _parsed(found) if found.exists() else {}


def _with_helpers(tree: Path, folder: Path) -> Path:
    """Return ``tree``, or a copy of its packages and scripts with compiled dataset helpers.

    The helpers are copied from the installed megatron-core.
    """
    if list((tree / "megatron/core/datasets").glob("helpers_cpp*.so")):
        return tree
    shutil.copytree(tree / "megatron", folder / "megatron")
    for script in tree.glob("*.py"):
        shutil.copy(script, folder)
    for helper in metadata.files("megatron-core") or []:
        if helper.match("helpers_cpp*.so"):
            shutil.copy(str(helper.locate()), folder / "megatron/core/datasets")
    return folder


def _parsed(junit: Path) -> dict[str, str]:
    found = {}
    for case in ElementTree.parse(junit).iter("testcase"):
        module = (case.get("classname") or "").replace(".", "/")
        kinds = {child.tag for child in case}
        bad = kinds & {"failure", "error"}
        outcome = "failed" if bad else "skipped" if "skipped" in kinds else "passed"
        found[f"{module}.py::{case.get('name')}"] = outcome
    return found


def cell(feature: Feature, ran: dict[str, str]) -> str:
    """Return the cell of a feature from the outcomes of its tests."""
    outcomes = {ran.get(test, "skipped") for test in feature.tests}
    if "failed" in outcomes:
        return "fails"
    return feature.shows if outcomes == {"passed"} else "-"


if __name__ == "__main__":
    sys.exit(main())
