"""Gain over Megatron's own context parallelism for six workloads, simulated.

    make gain                        # docs/gain.md and docs/data/gain.json, a minute

Every kind of `--cp-comm-type` runs with the fastest parallel sizes that fit
(`plugins.tools.advise.rivals`), and ours with the sizes from `megatron-burst advise`, and with the
sizes of Megatron's fastest kind.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import megatron_burst as mb
from benchmarks.report import DOCS, json_record, markdown, write_section
from megatron_burst.plugins.tools.advise import rivals
from megatron_burst.plugins.tools.advise.advice import Advice
from megatron_burst.plugins.tools.advise.settings import Settings
from megatron_burst.units import byte_size, duration

GPU = "h100"


class Workload(NamedTuple):
    """One model, its GPUs and sequences.

    Attributes:
        seq: Tokens of a sequence or a pack.
        packed: A name of `packed.NAMED`, None for whole sequences.
    """

    name: str
    model: str
    gpus: int
    seq: str
    packed: str | None = None

    @property
    def command(self) -> str:
        """Return the command that prints predictions for ours and for Megatron's fastest kind."""
        words = f"megatron-burst advise --model {self.model} --gpus {self.gpus} --gpu {GPU}"
        return f"{words} --seq {self.seq}" + (f" --packed {self.packed}" if self.packed else "")


WORKLOADS = (
    Workload("dense, 128K on 8", "llama3-8b", 8, "128K"),
    Workload("dense, 1M on 64", "llama3-8b", 64, "1M"),
    Workload("packed 32K, median 1K, on 64", "llama3-8b", 64, "32K", "1k-to-32k"),
    Workload("packed 256K, long tail, on 64", "llama3-8b", 64, "256K", "2k-to-512k"),
    Workload("windows and sinks, 128K on 64", "gpt-oss-20b", 64, "128K"),
    Workload("hybrid (gated delta), 256K on 64", "qwen3-next-80b-a3b", 64, "256K"),
)
OURS, EQUAL = "ours", "ours, sizes of Megatron's fastest"


class Row(NamedTuple):
    """One kind of context parallelism for one workload.

    Attributes:
        run: Parallel sizes at which the kind is fastest.
        step: Seconds of a step at `run`.
        refused: Reason why the kind does not run at the sizes of Megatron's fastest kind.
    """

    workload: Workload
    name: str
    run: Settings | None = None
    recompute: str = ""
    step: float = math.nan
    bytes: int = 0
    refused: str = ""


def rows(workload: Workload) -> list[Row]:
    """Return Megatron's kinds, ours at the sizes of the fastest kind, and ours at its own sizes."""
    advice = mb.advise(workload.model, GPU, gpus=workload.gpus, seq=workload.seq,
                      packed=workload.packed, top=1)  # fmt: skip
    model, cluster, lengths = advice.model, advice.cluster, advice.lengths
    own: dict[rivals.Kind, rivals.Rival | None] = {
        kind: rivals.fastest(model, cluster, advice.want, (kind,), lengths) for kind in rivals.KINDS
    }
    ran = [rival for rival in own.values() if rival is not None]
    best = min(ran, key=lambda rival: rival.time.seconds if rival.time else math.inf).run
    assert best is not None
    made = []
    for kind, rival in own.items():
        row = Row(workload, kind, refused=rivals.refused(kind, model, cluster, best))
        if rival is not None and rival.run is not None and rival.time is not None:
            row = row._replace(run=rival.run, recompute=rival.recompute, step=rival.time.seconds,
                               bytes=rival.bytes)  # fmt: skip
        made.append(row)
    sizes = {name: getattr(best, name) for name in ("tp", "pp", "vpp", "cp", "dp", "ep",
                                                    "micro_batch")}  # fmt: skip
    equal = mb.advise(workload.model, GPU, gpus=workload.gpus, seq=workload.seq,
                      packed=workload.packed, top=1, **sizes)  # fmt: skip
    return [*made, ours(workload, EQUAL, equal), ours(workload, OURS, advice)]


def ours(workload: Workload, name: str, advice: Advice) -> Row:
    """Return the fastest run of ours in an advice."""
    run, peak = advice.best.run, advice.best.account.peak
    return Row(workload, name, run, recompute_of(run), advice.best.seconds, peak.bytes)


def recompute_of(run: Settings) -> str:
    """Return what ours recomputes and stores, as text."""
    if run.recompute == "none":
        return "none"
    moved = ", inputs on the host" if run.offload else ""
    return f"full, store {run.store:g}{moved}"


# --- the page ------------------------------------------------------------------------------------

COLUMNS = ("workload", "context parallelism", "TP x PP x CP x DP", "recompute", "step",
           "over ours", "GPU memory")  # fmt: skip


def details(rows: Sequence[Row]) -> list[list[str]]:
    """Return one line of text per row, for the data file."""
    lines = []
    for row in rows:
        ours, run = of_workload(rows, row.workload)[OURS], row.run
        lines.append([
            row.workload.name, row.name, sizes_of(run), row.recompute or "-",
            duration(row.step) if run else "not possible",
            f"{row.step / ours.step:.2f}" if run else "-",
            byte_size(row.bytes) if run else "-",
        ])  # fmt: skip
    return lines


def sizes_of(run: Settings | None) -> str:
    """Return the parallel sizes of a run as text."""
    if run is None:
        return "-"
    return f"{run.tp} x {run.pp} x {run.cp} x {run.dp}" + " (no CP)" * (run.cp == 1)


def of_workload(rows: Sequence[Row], workload: Workload) -> dict[str, Row]:
    """Return the rows of one workload by name."""
    return {row.name: row for row in rows if row.workload == workload}


def table(rows: Sequence[Row]) -> str:
    """Return step times relative to ours, one line per workload."""
    lines = []
    for workload in dict.fromkeys(row.workload for row in rows):
        named = of_workload(rows, workload)
        ours = named[OURS].step
        cells = [_ratio(named[name], ours) for name in (*rivals.KINDS, EQUAL)]
        lines.append([f"{workload.name}: {duration(ours)}", *cells])
    kinds = [f"`{kind}`" for kind in rivals.KINDS]
    return markdown(["workload: our step time", *kinds, EQUAL], lines)


def _ratio(row: Row, ours: float) -> str:
    if row.run is None:
        return "not possible"
    return f"{row.step / ours:.2f}" + " (no CP)" * (row.run.cp == 1)


def refusals(rows: Sequence[Row]) -> Iterator[str]:
    """Yield why kinds of Megatron do not run."""
    for row in rows:
        if row.refused:
            remark = " (with its own sizes it runs)" if row.run and row.run.cp > 1 else ""
            yield f"{row.workload.name}, {row.name}: {row.refused}{remark}"


def write(rows: Sequence[Row], folder: Path) -> None:
    """Write the page's table and the data file."""
    write_section(folder / "gain.md", "simulated", table(rows))
    record = {
        "source": "make gain", "columns": COLUMNS, "rows": details(rows),
        "refused": list(refusals(rows)),
        "commands": [workload.command for workload in dict.fromkeys(row.workload for row in rows)],
    }  # fmt: skip
    (folder / "data" / "gain.json").write_text(json_record(record) + "\n")


def main(words: Sequence[str] | None = None) -> int:
    """Run the command and return 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gain", description=__doc__)
    parser.add_argument("--out", type=Path, default=DOCS, help="folder of gain.md")
    args = parser.parse_args(words)
    (args.out / "data").mkdir(parents=True, exist_ok=True)
    all_rows = [row for workload in WORKLOADS for row in rows(workload)]
    (args.out / "gain.md").touch()
    write(all_rows, args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
