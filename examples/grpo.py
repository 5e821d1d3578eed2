"""Reinforcement learning on branching samples: a tiny Llama learns to sort digits with GRPO.

    make grpo                         # about 3 minutes on 2 cores
    make grpo ARGS="--digits 6 --samples 16 --steps 400"

The script starts `grpo_train.py` on four ranks, two context-parallel by two data-parallel. Then it
checks that the reward rises and that separate trajectories have the same gradients, and prints the
rows and the time that merged prefixes save. It draws the reward and one tree. It defines the
criteria for "learned" and "equal".
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import grpo_task
import launch
import plot
from matplotlib import pyplot as plt
from quickstart import Check, headline
from rich.console import Console
from rich.table import Table

TRAIN = Path(__file__).with_name("grpo_train.py")
TOLERANCE = 1e-10  # largest difference of gradients and log-probabilities, in float64
RISE = 0.1  # smallest increase of the reward
FULL = 100  # steps; shorter runs do not require the increase
OUTPUTS = ("grpo.jsonl", "comparison.json", "trajectories.jsonl", "reward.png", "tree.png")


def ends(run: launch.Run, key: str) -> tuple[float, float]:
    """Return the means of a metric over the first and the last tenth of the steps."""
    values = list(run.curve(key).values())
    tenth = max(1, len(values) // 10)
    return statistics.mean(values[:tenth]), statistics.mean(values[-tenth:])


def checks(run: launch.Run, compared: dict[str, float]) -> list[Check]:
    """Return the checks of a run.

    Args:
        run: The metrics.
        compared: Comparison with separate trajectories, from `grpo_train.compare`.
    """
    (first, last), solved = ends(run, "reward"), ends(run, "solved")
    difference, sampler = compared["difference"], max(run.curve("sampler").values())
    required = len(run.steps) >= FULL
    return [
        Check(
            "the reward rises",
            f"{first:.3f} to {last:.3f}; solved {solved[0]:.0%} to {solved[1]:.0%}"
            + f" (at least {RISE} higher)" * required,
            last - first >= RISE or not required,
        ),
        Check(
            "gradients equal those of separate trajectories",
            f"difference {difference:.1e}, largest gradient {compared['gradient']:.1e} "
            f"(allowed {TOLERANCE:.0e})",
            difference <= TOLERANCE,
        ),
        Check(
            "log-probabilities equal those of the sampler",
            f"largest difference {sampler:.1e} (allowed {TOLERANCE:.0e})",
            sampler <= TOLERANCE,
        ),
        Check(
            "merged prefixes need fewer rows",
            f"{compared['rows_merged']:,.0f} of {compared['rows_separate']:,.0f}",
            compared["rows_merged"] < compared["rows_separate"],
        ),
    ]


def savings(compared: dict[str, float]) -> Table:
    """Return a table of forward and backward of one step, with and without merged prefixes."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("forward and backward of a step")
    for name in ("rows", "seconds", "processor s, all ranks"):
        table.add_column(name, justify="right")
    kinds = ("rows", "seconds", "processor")
    for title, name in (("separate trajectories", "separate"), ("prefixes merged", "merged")):
        rows, *seconds = (compared[f"{kind}_{name}"] for kind in kinds)
        table.add_row(title, f"{rows:,.0f}", *(f"{duration:.3f}" for duration in seconds))
    ratios = [compared[f"{kind}_separate"] / compared[f"{kind}_merged"] for kind in kinds]
    table.add_row("ratio", *(f"{ratio:.2f}" for ratio in ratios))
    return table


def draw(path: Path, run: launch.Run, title: str) -> None:
    """Draw the reward and the share of solved questions, with moving averages."""
    width = max(1, len(run.steps) // 20)
    style: Any = plot.STYLE
    with plt.rc_context(style):
        figure, axes = plt.subplots(figsize=(7.2, 3.9), dpi=160, layout="constrained")
        axes.grid(axis="y", color=plot.RULE, linewidth=0.8)
        for key, label, color in (
            ("reward", "reward: share of correct digits in both answers", plot.BURST),
            ("solved", "correct second answers", plot.ONE_RANK),
        ):
            curve = run.curve(key)
            steps, values = list(curve), list(curve.values())
            means = [
                statistics.mean(values[max(0, i - width + 1) : i + 1]) for i in range(len(steps))
            ]
            axes.plot(steps, values, color=color, linewidth=0.7, alpha=0.3)
            axes.plot(steps, means, color=color, linewidth=2, label=label)
        axes.set(
            xlabel="step",
            ylim=(0, 1.25),
            yticks=[0, 0.2, 0.4, 0.6, 0.8, 1],
            xlim=(1, max(2, len(run.steps))),
        )
        axes.set_title(title, loc="left", fontweight="bold", fontsize=11.5)
        axes.legend(loc="upper left")
        figure.savefig(path)
        plt.close(figure)


def train(args: argparse.Namespace, folder: Path) -> launch.Run:
    """Run reinforcement learning on `args.ranks` processes."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder / "logs", ignore_errors=True)
    for name in OUTPUTS:
        (folder / name).unlink(missing_ok=True)
    words = [
        word
        for name, value in vars(args).items()
        if name != "out"
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    return launch.train("grpo", args.ranks, words, folder, TRAIN)


def summarize(
    args: argparse.Namespace, run: launch.Run, folder: Path, seconds: float, console: Console
) -> bool:
    """Print the results and the paths of the pictures; return True if all checks pass."""
    compared = json.loads((folder / "comparison.json").read_text())
    headline(console, f"results, after {seconds:.0f} seconds")
    console.print(savings(compared))
    if compared["seconds_separate"] < 1.5 * compared["seconds_merged"]:
        larger = "--hidden-size 256 --digits 10 --samples 16 --steps 1 --warm-up 1"
        text = f"At this size the time depends on the number of calls; try a larger size: {larger}"
        console.print(text, markup=False)
    console.print()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    results = checks(run, compared)
    for check in results:
        mark = "[green]passed[/]" if check.passed else "[bold red]FAILED[/]"
        table.add_row(mark, check.claim, check.measured)
    console.print(table)
    console.print()
    digits, samples = args.digits, args.samples
    draw(
        folder / "reward.png", run, f"GRPO: sorting {digits} digits, {samples} samples per question"
    )
    command = [
        sys.executable, "-m", "megatron_burst", "show", "tree", "--ranks",
        str(args.context_parallel_size), "--trajectories", str(folder / "trajectories.jsonl"),
        "--out", str(folder / "tree.png"),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    console.print(
        f"{folder}/reward.png  the reward\n{folder}/tree.png    the samples of one question, "
        "divided over context-parallel ranks, drawn by:",
        markup=False,
    )
    console.print("  " + " ".join(["megatron-burst", *command[3:]]), markup=False, soft_wrap=True)
    return all(check.passed for check in results)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    grpo_task.add_flags(parser)
    parser.add_argument(
        "--out", type=Path, default=Path("runs/grpo"), help="folder for the results"
    )
    return parser.parse_args()


def main() -> int:
    args, start = parse_args(), time.perf_counter()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    folder = args.out.resolve()
    try:
        grpo_task.check(args)
        headline(console, f"GRPO on {args.ranks} ranks: {grpo_task.description(args)}")
        run = train(args, folder)
    except (ValueError, launch.RunFailed) as error:
        console.print(f"\ngrpo stopped. {error}", markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("\ngrpo interrupted")
        return 130
    return 0 if summarize(args, run, folder, time.perf_counter() - start, console) else 1


if __name__ == "__main__":
    sys.exit(main())
