"""Records into the documentation: tables between two markers of a Markdown file, and a plot.

The words around the markers are written by hand and stay; a file without markers is all tables.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import table

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
COLOURS = {"ring": "#9ca3af", "double_ring": "#ddcc77", "burst": "#117733", "other": "#88ccee"}
Record = dict[str, Any]


def write(results: Record, path: Path) -> None:
    """Put the tables of these results into `path`, and their plot beside it as PNG."""
    plot(results, path.with_suffix(".png"))
    tables = "\n".join(table.markdown(record) for record in results["cells"])
    commands = "".join(f"    python -m benchmarks.cluster {c}\n" for c in results["commands"])
    made = (
        f"Measured on {results['machine']}, by\n\n{commands}\n"
        f"![Medians of every rival beside the limit]({path.with_suffix('.png').name})\n"
    )
    body = f"{BEGIN}\n{table.summary(results['cells'])}\n\n{made}\n{tables}{END}"
    text = path.read_text() if path.exists() else f"{BEGIN}{END}\n"
    before, found, rest = text.partition(BEGIN)
    _, closed, after = rest.partition(END)
    if not (found and closed):
        raise ValueError(f"--doc: {path} has text but not the markers {BEGIN} and {END}")
    path.write_text(before + body + after)


def plot(results: Record, path: Path) -> None:
    """One panel per cell: a bar per rival, its quartiles, and a tick at its limit."""
    from matplotlib.figure import Figure

    cells = results["cells"]
    columns = min(3, len(cells))
    lines = -(-len(cells) // columns)
    longest = max(len(record["rivals"]) for record in cells)
    height = 0.2 * longest + 0.75
    figure = Figure(figsize=(5.2 * columns, height * lines + 0.3), layout="constrained")
    for index, record in enumerate(cells):
        axes = figure.add_subplot(lines, columns, index + 1)
        _panel(axes, record)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _panel(axes: Any, record: Record) -> None:
    rows = table.rows(record)
    places = range(len(rows))
    errors = [
        [row.middle - row.low for row in rows],
        [row.high - row.middle for row in rows],
    ]
    axes.barh(places, [row.middle for row in rows], xerr=errors, height=0.72,
              color=[_colour(row.name) for row in rows], error_kw={"linewidth": 0.8})  # fmt: skip
    for place, row in zip(places, rows, strict=True):
        axes.plot([row.limit] * 2, [place - 0.4, place + 0.4], color="black", linewidth=1.6)
    axes.set_yticks(places, [row.name for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.tick_params(axis="x", labelsize=7)
    cell = record["cell"]
    title = f"{cell['nodes']}x{cell['per_node']}, {cell['heads']}, {cell['rates']}: "
    axes.set_title(title + cell["regime"], fontsize=8.5, loc="left")
    axes.set_xlabel("seconds, forward + backward; black: the limit of that rival", fontsize=7)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _colour(name: str) -> str:
    for start in ("ring", "double_ring", "burst"):
        if name.startswith(start):
            return COLOURS[start]
    return COLOURS["other"]
