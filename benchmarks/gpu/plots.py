"""From records to pictures beside the document: rates over shard length, and the rest as bars."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.report import human, quartiles

from .tables import rate

Record = dict[str, Any]
STYLE: dict[str, Any] = {"metadata": {"Software": None}, "dpi": 110}
COLOURS = ("#117733", "#44aa99", "#332288", "#ddcc77", "#cc6677", "#88ccee", "#999933", "#882255")


def draw(results: Record, folder: Path) -> list[str]:
    """Write what there is to draw; the names of the files."""
    folder.mkdir(parents=True, exist_ok=True)
    records = list(results["jobs"].values())
    names = []
    for name, function, kinds in (
        ("gpu-attention.png", _attention, ("attention",)),
        ("gpu-rest.png", _rest, ("ring", "lm head", "store")),
    ):
        chosen = [record for record in records if record["kind"] in kinds and record["runs"]]
        if chosen:
            function(chosen).savefig(folder / name, **STYLE)
            names.append(name)
    return names


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _attention(records: list[Record]) -> Any:
    """A row per mask, a column per pass; the first ratio of heads that was measured."""
    heads = records[0]["heads"]
    chosen = [record for record in records if record["heads"] == heads]
    masks = list(dict.fromkeys(record["case"] for record in chosen))
    passes = list(dict.fromkeys(run["pass"] for record in chosen for run in record["runs"]))
    who = list(dict.fromkeys(run["who"] for record in chosen for run in record["runs"]))
    figure = _figure(3.2 * len(passes) + 1, 1.9 * len(masks) + 0.8)
    axes = figure.subplots(len(masks), len(passes), squeeze=False, sharey=True)
    for i, mask in enumerate(masks):
        cells = [record for record in chosen if record["case"] == mask]
        for j, name in enumerate(passes):
            _lines(axes[i][j], cells, name, who)
            axes[i][j].set_title(f"{mask}: {name}", fontsize=8, loc="left")
        axes[i][0].set_ylabel("TFLOP/s", fontsize=8)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8)
    title = f"{heads[0]}:{heads[1]} heads, bf16; rates on visible pairs by rows of a shard"
    figure.suptitle(title, fontsize=9)
    return figure


def _lines(axes: Any, cells: list[Record], name: str, who: list[str]) -> None:
    lengths = sorted({record["tokens"] for record in cells})
    for each, colour in zip(who, COLOURS * len(who), strict=False):
        points = sorted(
            (record["tokens"], *quartiles(rate(run)))
            for record in cells
            for run in record["runs"]
            if (run["who"], run["pass"]) == (each, name)
        )
        x = [lengths.index(tokens) for tokens, *_ in points]
        middle = [m for _, _, m, _ in points]
        below = [m - low for _, low, m, _ in points]
        above = [high - m for *_, m, high in points]
        axes.errorbar(x, middle, [below, above], fmt="o-", ms=3, lw=1, color=colour, label=each)
    axes.set_xticks(range(len(lengths)), [human(tokens) for tokens in lengths], fontsize=7)
    axes.tick_params(axis="y", labelsize=7)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


def _rest(records: list[Record]) -> Any:
    """A panel of bars for each ring, LM head and store."""
    bars = [_bars(record) for record in records]
    figure = _figure(4.6 * len(bars), 0.6 + 0.28 * max(len(values) for _, _, values in bars) + 1)
    for axes, (title, unit, values) in zip(
        figure.subplots(1, len(bars), squeeze=False)[0], bars, strict=True
    ):
        axes.barh(range(len(values)), [value for _, value in values], color=COLOURS[1])
        axes.set_yticks(range(len(values)), [label for label, _ in values], fontsize=7)
        axes.invert_yaxis()
        axes.set_title(title, fontsize=9, loc="left")
        axes.set_xlabel(unit, fontsize=8)
    return figure


def _bars(record: Record) -> tuple[str, str, list[tuple[str, float]]]:
    if record["kind"] != "ring":
        title = "LM head and loss" if record["kind"] == "lm head" else "step by what is stored"
        values = [(run["who"], 1e3 * quartiles(run["seconds"])[1]) for run in record["runs"]]
        return title, "ms", values
    values = [
        (
            f"{run['kernel']}, {run['side']}, {name}",
            100 * (1 - sum(run[name]["calls"]) / sum(run[name]["seconds"])),
        )
        for run in record["runs"]
        for name in ("forward", "backward")
    ]
    ranks = f"ring of {record['nodes']} x {record['per_node']}, {human(record['tokens'])} rows each"
    return ranks, "% of the time outside kernel calls", values
