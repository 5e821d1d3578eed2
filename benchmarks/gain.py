"""What is gained over Megatron's own context parallelism: six workloads, simulated.

    make gain                        # the table and the chart of docs/gain.md, a minute
    make gain ARGS="--emulated runs/cluster/compared.json"    # what the emulated cluster measured

Every kind of `--cp-comm-type` runs with the parallel sizes with which it is fastest and fits
(`plugins.tools.advise.rivals`), ours with those of `megatron-burst advise`. Attention is compared
at equal sizes besides: those of Megatron's fastest kind. Rows in which ours loses are listed with
the reason; a loss whose reason nobody wrote down is an error.
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
from benchmarks.report import DOCS, markdown, spread, write_section
from megatron_burst.plugins.tools.advise import rivals
from megatron_burst.plugins.tools.advise.advice import Advice
from megatron_burst.plugins.tools.advise.forecast.attention_time import attention_time
from megatron_burst.plugins.tools.advise.search.attention_choice import CHOSEN
from megatron_burst.plugins.tools.advise.search.packed import PackedForecast
from megatron_burst.plugins.tools.advise.settings import Settings
from megatron_burst.units import byte_size, duration

GPU = "h100"
LOST = 0.005  # of a time: less is a tie


class Workload(NamedTuple):
    """seq: tokens of a sequence or a pack; packed: a name of `packed.NAMED`."""

    name: str
    model: str
    gpus: int
    seq: str
    packed: str | None = None

    @property
    def command(self) -> str:
        """What shows ours, and the fastest of Megatron's, to a reader."""
        said = f"megatron-burst advise --model {self.model} --gpus {self.gpus} --gpu {GPU}"
        return f"{said} --seq {self.seq}" + (f" --packed {self.packed}" if self.packed else "")


WORKLOADS = (
    Workload("dense, 128K on 8", "llama3-8b", 8, "128K"),
    Workload("dense, 1M on 64", "llama3-8b", 64, "1M"),
    Workload("packed 32K, median 1K, on 64", "llama3-8b", 64, "32K", "1k-to-32k"),
    Workload("packed 256K, long tail, on 64", "llama3-8b", 64, "256K", "2k-to-512k"),
    Workload("windows and sinks, 128K on 64", "gpt-oss-20b", 64, "128K"),
    Workload("hybrid (gated delta), 256K on 64", "qwen3-next-80b-a3b", 64, "256K"),
)
OURS, EQUAL = "ours", "ours, sizes of Megatron's fastest"
# Why ours loses, by workload and kind, where gradients in fp32 are not the reason; a loss that is
# not here is an error.
REASONS: dict[tuple[str, str], str] = {
    ("dense, 128K on 8", "a2a"): "`auto` takes 1.5 % for a tie, and of a tie the simplest: a ring. "
    "`--burst-ulysses-size 4` exchanges heads as Megatron does.",
    ("dense, 128K on 8", "all_gather"): "Most of it are gradients, which travel in fp32; the rest "
    "is that a gather waits once, a ring at each hop. With compute, which hides hops and no "
    "gather, ours is faster.",
    ("dense, 1M on 64", "a2a+p2p"): "`auto` takes 1.5 % for a tie, and of a tie what sends least "
    "between nodes: 2 ranks that share heads. `--burst-ulysses-size 4` with bf16 gradients is as "
    "fast.",
}


class Row(NamedTuple):
    """One kind of a workload. step: seconds at the sizes of `run`, where it is fastest; attention,
    alone: of one call of a layer at equal sizes, with compute and with compute that takes no time;
    refused: why it does not run at the equal sizes; narrow: attention and alone of ours where
    gradients travel in bf16, as Megatron's do."""

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
    """Megatron's kinds, ours at the sizes of the fastest of them, and ours at its own."""
    found = mb.advise(workload.model, GPU, gpus=workload.gpus, seq=workload.seq,
                      packed=workload.packed, top=1)  # fmt: skip
    model, cluster, lengths = found.model, found.cluster, found.lengths
    own: dict[rivals.Kind, rivals.Rival | None] = {
        kind: rivals.fastest(model, cluster, found.want, (kind,), lengths) for kind in rivals.KINDS
    }
    ran = [each for each in own.values() if each is not None]
    best = min(ran, key=lambda each: each.time.seconds if each.time else math.inf).run
    assert best is not None
    free = replace(cluster, rates=replace(cluster.rank_rates(), compute=math.inf, launch=0.0))
    made = []
    for kind, each in own.items():
        row = Row(workload, kind, refused=rivals.refused(kind, model, cluster, best))
        if each is not None and each.run is not None and each.time is not None:
            row = row._replace(run=each.run, recompute=each.recompute, step=each.time.seconds,
                               bytes=each.bytes)  # fmt: skip
        if not row.refused:
            run = rivals.settings(kind, model, cluster, replace(best, seq=found.want.seq), lengths)
            row = row._replace(**{
                name: rivals.attention(kind, model, where, run, lengths=lengths).seconds
                for name, where in (("attention", cluster), ("alone", free))
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
        said(equal.best.run),
        equal.best.seconds,
        equal.best.account.peak.bytes,
        *attention_of(equal, equal.best.run, free),
    )
    narrow = replace(equal.best.run, wire="bf16")
    at_equal = at_equal._replace(narrow=attention_of(equal, narrow, free))
    ours = Row(workload, OURS, found.best.run, said(found.best.run), found.best.seconds,
               found.best.account.peak.bytes)  # fmt: skip
    return [*made, at_equal, ours]


def attention_of(found: Advice, run: Settings, free: mb.Cluster) -> tuple[float, float]:
    """Seconds of one attention call of ours, with compute and without."""
    if not found.lengths:
        model, cluster = found.model, found.cluster
        both = (attention_time(model, where, run) for where in (cluster, free))
    else:
        chosen = {name: getattr(run, name) for name in CHOSEN}
        both = (PackedForecast(found.model, where, chosen, found.lengths).timed(run)
                for where in (found.cluster, free))  # fmt: skip
    first, second = both
    return first.seconds, second.seconds


def said(run: Settings) -> str:
    """What ours recomputes and stores."""
    if run.recompute == "none":
        return "none"
    moved = ", inputs on the host" if run.offload else ""
    return f"full, store {run.store:g}{moved}"


# --- the page ------------------------------------------------------------------------------------

COLUMNS = ("workload", "context parallelism", "TP x PP x CP x DP", "recompute", "step",
           "over ours", "GPU memory", "attention", "without compute")  # fmt: skip


def table(found: Sequence[Row]) -> str:
    """All rows."""
    lines = []
    for row in found:
        ours = next(r for r in found if (r.workload, r.name) == (row.workload, OURS))
        run, first = row.run, row.name == rivals.KINDS[0]
        sizes = f"{run.tp} x {run.pp} x {run.cp} x {run.dp}" if run else "-"
        sizes += " (no CP)" * (run is not None and run.cp == 1)
        lines.append([
            row.workload.name if first else "",
            f"`{row.name}`" if row.name in rivals.KINDS else row.name,
            sizes, row.recompute or "-",
            duration(row.step) if run else "not possible",
            f"{row.step / ours.step:.2f}" if run else "-",
            byte_size(row.bytes) if run else "-",
            *(duration(each) if each == each else "-" for each in (row.attention, row.alone)),
        ])  # fmt: skip
    return markdown(COLUMNS, lines)


def losses(found: Sequence[Row]) -> Iterator[str]:
    """Every row in which ours is slower than one of Megatron's kinds. ValueError where a reason is
    missing."""
    for row in found:
        mine = {r.name: r for r in found if r.workload == row.workload}
        if row.name not in rivals.KINDS:
            continue
        equal = mine[EQUAL]
        pairs = (("step", row.step, mine[OURS].step, mine[OURS].step),
                 ("step at its sizes", row.step if alike(row, equal) else math.nan, equal.step,
                  equal.step),
                 ("attention", row.attention, equal.attention, equal.narrow[0]),
                 ("attention without compute", row.alone, equal.alone,
                  equal.narrow[1]))  # fmt: skip
        lost = [each for each in pairs if slower(each[2], each[1])]
        if not lost:
            continue
        what = ", ".join(f"{name} {own / theirs - 1:.1%}" for name, theirs, own, _ in lost)
        reason = REASONS.get((row.workload.name, row.name), "")
        if not any(slower(narrow, theirs) for _, theirs, _, narrow in lost):
            reason = "Gradients travel in fp32; in bf16, as Megatron's do, ours does not lose."
        if not reason:
            raise ValueError(f"{row.workload.name}, {row.name}: ours loses {what}, even with bf16 "
                             f"gradients {equal.narrow}: REASONS must say why")  # fmt: skip
        yield f"- {row.workload.name}, `{row.name}`: ours takes longer by {what}. {reason}"


def alike(row: Row, other: Row) -> bool:
    """Whether both run with the same parallel sizes."""
    return row.run is not None and all(
        getattr(row.run, name) == getattr(other.run, name)
        for name in ("tp", "pp", "cp", "dp", "ep")
    )


def slower(ours: float, theirs: float) -> bool:
    """By more than a tie; False where one of them did not run."""
    return ours > theirs * (1 + LOST)


def refusals(found: Sequence[Row]) -> Iterator[str]:
    """Why kinds do not run."""
    for row in found:
        if row.refused:
            other = " (with the sizes in the table it runs)" if row.run and row.run.cp > 1 else ""
            yield f"- {row.workload.name}, `{row.name}`: {row.refused}{other}."


def section(found: Sequence[Row]) -> str:
    """The generated part of the page."""
    commands = [
        f"- {each.name}: `{each.command}`" for each in dict.fromkeys(r.workload for r in found)
    ]
    return "\n".join([
        table(found), "", "**Where ours loses.**", "", *(list(losses(found)) or ["- nowhere"]), "",
        "**What does not run.**", "", *refusals(found), "",
        "**Commands.** All: `make gain`. One workload, ours and the fastest of Megatron's:", "",
        *commands,
    ])  # fmt: skip


def draw(found: Sequence[Row], path: Path) -> None:
    """Step times over ours, a group of bars for each workload."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from megatron_burst.plugins.tools.show.colours import GREY, INK, RANKS, RULE

    works = list(dict.fromkeys(row.workload for row in found))
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
            mine = {row.name: row for row in found if row.workload == work}
            for j, name in enumerate(names):
                at, row = i - 0.4 + (j + 0.5) * high, mine[name]
                if row.run is None:
                    axis.text(0.015, at, f"{name}: not possible", va="center", fontsize=7.5)
                    continue
                ratio = row.step / mine[OURS].step
                axis.barh(at, ratio, 0.92 * high, color=colours[name])
                told = f"{ratio:.2f}  {duration(row.step)}" + "  without CP" * (row.run.cp == 1)
                axis.text(ratio + 0.01, at, told, va="center", fontsize=7.5)
        axis.set_yticks(range(len(works)), [work.name.replace(", ", "\n", 1) for work in works])
        axis.set_ylim(len(works) - 0.5, -0.5)
        axis.axvline(1, color=INK, linewidth=0.8)
        axis.set_xlabel("step time over ours (shorter is better), each at its best parallel sizes")
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
MEASURED = ("on the emulated cluster", "", "without compute", "over ours", "with compute",
            "over ours", "MiB between nodes", "within")  # fmt: skip


def measured(records: Sequence[dict[str, Any]]) -> str:
    """Records of the suites `megatron` and `megatron_documents` as a table.

    Seconds of a forward and a backward, and the bytes that a rank sends in a run without compute.
    Of several batches of documents, medians over them.
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
            sent = [row for each in regimes["communication"] for row in tables.rows(each, name)
                    if row.name == name]  # fmt: skip
            bytes_ = [f"{median(getattr(row, link)[0] for row in sent):.1f}"
                      for link in ("between", "within")]  # fmt: skip
            first = STANDS_FOR[key] if not lines or lines[-1][-1] != key else ""
            lines.append([first, _named(name), *columns, *bytes_, key])
    return markdown(MEASURED, [line[:-1] for line in lines])


def _named(name: str) -> str:
    return f"`{name.removeprefix('Megatron ')}`" if "Megatron" in name else f"ours: {name}"


def _seconds(records: Sequence[dict[str, Any]], name: str) -> tuple[str, str]:
    """Seconds, and over those of `auto`, run by run: medians, and the quartiles of the latter."""
    times = [tables.totals(record) for record in records]
    ours = next(each for each in times[0] if "auto" in each)
    ratios = [a / b for each in times for a, b in zip(each[name], each[ours], strict=True)]
    middle = median(median(each[name]) for each in times)
    return f"{middle:.2f} s", "1.00" if name == ours else spread(ratios)


def provenance(records: Sequence[dict[str, Any]]) -> str:
    """How, when and on what, with the load while it ran."""
    load = [each for record in records for each in record["load"]]
    commands = dict.fromkeys(
        "python -m benchmarks.cluster " + re.sub(r" --out \S+", "", record["command"])
        for record in records
    )
    batches = len({record["cell"]["mask"] for record in records} - {"causal"})
    return (
        f"{' and '.join(f'`{each}`' for each in commands)}; {records[0]['machine']}; load "
        f"{min(load):.0f} to {max(load):.0f} while it ran; {batches} batches of documents."
    )


def main(words: Sequence[str] | None = None) -> int:
    """The command; 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gain", description=__doc__)
    parser.add_argument("--out", type=Path, default=DOCS, help="folder of gain.md and gain.png")
    parser.add_argument("--emulated", type=Path, nargs="+", metavar="X.json",
                        help="write only what `benchmarks.cluster compare` recorded")  # fmt: skip
    args = parser.parse_args(words)
    if args.emulated:
        records = [one for path in args.emulated for one in json.loads(path.read_text())["cells"]]
        print(measured(records))
        text = f"{measured(records)}\n\n{provenance(records)}"
        write_section(args.out / "gain.md", "emulated", text)
        return 0
    found = [row for each in WORKLOADS for row in rows(each)]
    print(table(found))
    (args.out / "gain.md").touch()
    write_section(args.out / "gain.md", "simulated", section(found))
    draw(found, args.out / "gain.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
