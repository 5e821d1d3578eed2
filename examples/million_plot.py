"""The picture and the page that `million.py` leaves: memory of a rank over the step, and a table.

Owns their look; all they say arrives as the job and its runs.
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
    """Write the PNG: bytes of live tensors and of the host tier over the step, on the rank that
    holds most, and the peak that the memory account predicted."""
    rank = max(run.found, key=lambda found: max(found["peaks"].values()))
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
        axes.axhline(account / GIB, color=GREY, **line, label="peak that the account predicts")
        plain = run.predicted["plain"]
        axes.axhline(plain / GIB, color=ONE_RANK, **line,
                     label="without offload, chunks and tiles (account)")  # fmt: skip
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
                    f"one sequence; loss {run.loss:.4f}, {byte_size(run.resident)} resident in "
                    "all", fontsize=10, color=GREY)  # fmt: skip
        figure.savefig(path)
        plt.close(figure)


def document(docs: Path, job: Job, runs: Sequence[Run]) -> None:
    """Write docs/million.json, docs/million.png and the section of docs/performance.md."""
    most = max(runs, key=lambda run: run.ranks)
    slim = []
    for run in runs:
        kept = asdict(run)
        for found in kept["found"]:
            del found["timeline"], found["at_peak"]
        slim.append(kept)
    text = json.dumps({"job": asdict(job), "runs": slim}, indent=1)
    (docs / "million.json").write_text(text + "\n")
    draw(docs / "million.png", job, most)
    page = docs / "performance.md"
    content = page.read_text()
    if BEGIN not in content:
        content = f"{content.rstrip()}\n\n## A million tokens on a CPU\n\n{BEGIN}\n{END}\n"
    head, rest = content.split(BEGIN, 1)
    _, tail = rest.split(END, 1)
    page.write_text(f"{head}{BEGIN}\n{section(job, runs)}\n{END}{tail}")


def section(job: Job, runs: Sequence[Run]) -> str:
    """What the page says of the runs, in Markdown."""
    rows = [
        "| ranks | loss | gradient norm | minutes | live tensors per rank | account | host tier | "
        "account | resident, all ranks |",
        "|-|-|-|-|-|-|-|-|-|",
    ]
    for run in runs:
        host = max(found["host"] for found in run.found)
        cells = (
            run.ranks, f"{run.loss:.7f}", f"{run.grad_norm:.7f}", f"{run.step_seconds / 60:.1f}",
            byte_size(run.peak), byte_size(run.predicted["activations"]), byte_size(host),
            byte_size(run.predicted["host"]), byte_size(run.resident),
        )  # fmt: skip
        rows.append(f"| {' | '.join(map(str, cells))} |")
    whole = job.layers // job.full_every
    said = (
        f"One step on {job.seq_length:,} tokens of {runs[0].text} as one sequence: {job.layers} "
        f"layers {job.hidden} wide (MLP {job.ffn}), {job.heads} head{'s' * (job.heads > 1)} of "
        f"{job.width}, {whole} layers causal over everything and {job.layers - whole} with a "
        f"window of {job.window:,}; --burst-offload {job.offload}, --burst-sequence-chunks "
        f"{job.sequence_chunks}, --burst-mlp-tiles {job.mlp_tiles}, attention store 1. Without "
        f"those three the account says {byte_size(runs[0].predicted['plain'])} on each of "
        f"{runs[0].ranks} ranks. *Live tensors*: the most at a time besides weights and gradients, "
        "every storage counted."
    )
    apart = [max(run.agrees.values()) for run in runs if run.agrees]
    same = f" Losses and gradient norms agree to {max(apart):.1e}." if apart else ""
    return "\n\n".join(
        [said + same, "\n".join(rows), "![Memory of a rank over the step](million.png)"]
    )
