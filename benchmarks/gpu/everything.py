"""Whole run, from arguments to results and tables.

This module decides where a run writes its results, and when results of two runs may be combined.
"""

from __future__ import annotations

import argparse
import hashlib
import platform
import sys
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from . import jobs, tables, worker
from .jobs import Stage
from .journal import Journal
from .sizes import CPU, GPU, Sizes
from .supervise import ROOT, Budget, follow, signals_raise

Record = dict[str, Any]
FILES = ("--out",)  # flags that do not affect measurements
CLOSING = 12.0  # seconds, at most a tenth of the time, for the tables
NO_TEST_LEFT = (0, 1, 5)  # pytest: all passed, some failed, none chosen


def main(args: argparse.Namespace, budget: Budget) -> int:
    """Run the requested parts until `budget` is spent and return the exit status."""
    for flag, seconds in (("--seconds", args.seconds), ("--limit", args.limit)):
        if not seconds > 0:
            raise ValueError(f"{flag}: seconds above 0, got {seconds:g}")
    device = torch.device(args.device)
    every = jobs.stages(args, chosen(args), device)
    journal = Journal(args.out / "results.jsonl")
    if args.stage is not None:
        return worker.main(args, every, journal)
    begin(args, device, every, journal)
    budget = budget.part(budget.left - min(CLOSING, args.seconds / 10))
    with signals_raise():
        watch(args, every, journal, budget)
    results = journal.results()
    print(f"\n{tables.markdown(results)}\n", flush=True)
    failed = tables.failures(results)
    print("\n".join(["", *(f"FAILED {text}" for text in failed)]))
    print(
        f"{len(results['jobs'])} tests and cells, {len(failed)} failures, "
        f"{len(results['left out'])} left out; {journal.path.name} has it all"
    )
    return 1 if failed else 0


def watch(args: argparse.Namespace, every: list[Stage], journal: Journal, budget: Budget) -> None:
    """Run one child after the other; tables are on disk after each cell."""

    def on_end(name: str, record: Record) -> None:
        faults = [f"; {who} FAILED: {text}" for who, text in record["failed"].items()]
        print(f"[{budget.spent:4.0f} s] {name}{''.join(faults)}", flush=True)
        (args.out / "tables.md").write_text(tables.markdown(journal.results()) + "\n")

    for stage in every:
        stage_budget = budget.part(stage.share * budget.total)
        if stage_budget.left <= 0 or (
            stage.jobs and {j.name for j in stage.jobs} <= journal.ended()
        ):
            continue
        command, fine = _worker(args, stage, stage_budget), (0,)
        if stage.marks:
            command, fine = _pytest(args, stage, journal), NO_TEST_LEFT
        follow(stage.name, command, journal, stage_budget, args.limit, on_end, fine)
    # with the items that were left out
    (args.out / "tables.md").write_text(tables.markdown(journal.results()) + "\n")


def _worker(args: argparse.Namespace, stage: Stage, budget: Budget) -> list[str]:
    words = [*sys.argv[1:], "--out", str(args.out.resolve())]
    words += ["--stage", stage.name, "--left", str(budget.left)]
    return [sys.executable, "-m", "benchmarks.gpu", *words]


def _pytest(args: argparse.Namespace, stage: Stage, journal: Journal) -> list[str]:
    command = [sys.executable, "-m", "pytest", "--tb=short", "-p", "no:cacheprovider"]
    command += ["-p", "benchmarks.gpu.outcomes", "--journal", str(journal.path.resolve())]
    # warnings of other packages on this machine are not tested
    command += ["--stage", stage.name, "-W", "default", "-m", stage.marks]
    return command + args.tests


def chosen(args: argparse.Namespace) -> Sizes:
    """Return the sizes of the device, with the changes of the arguments."""
    sizes = GPU if args.device == "cuda" else CPU
    changes: Record = {}
    if args.tokens:
        changes["tokens"] = tuple(args.tokens)
    if args.heads:
        changes["heads"] = tuple(_heads(text) for text in args.heads)
    if args.ring_tokens:
        changes["ring_tokens"] = args.ring_tokens
    sizes = sizes._replace(**changes)
    for tokens in sizes.tokens:
        if tokens < 2 * sizes.block or tokens % sizes.block:
            raise ValueError(f"--tokens: multiples of {sizes.block}, two at least, got {tokens}")
    return sizes


def _heads(text: str) -> tuple[int, int]:
    h, _, k = text.partition(":")
    if not (h.isdigit() and k.isdigit() and int(k) and int(h) and int(h) % int(k) == 0):
        raise ValueError(f"--heads: like 32:8, the second divides the first, got {text!r}")
    return int(h), int(k)


def begin(
    args: argparse.Namespace, device: torch.device, every: list[Stage], journal: Journal
) -> None:
    """Write the head of the results, or check that earlier results have this machine and code."""
    head = {
        "device": args.device,
        "machine": machine(device),
        "versions": versions(device),
        "sources": sources(ROOT / "megatron_burst"),
    }
    if args.fresh:
        journal.path.unlink(missing_ok=True)
    journal.mend()
    earlier = journal.results()
    for name in head if journal.size else ():
        if earlier.get(name) != head[name]:
            raise ValueError(
                f"--out: {journal.path.name} is of {name} {earlier.get(name)}, this is "
                f"{head[name]}; give another folder, or --fresh to forget it"
            )
    if not journal.size:
        journal.write(head=head)
    journal.write(command=f"{command()} ({date.today()})")
    for stage in every:
        names = None if stage.marks else [job.name for job in stage.jobs]  # pytest lists its own
        journal.write(stage=stage.name, items=names)


def command() -> str:
    """Return the command as typed, without the files that it names."""
    words, kept = iter(sys.argv[1:]), []
    for word in words:
        if word in FILES:
            next(words, None)
        elif word.partition("=")[0] not in FILES:
            kept.append(word)
    return " ".join(["benchmarks/gpu.sh", *kept])


def machine(device: torch.device) -> str:
    if device.type == "cpu":
        return "a CPU: this tests the script and measures nothing"
    properties = torch.cuda.get_device_properties(device)
    return (
        f"one {properties.name} ({properties.total_memory / 2**30:.0f} GiB, "
        f"{properties.multi_processor_count} multiprocessors, "
        f"compute capability {properties.major}.{properties.minor})"
    )


def versions(device: torch.device) -> str:
    words = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    if device.type == "cuda":
        words += [f"CUDA {torch.version.cuda}", f"cuDNN {torch.backends.cudnn.version()}"]
    try:
        words.append(f"triton {version('triton')}")
    except PackageNotFoundError:
        words.append("no triton")
    return ", ".join(words)


def sources(folder: Path) -> str:
    """Return eight digits that change with the code."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:8]
