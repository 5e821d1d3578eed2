"""Gain over Megatron's own context parallelism for six workloads, simulated.

    make gain                        # docs/gain.md, its chart and docs/data/gain.json, a minute
    make gain ARGS="--emulated runs/cluster/compared.json"    # records of the emulated cluster

Every kind of `--cp-comm-type` runs with the fastest parallel sizes that fit
(`plugins.tools.advise.rivals`), and ours with the sizes from `megatron-burst advise`. Attention is
also compared at the sizes of Megatron's fastest kind. Workloads in which ours is slower are listed
with the reason; a missing reason in `REASONS` is an error.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import megatron_burst as mb
from benchmarks.cluster import table as tables
from benchmarks.report import DOCS, json_record, markdown, spread, write_section
from megatron_burst.plugins.tools.advise import rivals
from megatron_burst.plugins.tools.advise.advice import Advice
from megatron_burst.plugins.tools.advise.forecast.attention_time import attention_time
from megatron_burst.plugins.tools.advise.search.attention_choice import CHOICE_OUTPUTS
from megatron_burst.plugins.tools.advise.search.packed import PackedForecast
from megatron_burst.plugins.tools.advise.settings import Settings
from megatron_burst.units import byte_size, duration

GPU = "h100"
LOST = 0.005  # fraction of a time; a smaller difference is a tie


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
FP32 = "Cause: gradients in fp32."
SLOWER = (
    "At the parallel sizes of Megatron's fastest type, ours is slower in the following cases. "
    "*Attention\nwithout compute* is the simulated attention time if compute takes no time. If the "
    "cause is gradients in\nfp32, ours is no longer slower when gradients are sent in bf16, as "
    "in Megatron."
)
OURS, EQUAL = "ours", "ours, sizes of Megatron's fastest"
# (workload, kind) -> reason why ours is slower, if gradients in fp32 are not the reason. A missing
# entry is an error.
REASONS: dict[tuple[str, str], str] = {
    ("dense, 128K on 8", "a2a"): "`auto` treats differences below 1.5 % as ties and picks the "
    "simplest algorithm, a ring. With `--burst-ulysses-size 4` ranks exchange heads, as in "
    "Megatron.",
    (
        "dense, 128K on 8",
        "all_gather",
    ): "Main cause: gradients in fp32. Also, ranks wait once in a "
    "gather, but at each hop of a ring. With compute ours is faster, because compute overlaps with "
    "hops, but not with a gather.",
    ("dense, 1M on 64", "a2a+p2p"): "`auto` treats differences below 1.5 % as ties and picks the "
    "run that sends the fewest bytes between nodes: 2 ranks share heads. With "
    "`--burst-ulysses-size 4` and bf16 gradients, ours is as fast.",
}


class Row(NamedTuple):
    """One kind of context parallelism for one workload.

    Attributes:
        run: Parallel sizes at which the kind is fastest.
        step: Seconds of a step at `run`.
        attention: Seconds of one call of a layer at equal sizes.
        alone: Same as `attention`, if compute takes no time.
        refused: Reason why the kind does not run at equal sizes.
        narrow: `attention` and `alone` of ours if gradients are sent in bf16, as in Megatron.
    """

    workload: Workload
    name: str
    run: Settings | None = None
    recompute: str = ""
    step: float = math.nan
    bytes: int = 0
    attention: float = math.nan
    alone: float = math.nan
    refused: str = ""
    narrow: tuple[float, float] = (math.nan, math.nan)


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
    free = replace(cluster, rates=replace(cluster.rank_rates(), compute=math.inf, launch=0.0))
    made = []
    for kind, rival in own.items():
        row = Row(workload, kind, refused=rivals.refused(kind, model, cluster, best))
        if rival is not None and rival.run is not None and rival.time is not None:
            row = row._replace(run=rival.run, recompute=rival.recompute, step=rival.time.seconds,
                               bytes=rival.bytes)  # fmt: skip
        if not row.refused:
            run = rivals.settings(kind, model, cluster, replace(best, seq=advice.want.seq), lengths)
            row = row._replace(**{
                name: rivals.attention(kind, model, target, run, lengths=lengths).seconds
                for name, target in (("attention", cluster), ("alone", free))
            })  # fmt: skip
        made.append(row)
    sizes = {name: getattr(best, name) for name in ("tp", "pp", "vpp", "cp", "dp", "ep",
                                                    "micro_batch")}  # fmt: skip
    equal = mb.advise(workload.model, GPU, gpus=workload.gpus, seq=workload.seq,
                      packed=workload.packed, top=1, **sizes)  # fmt: skip
    at_equal = Row(
        workload,
        EQUAL,
        equal.best.run,
        recompute_of(equal.best.run),
        equal.best.seconds,
        equal.best.account.peak.bytes,
        *attention_of(equal, equal.best.run, free),
    )
    narrow = replace(equal.best.run, wire="bf16")
    at_equal = at_equal._replace(narrow=attention_of(equal, narrow, free))
    ours = Row(workload, OURS, advice.best.run, recompute_of(advice.best.run), advice.best.seconds,
               advice.best.account.peak.bytes)  # fmt: skip
    return [*made, at_equal, ours]


def attention_of(advice: Advice, run: Settings, free: mb.Cluster) -> tuple[float, float]:
    """Return seconds of one attention call of ours, with compute and without."""
    if not advice.lengths:
        model, cluster = advice.model, advice.cluster
        calls = (attention_time(model, target, run) for target in (cluster, free))
    else:
        chosen = {name: getattr(run, name) for name in CHOICE_OUTPUTS}
        calls = (PackedForecast(advice.model, target, chosen, advice.lengths).timed(run)
                for target in (advice.cluster, free))  # fmt: skip
    first, second = calls
    return first.seconds, second.seconds


def recompute_of(run: Settings) -> str:
    """Return what ours recomputes and stores, as text."""
    if run.recompute == "none":
        return "none"
    moved = ", inputs on the host" if run.offload else ""
    return f"full, store {run.store:g}{moved}"


# --- the page ------------------------------------------------------------------------------------

COLUMNS = ("workload", "context parallelism", "TP x PP x CP x DP", "recompute", "step",
           "over ours", "GPU memory", "attention", "without compute")  # fmt: skip


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
            *(duration(time) if time == time else "-" for time in (row.attention, row.alone)),
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


def losses(rows: Sequence[Row]) -> Iterator[str]:
    """Yield each kind of Megatron that is faster than ours, with the reason.

    Raises:
        ValueError: A reason is missing in `REASONS`.
    """
    for row in rows:
        if row.name not in rivals.KINDS:
            continue
        named = of_workload(rows, row.workload)
        equal, ours = named[EQUAL], named[OURS]
        pairs = (("the step, each at its best sizes", row.step, ours.step, ours.step),
                 ("the step", row.step if same_sizes(row, equal) else math.nan, equal.step,
                  equal.step),
                 ("attention", row.attention, equal.attention, equal.narrow[0]),
                 ("attention without compute", row.alone, equal.alone,
                  equal.narrow[1]))  # fmt: skip
        lost = [pair for pair in pairs if slower(pair[2], pair[1])]
        if not lost:
            continue
        slowdowns = ", ".join(
            f"{100 * (own / theirs - 1):.1f} % in {name}" for name, theirs, own, _ in lost
        )
        reason = REASONS.get((row.workload.name, row.name), "")
        if not any(slower(narrow, theirs) for _, theirs, _, narrow in lost):
            reason = FP32
        if not reason:
            raise ValueError(
                f"{row.workload.name}, {row.name}: ours loses {slowdowns}, even with bf16 "
                f"gradients {equal.narrow}: REASONS must say why"
            )
        yield f"- {row.workload.name}: slower than `{row.name}` by {slowdowns}. {reason}"


def same_sizes(row: Row, other: Row) -> bool:
    """Return True if both run with the same parallel sizes."""
    return row.run is not None and all(
        getattr(row.run, name) == getattr(other.run, name)
        for name in ("tp", "pp", "cp", "dp", "ep")
    )


def slower(ours: float, theirs: float) -> bool:
    """Return True if ours is slower and it is no tie; False if one of them did not run."""
    return ours > theirs * (1 + LOST)


def refusals(rows: Sequence[Row]) -> Iterator[str]:
    """Yield why kinds of Megatron do not run."""
    for row in rows:
        if row.refused:
            remark = " (with its own sizes it runs)" if row.run and row.run.cp > 1 else ""
            yield f"{row.workload.name}, {row.name}: {row.refused}{remark}"


def write(rows: Sequence[Row], folder: Path) -> None:
    """Write the page's table, the chart and the data file."""
    text = "\n\n".join([table(rows), SLOWER, "\n".join(losses(rows))])
    write_section(folder / "gain.md", "simulated", text)
    draw(rows, folder / "gain.png")
    record = {
        "source": "make gain", "columns": COLUMNS, "rows": details(rows),
        "refused": list(refusals(rows)),
        "commands": [workload.command for workload in dict.fromkeys(row.workload for row in rows)],
    }  # fmt: skip
    (folder / "data" / "gain.json").write_text(json_record(record) + "\n")


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw step times relative to ours, a group of bars per workload."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from megatron_burst.plugins.tools.show.colours import GREY, INK, RANKS, RULE

    works = list(dict.fromkeys(row.workload for row in rows))
    names = [*rivals.KINDS, EQUAL, OURS]
    colours = dict(zip(names, (*RANKS[1:5], GREY, RANKS[0]), strict=True))
    style: dict[Any, Any] = {
        "font.size": 10, "text.color": INK, "axes.labelcolor": INK, "xtick.color": INK,
        "ytick.color": INK, "axes.edgecolor": RULE, "axes.spines.top": False,
        "axes.spines.right": False,
    }  # fmt: skip
    with plt.rc_context(style):
        figure, axis = plt.subplots(figsize=(9, 8))
        high = 0.8 / len(names)
        for i, work in enumerate(works):
            named = {row.name: row for row in rows if row.workload == work}
            for j, name in enumerate(names):
                at, row = i - 0.4 + (j + 0.5) * high, named[name]
                if row.run is None:
                    axis.text(0.015, at, f"{name}: not possible", va="center", fontsize=7.5)
                    continue
                ratio = row.step / named[OURS].step
                axis.barh(at, ratio, 0.92 * high, color=colours[name])
                label = f"{ratio:.2f}  {duration(row.step)}" + "  without CP" * (row.run.cp == 1)
                axis.text(ratio + 0.01, at, label, va="center", fontsize=7.5)
        axis.set_yticks(range(len(works)), [work.name.replace(", ", "\n", 1) for work in works])
        axis.set_ylim(len(works) - 0.5, -0.5)
        axis.axvline(1, color=INK, linewidth=0.8)
        axis.set_xlabel("step time / our step time, each at its fastest parallel sizes")
        handles = [plt.Rectangle((0, 0), 1, 1, color=colours[name]) for name in names]
        labels = [f"Megatron {name}" if name in rivals.KINDS else name for name in names]
        figure.legend(handles, labels, loc="upper center", ncols=3, frameon=False, fontsize=9)
        figure.tight_layout(rect=(0, 0, 1, 0.93))
        figure.savefig(path, dpi=110, metadata={"Software": None})
        plt.close(figure)


# --- the emulated cluster ------------------------------------------------------------------------

STANDS_FOR = {  # grid and mask of a cell, without its seed
    ("1x8", "causal"): "dense, 8 ranks of a node",
    ("2x4", "causal"): "dense, 2 nodes of 4",
    ("2x4", "documents 500"): "packed, median 500, 2 nodes of 4",
    ("2x4", "documents 1K"): "packed, long tail, 2 nodes of 4",
}
MEASURED = ("setting", "algorithm", "without compute", "over ours", "with compute", "over ours",
            "MiB between nodes", "MiB within")  # fmt: skip


def measured(records: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return the records of the suites `megatron` and `megatron_documents` as lines of text.

    Times are seconds of a forward and a backward, medians over batches of documents. Bytes are sent
    by a rank in a run without compute.
    """
    cells: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = {}
    for record in records:
        cell = record["cell"]
        key = f"{cell['nodes']}x{cell['per_node']}", cell["mask"].partition(" seed")[0]
        cells.setdefault(key, {}).setdefault(cell["regime"], []).append(record)
    lines = []
    for key, regimes in cells.items():
        for name in [rival["name"] for rival in regimes["communication"][0]["rivals"]]:
            columns = [text for regime in ("communication", "compute")
                       for text in _seconds(regimes[regime], name)]  # fmt: skip
            sent = [row for record in regimes["communication"] for row in tables.rows(record, name)
                    if row.name == name]  # fmt: skip
            bytes_sent = [f"{median(getattr(row, link)[0] for row in sent):.1f}"
                          for link in ("between", "within")]  # fmt: skip
            lines.append([STANDS_FOR[key], _named(name), *columns, *bytes_sent])
    return lines


def measured_table(lines: Sequence[Sequence[str]]) -> str:
    """Return times relative to ours, without and with compute, one line per setting."""
    by_setting: dict[str, dict[str, str]] = {}
    for setting, name, _, alone, _, computing, *_ in lines:
        ratios = f"{alone.split(' ')[0]} / {computing.split(' ')[0]}"
        by_setting.setdefault(setting, {})[name.split(",")[0]] = ratios
    kinds = ("p2p", "a2a", "a2a+p2p")
    heads = ["without / with compute", *(f"`{kind}`" for kind in kinds)]
    rows = [[setting, *(named[kind] for kind in kinds)] for setting, named in by_setting.items()]
    return markdown(heads, rows)


def _named(name: str) -> str:
    return name.removeprefix("Megatron ") if "Megatron" in name else f"ours: {name}"


def _seconds(records: Sequence[dict[str, Any]], name: str) -> tuple[str, str]:
    """Return median seconds, and their ratio to `auto`'s seconds, run by run, with quartiles."""
    times = [tables.totals(record) for record in records]
    ours = next(algorithm for algorithm in times[0] if "auto" in algorithm)
    ratios = [a / b for runs in times for a, b in zip(runs[name], runs[ours], strict=True)]
    middle = median(median(runs[name]) for runs in times)
    return f"{middle:.2f} s", "1.00" if name == ours else spread(ratios)


def write_measured(lines: Sequence[Sequence[str]], source: str, folder: Path) -> None:
    """Write the page's table of measurements and the data file."""
    write_section(folder / "gain.md", "emulated", f"{measured_table(lines)}\n\n{source}")
    record = {"source": source, "columns": MEASURED, "rows": lines}
    (folder / "data" / "gain-emulated.json").write_text(json_record(record) + "\n")


def provenance(records: Sequence[dict[str, Any]]) -> str:
    """Return commands, machine, date and load of the records."""
    load = [entry for record in records for entry in record["load"]]
    commands = dict.fromkeys(
        "python -m benchmarks.cluster " + re.sub(r" --out \S+", "", record["command"])
        for record in records
    )
    batches = len({record["cell"]["mask"] for record in records} - {"causal"})
    return (
        f"{' and '.join(f'`{entry}`' for entry in commands)}; {records[0]['machine']}; load "
        f"{min(load):.0f} to {max(load):.0f} while it ran; {batches} batches of documents."
    )


def main(words: Sequence[str] | None = None) -> int:
    """Run the command and return 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gain", description=__doc__)
    parser.add_argument("--out", type=Path, default=DOCS, help="folder of gain.md and gain.png")
    parser.add_argument("--emulated", type=Path, nargs="+", metavar="X.json",
                        help="write only what `benchmarks.cluster compare` recorded")  # fmt: skip
    args = parser.parse_args(words)
    (args.out / "data").mkdir(parents=True, exist_ok=True)
    if args.emulated:
        records = [cell for path in args.emulated for cell in json.loads(path.read_text())["cells"]]
        write_measured(measured(records), provenance(records), args.out)
        return 0
    all_rows = [row for workload in WORKLOADS for row in rows(workload)]
    (args.out / "gain.md").touch()
    write(all_rows, args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
