"""One training step on a million tokens of real text, as one sequence, on four CPU ranks.

    make million                          # prints the expected time of attention first
    make million ARGS="--tokens 256K"     # a shorter sequence
    make million ARGS="--ranks 2"         # on two ranks: the same loss and gradient norm

The script trains a small Llama-style GPT of Megatron-Core. Most of its layers have a sliding
window, and a few have full attention. The script prints the predicted memory and the time of
attention, and runs `million_step.py` on every rank. Then it compares the measured memory with the
prediction, and the loss with earlier runs on other numbers of ranks. It defines the output and the
tolerances.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import launch
import million_plot
import prepare_data
from million_job import Job
from rich.console import Console
from rich.table import Table

from megatron_burst.units import byte_size, duration, tokens_of

STEP = Path(__file__).with_name("million_step.py")
DOCS = Path(__file__).resolve().parents[1] / "docs"
MEMORY_LIMIT = 24 << 30  # bytes of all ranks together
# Relative difference of loss and gradient norm on other numbers of ranks. In bf16 each rank rounds
# its share of a weight's gradient before the shares are added.
TOLERANCE = {"fp32": 1e-5, "bf16": 5e-3}


@dataclass
class Run:
    """Results of one run.

    Attributes:
        ranks: Number of ranks.
        found: Report of each rank, from `million_step.run`.
        seconds: Duration, including the start of processes and the construction of the model.
        predicted: Bytes that the memory account predicts.
        text: Description of the data.
        agrees: Largest relative difference to each earlier run, by its number of ranks.
    """

    ranks: int
    found: list[dict[str, Any]]
    seconds: float
    predicted: dict[str, int]
    text: str
    agrees: dict[str, float] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        return self.found[0]["loss"]

    @property
    def grad_norm(self) -> float:
        return self.found[0]["grad_norm"]

    @property
    def step_seconds(self) -> float:
        return sum(self.found[0]["seconds"].values())

    @property
    def peak(self) -> int:
        """Largest bytes of live tensors of a rank, without weights and gradients."""
        return max(max(rank["peaks"].values()) for rank in self.found)

    @property
    def layers_peak(self) -> int:
        """Largest bytes of live tensors of a rank during the backward of layers."""
        return max(rank["peaks"]["backward"] for rank in self.found)

    @property
    def resident(self) -> int:
        """Sum of the peak resident memory of all ranks, in bytes."""
        return sum(rank["resident"]["peak"] for rank in self.found)


def speed(width: int) -> tuple[float, float]:
    """Measure torch's attention on one core, in about a second.

    Returns:
        (query, key) pairs per second of forward and of backward.
    """
    import torch

    from megatron_burst.kernels.operators import CpuFlash, TileVisibility

    torch.set_num_threads(1)
    operator, all_pairs = CpuFlash(), TileVisibility()
    q, k, v, dout = torch.randn(4, 1, 1, 2048, width).unbind()
    out, lse = operator.forward(q, k, v, all_pairs, 1.0)
    calls = (
        lambda: operator.forward(q, k, v, all_pairs, 1.0),
        lambda: operator.backward(dout, q, k, v, out, lse, all_pairs, 1.0),
    )
    rates = []
    for call in calls:
        times = []
        for _ in range(5):
            start = time.process_time()
            call()
            times.append(time.process_time() - start)
        rates.append(2048 * 2048 / sorted(times)[2])
    return rates[0], rates[1]


def announce(job: Job, ranks: int, console: Console) -> None:
    """Print the settings, the expected time of attention, and the predicted memory."""
    forward, backward = speed(job.width)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    busy_cores = min(cores or 1, ranks)
    attention = job.pairs * (1 / forward + 1 / backward) / busy_cores
    account, plain = job.account(ranks), job.account(ranks, plain=True)
    console.print(
        f"  {job.layers} layers, every {job.full_every}th with full attention and the "
        f"others with a window of {job.window:,}; {job.pairs:.2e} attention pairs\n"
        f"  kernel aten: {forward:.1e} pairs/s forward, {backward:.1e} backward on a core; "
        f"attention will take about {duration(attention)} on {busy_cores} cores\n"
        f"  memory account: {byte_size(account.activations)} of activations per rank, "
        f"{byte_size(account.host_bytes)} in the host tier; without offload, chunks and tiles "
        f"{byte_size(plain.activations)}",
        markup=False,
    )


def run(job: Job, ranks: int, prefix: str, text: str, folder: Path) -> Run:
    """Run the step on `ranks` processes.

    Args:
        job: The model and its sizes.
        ranks: Number of ranks.
        prefix: Path of the dataset without .bin or .idx.
        text: Description of the data.
        folder: Folder for reports and logs.

    Raises:
        launch.RunFailed: A rank failed.
    """
    report, start = folder / f"found-{ranks}", time.perf_counter()
    flags = [*job.flags(prefix, ranks), "--report", str(report)]
    launch.train(f"ranks-{ranks}", ranks, flags, folder, STEP, keep_memory=False)
    reports = [json.loads(Path(f"{report}.{rank}").read_text()) for rank in range(ranks)]
    predicted = job.account(ranks)
    states = sum(predicted.states.values())
    layers = max(m.bytes for m in predicted.peaks if "layer" in m.phase) - states
    return Run(
        ranks, reports, time.perf_counter() - start,
        {"activations": predicted.activations, "host": predicted.host_bytes, "layers": layers,
         "plain": job.account(ranks, plain=True).activations},
        text,
    )  # fmt: skip


def compare(run: Run, reference: Run) -> dict[str, float]:
    """Return the relative differences of loss and gradient norm."""
    return {
        key: abs(getattr(run, key) - getattr(reference, key)) / abs(getattr(reference, key))
        for key in ("loss", "grad_norm")
    }


def digits(difference: float) -> str:
    """Return the number of equal digits in words."""
    return "all digits" if difference == 0 else f"{-math.log10(difference):.1f} digits"


def summary(job: Job, run: Run, references: list[Run], console: Console) -> bool:
    """Print the results in a table; return True if all checks pass."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    phases = run.found[0]["seconds"]
    times = ", ".join(f"{name} {duration(phases[name])}" for name in ("forward", "backward"))
    table.add_row("loss", f"{run.loss:.6f} nats per token; gradient norm {run.grad_norm:.6f}")
    table.add_row("time", f"{run.step_seconds / 60:.1f} minutes: {times}; "
                  f"{job.seq_length / run.step_seconds:,.0f} tokens/s")  # fmt: skip
    error = run.peak / run.predicted["activations"] - 1
    table.add_row("live tensors", f"{byte_size(run.peak)} at the peak of a rank; the account "
                  f"predicted {byte_size(run.predicted['activations'])} ({error:+.1%}); without "
                  f"offload, chunks and tiles {byte_size(run.predicted['plain'])}")  # fmt: skip
    layers, predicted = run.layers_peak, run.predicted["layers"]
    table.add_row("", f"{byte_size(layers)} in the backward of layers; the account predicted "
                  f"{byte_size(predicted)} ({layers / predicted - 1:+.1%})")  # fmt: skip
    host = max(rank["host"] for rank in run.found)
    table.add_row("host tier", f"{byte_size(host)} per rank; the account predicted "
                  f"{byte_size(run.predicted['host'])}")  # fmt: skip
    table.add_row("resident", f"{byte_size(run.resident)} of {byte_size(MEMORY_LIMIT)}, the sum of "
                  "the peaks of all ranks")  # fmt: skip
    passed = run.resident <= MEMORY_LIMIT and math.isfinite(run.loss)
    for reference in references:
        differences = compare(run, reference)
        largest = run.agrees[str(reference.ranks)] = max(differences.values())
        passed = passed and largest <= TOLERANCE[job.dtype]
        table.add_row(f"compared with {reference.ranks} ranks", ", ".join(
            f"{key.replace('grad_norm', 'gradient norm')} equal to {digits(value)}"
            for key, value in differences.items()))  # fmt: skip
    console.print(table)
    return passed


def earlier(job: Job, ranks: int, text: str, folder: Path) -> list[Run]:
    """Return runs of the same step on other numbers of ranks, from their files."""
    runs = []
    for path in sorted(folder.glob("ranks-*.json")):
        saved = json.loads(path.read_text())
        if saved["job"] == asdict(job) and saved["run"]["text"] == text:
            runs.append(Run(**saved["run"]))
    return [run for run in runs if run.ranks != ranks]


def tokens(text: str) -> int:
    try:
        return tokens_of(text, "length")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--data", help="folder, file or .bin/.idx prefix (default: Python's own source files)")
    add("--out", type=Path, default=Path("runs/million"), help="folder for the results")
    add("--ranks", type=int, default=4, help="processes, each with a part of the sequence")
    add("--docs", action="store_true", help="write the results into docs/")
    add("--tokens", dest="seq_length", type=tokens, default=Job.seq_length,
        help="length of the sequence, such as 256K")  # fmt: skip
    for name, value in asdict(Job()).items():
        if name != "seq_length":
            add(f"--{name.replace('_', '-')}", type=type(value), default=value)
    return parser.parse_args()


def main() -> int:
    args, console = (
        parse_args(),
        Console(highlight=False, width=None if sys.stdout.isatty() else 120),
    )
    job = Job(**{name: getattr(args, name) for name in asdict(Job())})
    folder = args.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder / "logs" / f"ranks-{args.ranks}", ignore_errors=True)
    try:
        console.rule(
            f"[bold]one step on {job.seq_length:,} tokens, {args.ranks} ranks", align="left"
        )
        data = prepare_data.prepare(args.data, folder.parent / "data", job.seq_length, console)
        announce(job, args.ranks, console)
        result = run(job, args.ranks, data.prefix, data.source, folder)
    except (ValueError, launch.RunFailed) as error:
        console.print(f"\nmillion stopped. {error}", markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("\nmillion interrupted")
        return 130
    references = earlier(job, args.ranks, result.text, folder)
    passed = summary(job, result, references, console)
    saved = {"job": asdict(job), "run": asdict(result)}
    (folder / f"ranks-{args.ranks}.json").write_text(json.dumps(saved, indent=1) + "\n")
    million_plot.draw(folder / "million.png", job, result)
    console.print(f"  {folder}/million.png, ranks-{args.ranks}.json", markup=False)
    if args.docs:
        million_plot.document(DOCS, job, [result, *references])
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
