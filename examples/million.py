"""One training step on a million tokens of real text, as one sequence, on four CPU ranks.

    make million                          # prints beforehand how long attention will take
    make million ARGS="--tokens 256K"     # a shorter sequence
    make million ARGS="--ranks 2"         # on two ranks: the same loss and gradient norm

A small Llama-style GPT of Megatron-Core, most of whose layers see a sliding window and a few the
whole sequence. Says beforehand what the memory account predicts and how long attention will take;
then runs `million_step.py` on every rank, compares what it counted with the account, and the loss
with that of an earlier run on another number of ranks. Owns what is said and what counts as
the same.
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
ROOM = 24 << 30  # bytes that all ranks together may take
# Relative difference of loss and gradient norm on other numbers of ranks. In bf16 each rank rounds
# its share of a weight's gradient before the shares are added.
TOLERANCE = {"fp32": 1e-5, "bf16": 5e-3}


@dataclass
class Run:
    """What the ranks of one run found, and what was predicted of them."""

    ranks: int
    found: list[dict[str, Any]]
    seconds: float  # with starting and building
    predicted: dict[str, int]
    text: str
    agrees: dict[str, float] = field(default_factory=dict)  # relative differences, by quantity

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
        """Bytes of live tensors besides weights and gradients, on the rank that has most."""
        return max(max(rank["peaks"].values()) for rank in self.found)

    @property
    def layers_peak(self) -> int:
        """The same, while layers run backward."""
        return max(rank["peaks"]["backward"] for rank in self.found)

    @property
    def resident(self) -> int:
        """Bytes of memory of all ranks together, each at its most."""
        return sum(rank["resident"]["peak"] for rank in self.found)


def speed(width: int) -> tuple[float, float]:
    """Measure torch's attention on one core, in about a second.

    Returns:
        (query, key) pairs per second of forward and of backward.
    """
    import torch

    from megatron_burst.kernels.operators import CpuFlash, TileVisibility

    torch.set_num_threads(1)
    operator, shown = CpuFlash(), TileVisibility()
    q, k, v, dout = torch.randn(4, 1, 1, 2048, width).unbind()
    out, lse = operator.forward(q, k, v, shown, 1.0)
    calls = (
        lambda: operator.forward(q, k, v, shown, 1.0),
        lambda: operator.backward(dout, q, k, v, out, lse, shown, 1.0),
    )
    rates = []
    for call in calls:
        taken = []
        for _ in range(5):
            start = time.process_time()
            call()
            taken.append(time.process_time() - start)
        rates.append(2048 * 2048 / sorted(taken)[2])
    return rates[0], rates[1]


def announce(job: Job, ranks: int, console: Console) -> None:
    """What will run, how long attention takes, and what the account says of its memory."""
    forward, backward = speed(job.width)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    at_once = min(cores or 1, ranks)
    attention = job.pairs * (1 / forward + 1 / backward) / at_once
    mine, plain = job.account(ranks), job.account(ranks, plain=True)
    console.print(
        f"  {job.layers} layers, every {job.full_every}th sees all tokens and the others "
        f"{job.window:,}; {job.pairs:.2e} pairs of attention\n"
        f"  kernel aten: {forward:.1e} pairs/s forward, {backward:.1e} backward on a core: "
        f"attention will take about {duration(attention)} on {at_once} cores\n"
        f"  memory account: {byte_size(mine.activations)} of activations per rank, "
        f"{byte_size(mine.host_bytes)} in the host tier; without offload, chunks and tiles "
        f"{byte_size(plain.activations)}",
        markup=False,
    )


def run(job: Job, ranks: int, prefix: str, text: str, folder: Path) -> Run:
    """The step on so many ranks. Raises `launch.RunFailed`."""
    report, start = folder / f"found-{ranks}", time.perf_counter()
    flags = [*job.flags(prefix, ranks), "--report", str(report)]
    launch.train(f"ranks-{ranks}", ranks, flags, folder, STEP, keep_memory=False)
    found = [json.loads(Path(f"{report}.{rank}").read_text()) for rank in range(ranks)]
    predicted = job.account(ranks)
    states = sum(predicted.states.values())
    layers = max(m.bytes for m in predicted.peaks if "layer" in m.phase) - states
    return Run(
        ranks, found, time.perf_counter() - start,
        {"activations": predicted.activations, "host": predicted.host_bytes, "layers": layers,
         "plain": job.account(ranks, plain=True).activations},
        text,
    )  # fmt: skip


def compare(mine: Run, other: Run) -> dict[str, float]:
    """Relative differences of loss and gradient norm."""
    return {
        key: abs(getattr(mine, key) - getattr(other, key)) / abs(getattr(other, key))
        for key in ("loss", "grad_norm")
    }


def digits(difference: float) -> str:
    """How far two numbers agree, in words."""
    return "all digits" if difference == 0 else f"{-math.log10(difference):.1f} digits"


def summary(job: Job, mine: Run, others: list[Run], console: Console) -> bool:
    """What was found, in a table; did all checks pass?"""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    phases = mine.found[0]["seconds"]
    times = ", ".join(f"{name} {duration(phases[name])}" for name in ("forward", "backward"))
    table.add_row("loss", f"{mine.loss:.6f} nats per token; gradient norm {mine.grad_norm:.6f}")
    table.add_row("time", f"{mine.step_seconds / 60:.1f} minutes: {times}; "
                  f"{job.seq_length / mine.step_seconds:,.0f} tokens/s")  # fmt: skip
    off = mine.peak / mine.predicted["activations"] - 1
    table.add_row("live tensors", f"{byte_size(mine.peak)} at the peak of a rank; the account "
                  f"predicted {byte_size(mine.predicted['activations'])} ({off:+.1%}); without "
                  f"offload, chunks and tiles {byte_size(mine.predicted['plain'])}")  # fmt: skip
    layers, told = mine.layers_peak, mine.predicted["layers"]
    table.add_row("", f"{byte_size(layers)} in the backward of layers; the account predicted "
                  f"{byte_size(told)} ({layers / told - 1:+.1%})")  # fmt: skip
    host = max(rank["host"] for rank in mine.found)
    table.add_row("host tier", f"{byte_size(host)} per rank; the account predicted "
                  f"{byte_size(mine.predicted['host'])}")  # fmt: skip
    table.add_row("resident", f"{byte_size(mine.resident)} of {byte_size(ROOM)}, all ranks, each "
                  "at its most")  # fmt: skip
    passed = mine.resident <= ROOM and math.isfinite(mine.loss)
    for other in others:
        apart = mine.agrees[str(other.ranks)] = max(compare(mine, other).values())
        passed = passed and apart <= TOLERANCE[job.dtype]
        table.add_row(f"beside {other.ranks} ranks", ", ".join(
            f"{key.replace('grad_norm', 'gradient norm')} equal to {digits(value)}"
            for key, value in compare(mine, other).items()))  # fmt: skip
    console.print(table)
    return passed


def earlier(job: Job, ranks: int, text: str, folder: Path) -> list[Run]:
    """Runs of the same step on other numbers of ranks, from their files."""
    found = []
    for path in sorted(folder.glob("ranks-*.json")):
        kept = json.loads(path.read_text())
        if kept["job"] == asdict(job) and kept["run"]["text"] == text:
            found.append(Run(**kept["run"]))
    return [run for run in found if run.ranks != ranks]


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
        mine = run(job, args.ranks, data.prefix, data.source, folder)
    except (ValueError, launch.RunFailed) as error:
        console.print(f"\nmillion stopped. {error}", markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("\nmillion interrupted")
        return 130
    others = earlier(job, args.ranks, mine.text, folder)
    passed = summary(job, mine, others, console)
    kept = {"job": asdict(job), "run": asdict(mine)}
    (folder / f"ranks-{args.ranks}.json").write_text(json.dumps(kept, indent=1) + "\n")
    million_plot.draw(folder / "million.png", job, mine)
    console.print(f"  {folder}/million.png, ranks-{args.ranks}.json", markup=False)
    if args.docs:
        million_plot.document(DOCS, job, [mine, *others])
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
