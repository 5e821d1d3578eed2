"""Demonstration that a small GPT on four ranks has the same losses as on one rank.

    make quickstart                 # or: python examples/quickstart.py --data FOLDER
    make quickstart ARGS=--packed   # many documents per sequence, attention within each

The script runs `pretrain_gpt.py` three times: on 4 ranks with BurstAttention; the first steps on 1
rank with Megatron's own attention; the last steps on 2 ranks from the checkpoint. Then it compares
losses and gradient norms, and draws them. It defines the settings and the tolerances. It uses only
command lines and metrics, not the code of the model.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import math
import platform
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import launch
import plot
import prepare_data
from launch import Run
from rich.console import Console
from rich.markup import escape
from rich.table import Table

TOLERANCE = 1e-4  # largest relative difference in loss and in gradient norm, fp32
MARGIN = 0.5  # nats between the unigram entropy of the default text and the final loss
LAST = 10  # steps; their mean is the final loss
# The standard deviation of weights is about 1/sqrt(hidden size); at Megatron's 0.02 such a short
# run would learn little.
MODEL = (
    "--num-layers 2 --hidden-size 128 --ffn-hidden-size 384 --num-attention-heads 4 "
    "--num-query-groups 2 --init-method-std 0.09 --micro-batch-size 1 "
    "--lr 4e-3 --min-lr 4e-4 --seed 1234"
)
QUANTITIES = {"loss": "loss", "grad_norm": "gradient norm"}


@dataclass
class Check:
    """A claim, the measurement, and whether the claim is true."""

    claim: str
    measured: str
    passed: bool


@dataclass
class Results:
    """Data for the summary, the picture and metrics.json."""

    data: prepare_data.Dataset
    packed: bool = False
    runs: dict[str, Run] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)


def relative_differences(run: Run, reference: Run, key: str) -> dict[int, float]:
    """Return |run - reference| / |reference| at each step of `run`; NaN counts as infinity.

    Args:
        run: The run.
        reference: The run to compare with.
        key: Name of the metric.

    Raises:
        ValueError: `reference` does not have all steps of `run`.
    """
    values, expected = run.curve(key), reference.curve(key)
    if missing := sorted(set(values) - set(expected)):
        raise ValueError(f"steps {missing} are absent from the reference run")
    errors = {step: abs(values[step] - expected[step]) / abs(expected[step]) for step in values}
    return {step: math.inf if math.isnan(error) else error for step, error in errors.items()}


def compare(title: str, run: Run, reference: Run) -> list[Check]:
    """Return checks that `run` has the losses and gradient norms of `reference` at its steps."""
    checks = []
    for key, word in QUANTITIES.items():
        errors = relative_differences(run, reference, key)
        largest = max(errors.values())
        checks.append(
            Check(
                f"{title}: same {word} in steps {min(errors)} to {max(errors)}",
                f"relative difference {largest:.1e} (allowed {TOLERANCE:.0e})",
                largest <= TOLERANCE,
            )
        )
    return checks


def final_loss(run: Run) -> float:
    """Return the mean loss of the last LAST steps in nats per token."""
    last = sorted(run.steps)[-LAST:]
    return sum(run.steps[step]["loss"] for step in last) / len(last)


def learned(run: Run, entropy: float, required: bool) -> Check:
    """Return a check that the final loss is below the unigram entropy by MARGIN."""
    below = entropy - final_loss(run)
    return Check(
        "learned more than the frequency of each byte",
        f"loss {final_loss(run):.3f}, {below:.2f} nats below the unigram entropy"
        + f" (at least {MARGIN})" * required,
        below >= MARGIN or not required,
    )


def run_all(args: argparse.Namespace, console: Console) -> Results:
    """Run the four stages, and return their results."""
    folder, saved = args.out.resolve(), args.steps - args.resume_steps
    clear(folder)
    headline(console, "1/4  text to a Megatron dataset")
    data = prepare_data.prepare(
        args.data, folder.parent / "data", args.seq_length, console, definitions=args.packed
    )
    console.print(
        f"  {data.documents:,} documents, {data.tokens:,} tokens of {data.source}; "
        f"unigram entropy {data.unigram_entropy_nats:.3f} nats per token",
        markup=False,
        soft_wrap=True,
    )
    results = Results(data, args.packed)
    common = [*MODEL.split(), "--data-path", data.prefix, "--seq-length", str(args.seq_length)]
    common += ["--train-iters", str(args.steps), *["--packed"] * args.packed]
    layout = " --burst-layout balanced" if args.packed else ""

    def train(name: str, ranks: int, title: str, flags: str, *words: str) -> Run:
        headline(console, title)
        console.print(f"  starting {ranks} process{'es' * (ranks > 1)} (10 to 30 seconds)")
        run = launch.train(name, ranks, [*common, *flags.split(), *words], folder)
        results.runs[name] = run
        return run

    checkpoint = str(folder / "checkpoint")
    main = train(
        "burst",
        4,
        f"2/4  {args.steps} steps on 4 ranks with BurstAttention, 2 per node x 2 nodes",
        f"--context-parallel-algo burst --context-parallel-size 4{layout} "
        f"--hierarchical-context-parallel-sizes 2 2 --save-interval {saved} --save",
        checkpoint,
    )
    one_rank = train(
        "one_rank",
        1,
        f"3/4  the first {args.compare_steps} steps on 1 rank with Megatron's own attention",
        f"--context-parallel-algo megatron --exit-interval {args.compare_steps}",
    )
    resumed = train(
        "resumed",
        2,
        f"4/4  steps {saved + 1} to {args.steps} from the checkpoint on 2 ranks, layout striped",
        "--context-parallel-algo burst --context-parallel-size 2 --burst-layout striped "
        f"--ckpt-step {saved} --load",
        checkpoint,
    )
    results.checks += compare("1 rank", one_rank, main) + compare("resumed", resumed, main)
    results.checks.append(learned(main, data.unigram_entropy_nats, required=args.data is None))
    return results


def headline(console: Console, text: str) -> None:
    console.print()
    console.rule(f"[bold]{text}", align="left")


def clear(folder: Path) -> None:
    """Remove the outputs of an earlier quickstart from `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("checkpoint", "logs"):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in ("loss.png", "metrics.json", "burst.jsonl", "one_rank.jsonl", "resumed.jsonl"):
        (folder / name).unlink(missing_ok=True)


def write_picture(path: Path, results: Results, seq_length: int) -> None:
    """Draw the losses of the three runs and their differences."""
    runs = results.runs
    same = all(check.passed for check in results.checks)
    plot.draw(
        path,
        losses={name: run.curve("loss") for name, run in runs.items()},
        differences={
            f"{title}: {word}": relative_differences(runs[name], runs["burst"], key)
            for name, title in (("one_rank", "1 rank"), ("resumed", "resumed"))
            for key, word in QUANTITIES.items()
        },
        entropy=results.data.unigram_entropy_nats,
        tolerance=TOLERANCE,
        title="BurstAttention on four ranks learns what one rank learns"
        if same
        else "Not all checks passed: see metrics.json",
        subtitle=f"A small Llama-style GPT in Megatron-Core, {seq_length:,} tokens per "
        f"{'pack' if results.packed else 'sequence'}, on {results.data.source}",
        caption=runs["burst"].startup,
    )


def write_metrics(path: Path, results: Results, seconds: float) -> None:
    """Write all measurements as one JSON object."""
    speeds = sorted(results.runs["burst"].curve("tokens_per_s").values())
    summary = {
        "passed": all(check.passed for check in results.checks),
        "checks": [vars(check) for check in results.checks],
        "final_loss": final_loss(results.runs["burst"]),
        "data": vars(results.data),
        "tokens_per_s_median": speeds[len(speeds) // 2],
        "seconds": {name: round(run.seconds, 1) for name, run in results.runs.items()}
        | {"total": round(seconds, 1)},
        "startup": {name: run.startup for name, run in results.runs.items()},
        "steps": {name: list(run.steps.values()) for name, run in results.runs.items()},
        "versions": versions("megatron-burst", "megatron-core", "torch"),
    }
    path.write_text(json.dumps(summary, indent=1) + "\n")


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of installed packages; a package in a source tree has no version."""
    by_name = {"python": platform.python_version()}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            by_name[name] = importlib.metadata.version(name)
    return by_name


def summarize(results: Results, folder: Path, seconds: float, console: Console) -> None:
    """Print each claim with its measurement, and the paths of the outputs."""
    headline(console, f"results, after {seconds:.0f} seconds")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for check in results.checks:
        mark = "[green]passed[/]" if check.passed else "[bold red]FAILED[/]"
        table.add_row(mark, check.claim, check.measured)
    files = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for name, description in (
        ("loss.png", "the losses of the runs and their differences"),
        ("metrics.json", "all measurements of all steps"),
        ("checkpoint", "resumes with any context-parallel size and layout (--load)"),
    ):
        files.add_row(f"{folder / name}", description)
    for block in (table, escape(results.runs["burst"].startup), files):
        console.print(block)
        console.print()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--data", help="folder, file or .bin/.idx prefix (default: Python's own source files)")
    add("--out", type=Path, default=Path("runs/quickstart"), help="folder for the results")
    add("--seq-length", type=int, default=4096)
    add(
        "--packed",
        action="store_true",
        help="documents are functions and classes, with attention within each; layout balanced",
    )
    add("--steps", type=int, default=120, help="optimizer steps of the run on 4 ranks")
    add("--compare-steps", type=int, default=6, help="first steps that 1 rank repeats")
    add(
        "--resume-steps", type=int, default=5, help="last steps that are repeated from a checkpoint"
    )
    args = parser.parse_args()
    for flag in ("compare_steps", "resume_steps"):
        if not 1 <= getattr(args, flag) < args.steps:
            name = "--" + flag.replace("_", "-")
            parser.error(
                f"{name} is {getattr(args, flag)}; use 1 to --steps - 1 ({args.steps - 1})"
            )
    return args


def main() -> int:
    args, start = parse_args(), time.perf_counter()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    try:
        results = run_all(args, console)
    except (ValueError, launch.RunFailed) as error:
        console.print(f"\n[bold red]quickstart stopped.[/] {escape(str(error))}", soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("\nquickstart interrupted")
        return 130
    seconds = time.perf_counter() - start
    write_picture(args.out / "loss.png", results, args.seq_length)
    write_metrics(args.out / "metrics.json", results, seconds)
    summarize(results, args.out, seconds, console)
    failed = [check for check in results.checks if not check.passed]
    if failed:
        console.print(f"[bold red]{len(failed)} of {len(results.checks)} checks failed.[/]")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
