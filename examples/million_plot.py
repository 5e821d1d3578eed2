"""Picture and page of `million.py`: memory of a rank over the step, and a table of runs.

The module defines the form of the picture and of the table. The data are arguments.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib

matplotlib.use("Agg")  # files only: no display is needed or opened
import matplotlib.pyplot as plt
from plot import BURST, GREY, ONE_RANK, RESUMED, RULE, STYLE

from megatron_burst.units import byte_size

if TYPE_CHECKING:
    from million import Run
    from million_job import Job

GIB = 1 << 30
BEGIN, END = "<!-- begin million: generated -->", "<!-- end million -->"


def draw(path: Path, job: Job, run: Run) -> None:
    """Draw memory over the step, for the rank with the highest peak.

    Args:
        path: The PNG.
        job: The model and its sizes.
        run: The run.
    """
    rank = max(run.found, key=lambda report: max(report["peaks"].values()))
    second, device, host = zip(*rank["timeline"], strict=True)
    minutes = [x / 60 for x in second]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(9.6, 4.6), dpi=160)
        figure.subplots_adjust(left=0.075, right=0.965, top=0.8, bottom=0.135)
        axes.grid(axis="y", color=RULE, linewidth=0.8)
        axes.plot(minutes, [x / GIB for x in device], color=BURST, linewidth=1.2,
                  drawstyle="steps-post", label="live tensors of a rank")  # fmt: skip
        if any(host):
            axes.plot(minutes, [x / GIB for x in host], color=RESUMED, linewidth=1.2,
                      drawstyle="steps-post", label="in the host tier")  # fmt: skip
        line = {"linewidth": 1.1, "linestyle": (0, (5, 3))}
        account = run.predicted["activations"]
        axes.axhline(account / GIB, color=GREY, **line, label="predicted peak")
        plain = run.predicted["plain"]
        axes.axhline(plain / GIB, color=ONE_RANK, **line,
                     label="prediction without offload, chunks and tiles")  # fmt: skip
        turn = rank["seconds"].get("start", 0) + rank["seconds"]["forward"]
        axes.axvline(turn / 60, color=GREY, linewidth=0.8)
        axes.annotate("forward ", (turn / 60, 0.02), xycoords=("data", "axes fraction"),
                      ha="right", color=GREY)  # fmt: skip
        axes.annotate(" backward", (turn / 60, 0.02), xycoords=("data", "axes fraction"),
                      color=GREY)  # fmt: skip
        axes.set_ylim(0, max(plain, *device) / GIB * 1.2)
        axes.set_xlim(0, max(minutes))
        axes.set_xlabel("minutes")
        axes.set_ylabel("GiB per rank")
        axes.legend(loc="upper right", ncols=2)
        figure.text(0.075, 0.925, f"One training step on {job.seq_length:,} tokens, on "
                    f"{run.ranks} CPU ranks",
                    fontsize=15, fontweight="bold")  # fmt: skip
        figure.text(0.075, 0.865, f"A Llama-style GPT in Megatron-Core on {run.text}, "
                    f"one sequence; loss {run.loss:.4f}, {byte_size(run.resident)} resident on "
                    "all ranks", fontsize=10, color=GREY)  # fmt: skip
        figure.savefig(path)
        plt.close(figure)


def document(docs: Path, job: Job, runs: Sequence[Run]) -> None:
    """Write docs/million.json, docs/million.png and the section of docs/performance.md."""
    most = max(runs, key=lambda run: run.ranks)
    records = []
    for run in runs:
        record = asdict(run)
        for report in record["found"]:
            del report["timeline"], report["at_peak"]
        records.append(record)
    text = json.dumps({"job": asdict(job), "runs": records}, indent=1)
    (docs / "million.json").write_text(text + "\n")
    draw(docs / "million.png", job, most)
    page = docs / "performance.md"
    content = page.read_text()
    if BEGIN not in content:
        content = f"{content.rstrip()}\n\n## A million tokens on a CPU\n\n{BEGIN}\n{END}\n"
    before, generated = content.split(BEGIN, 1)
    _, after = generated.split(END, 1)
    page.write_text(f"{before}{BEGIN}\n{section(job, runs)}\n{END}{after}")


def section(job: Job, runs: Sequence[Run]) -> str:
    """Return the section of the page in Markdown."""
    rows = [
        "| ranks | loss | gradient norm | minutes | live tensors per rank | account | host tier | "
        "account | resident, all ranks |",
        "|-|-|-|-|-|-|-|-|-|",
    ]
    for run in runs:
        host = max(report["host"] for report in run.found)
        cells = (
            run.ranks, f"{run.loss:.7f}", f"{run.grad_norm:.7f}", f"{run.step_seconds / 60:.1f}",
            byte_size(run.peak), byte_size(run.predicted["activations"]), byte_size(host),
            byte_size(run.predicted["host"]), byte_size(run.resident),
        )  # fmt: skip
        rows.append(f"| {' | '.join(map(str, cells))} |")
    full_layers = job.layers // job.full_every
    text = (
        f"One step on {job.seq_length:,} tokens of {runs[0].text} as one sequence: {job.layers} "
        f"layers {job.hidden} wide (MLP {job.ffn}), {job.heads} head{'s' * (job.heads > 1)} of "
        f"{job.width}, {full_layers} layers with full causal attention and "
        f"{job.layers - full_layers} with a window of {job.window:,}; "
        f"--burst-offload {job.offload}, --burst-sequence-chunks {job.sequence_chunks}, "
        f"--burst-mlp-tiles {job.mlp_tiles}, attention store 1. Without "
        f"these three flags the account predicts {byte_size(runs[0].predicted['plain'])} on each "
        f"of {runs[0].ranks} ranks. *Live tensors*: peak bytes of all storages, without weights "
        "and gradients."
    )
    differences = [max(run.agrees.values()) for run in runs if run.agrees]
    if differences:
        text += f" Losses and gradient norms agree to {max(differences):.1e}."
    return "\n\n".join([text, "\n".join(rows), "![Memory of a rank over the step](million.png)"])
