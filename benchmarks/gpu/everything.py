"""From arguments to results and documents: the whole run.

Decides what a run writes where, and when results of two runs may stand together.
"""

from __future__ import annotations

import argparse
import faulthandler
import platform
import sys
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from . import jobs, plots, tables
from .clock import Clock
from .sizes import CPU, GPU, Sizes

Record = dict[str, Any]
FILES = ("--results", "--doc", "--show")  # say nothing of what was measured


def main(args: argparse.Namespace, doc: Path, grace: float) -> int:
    if args.show is not None:
        results = jobs.load(args.show)
        document(results, args.doc or (doc if results["device"] == "cuda" else None))
        return 0
    if args.device == "cpu" and args.doc and args.doc.resolve() == doc:
        raise ValueError(f"--doc {doc.name}: its section is of GPUs, and this is a CPU")
    budget = jobs.Budget(args.budget)
    # A kernel that hangs must not take what was measured with it.
    terminal = sys.__stderr__ or sys.stderr
    faulthandler.dump_traceback_later(args.budget + grace, exit=True, file=terminal)
    device = torch.device(args.device)
    sizes = chosen(args)
    results = begun(args, device)
    todo = jobs.listed(args, sizes, Clock(device), results, budget)
    print(f"{results['machine']}; {results['versions']}; {len(todo)} cells", flush=True)
    jobs.work(
        todo, results, budget, lambda text: print(text, flush=True),
        lambda: jobs.save(results, args.results),
    )  # fmt: skip
    document(results, args.doc or (doc if args.device == "cuda" else None))
    faulthandler.cancel_dump_traceback_later()
    failed = jobs.failures(results)
    print("\n".join(["", *(f"FAILED {text}" for text in failed)]))
    print(f"{len(results['jobs'])} cells, {len(failed)} failures; {args.results.name} has it all")
    return 1 if failed else 0


def chosen(args: argparse.Namespace) -> Sizes:
    """The sizes of the device, with what the arguments change."""
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


def begun(args: argparse.Namespace, device: torch.device) -> Record:
    """Empty results, or with `--append` those of an earlier run on the same kind of machine."""
    results: Record = {
        "device": args.device,
        "machine": machine(device),
        "versions": versions(device),
        "commands": [],
        "jobs": {},
        "left out": [],
    }
    if args.append and args.results.exists():
        earlier = jobs.load(args.results)
        for name in ("machine", "versions"):
            if earlier[name] != results[name]:
                raise ValueError(
                    f"--append: {args.results.name} is of {earlier[name]}, this is "
                    f"{results[name]}; give another --results"
                )
        results["commands"], results["jobs"] = earlier["commands"], earlier["jobs"]
    results["commands"].append(f"{command()} ({date.today()})")
    return results


def command() -> str:
    """As it was typed, without the files it names."""
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
    found = torch.cuda.get_device_properties(device)
    return (
        f"one {found.name} ({found.total_memory / 2**30:.0f} GiB, {found.multi_processor_count} "
        f"multiprocessors, compute capability {found.major}.{found.minor})"
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


def document(results: Record, path: Path | None) -> None:
    """Print the tables, and put them and the pictures into a document."""
    pictures = plots.draw(results, path.parent) if path else []
    text = tables.markdown(results, pictures)
    print(f"\n{text}\n", flush=True)
    if path:
        from benchmarks.report import write_section

        write_section(path, "GPU", text)
