"""From records to a picture beside the document: rates over shard length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.report import human, quartiles

from .tables import rate

Record = dict[str, Any]
PICTURE = "gpu-attention.png"
COLOURS = ("#117733", "#44aa99", "#332288", "#ddcc77", "#cc6677", "#88ccee", "#999933", "#882255")


def draw(results: Record, folder: Path) -> list[str]:
    """Write what there is to draw; the names of the files."""
    records = [r for r in results["jobs"].values() if r["kind"] == "attention" and r["runs"]]
    if not records:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    _attention(records).savefig(folder / PICTURE, metadata={"Software": None}, dpi=110)
    return [PICTURE]


def _attention(records: list[Record]) -> Any:
    """A row per mask, a column per pass; the first ratio of heads that was measured."""
    from matplotlib.figure import Figure

    heads = records[0]["heads"]
    chosen = [record for record in records if record["heads"] == heads]
    masks = list(dict.fromkeys(record["case"] for record in chosen))
    passes = list(dict.fromkeys(run["pass"] for record in chosen for run in record["runs"]))
    who = list(dict.fromkeys(run["who"] for record in chosen for run in record["runs"]))
    size = 3.2 * len(passes) + 1, 1.9 * len(masks) + 0.8
    figure = Figure(figsize=size, layout="constrained")
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
