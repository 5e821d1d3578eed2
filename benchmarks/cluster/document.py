"""What a benchmark leaves behind: `X.md` to read, `X-tables.md` with every number, `X.png` and
`X.json`, from which the others are made.

On the page, only what lies between two markers is written here. The words around them are written
by hand and stay; a page that does not exist yet is all markers.
"""

from __future__ import annotations

from pathlib import Path

from . import heatmap, results, table
from .results import Results, Run

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
COMPARED = "<!-- compared: begin -->", "<!-- compared: end -->"  # `comparison_page`'s
EMPTY = f"# Measured on an emulated cluster\n\n{BEGIN}{END}\n\n{''.join(COMPARED)}\n"
FIGURE = (
    "Heat map: a row per setting, a column per algorithm, coloured by the time over that of the "
    "fastest algorithm"
)
READING = """\
A row is one setting. A label is the median time of forward and backward over that of the fastest
fixed algorithm of its row: 1.00 is the fastest, 2.00 takes twice as long. The last column says how
far the fastest of burst and `auto` is from its own limit, which no schedule of the same bytes and
FLOPs can beat. "4 chunks" are head chunks."""
COLUMNS = """\
*limit*: max(compute, bytes over intra links / their rate, bytes over inter links / their rate) of
the busiest rank, forward and backward summed, at the highest rates that a plain transfer or any
algorithm reached in the same setting. *Over the best burst*, *over the best fixed*: the time over
that of the fastest burst, and over that of the fastest algorithm that is not `auto`, repeat by
repeat (smallest to largest). *Predicted*: what the simulator says at the rates that were measured
in the setting. *Kernel bytes over formula*: what the kernel's counters say beyond the schedule's
payload."""


def tables(page: Path) -> Path:
    return page.with_name(f"{page.stem}-tables.md")


def write(found: Results, page: Path) -> None:
    """All four files; refuses a page that has text but no markers before it writes any."""
    text = with_block(page.read_text() if page.exists() else None, block(found, page), page)
    results.save(found, page.with_suffix(".json"))
    heatmap.draw(found, page.with_suffix(".png"))
    tables(page).write_text(appendix(found, page))
    page.write_text(text)


def with_block(text: str | None, body: str, page: Path) -> str:
    """The page with its measured block replaced."""
    return replaced(text, (BEGIN, END), body, page)


def replaced(text: str | None, markers: tuple[str, str], body: str, page: Path) -> str:
    """The page with `body` between two markers; ValueError if it lacks them."""
    before, found, rest = (EMPTY if text is None else text).partition(markers[0])
    _, closed, after = rest.partition(markers[1])
    if not (found and closed):
        raise ValueError(f"--doc: {page} has text but not the markers {' and '.join(markers)}")
    return f"{before}{markers[0]}\n{body}{markers[1]}{after}"


def block(found: Results, page: Path) -> str:
    """What the page shows of these results: the figure, how to read it, and counts."""
    count = len(found.cells)
    counted = [*map(str, table.goals(found.cells)), table.simulator(found.cells)]
    return (
        f"![{FIGURE}]({page.with_suffix('.png').name})\n\n{READING}\n\n"
        + "".join(f"- {line}.\n" for line in counted)
        + f"\n{count} setting{'s' * (count != 1)}, measured on {'; '.join(_machines(found))}. "
        f"[{tables(page).name}]({tables(page).name}) has all times, quartiles and commands.\n"
    )


def appendix(found: Results, page: Path) -> str:
    """Every number, and the commands that measured them."""
    parts = [
        "# Tables of the emulated cluster",
        f"`python -m benchmarks.cluster document --doc {page.name}` writes this page from "
        f"`{page.with_suffix('.json').name}`; what the numbers say is in [{page.name}]"
        f"({page.name}).",
        COLUMNS,
        "## Settings that miss a goal",
        "\n\n".join(
            f"{goal}." + "".join(f"\n- {value:.2f} in {name}" for name, value in goal.missed)
            for goal in table.goals(found.cells)
        ),
        "## Commands",
        *(_commands(found.runs, machine) for machine in _machines(found)),
        "## Measurements",
    ]
    cells = "\n".join(f"{table.markdown(cell)}\nRun {cell.run + 1}.\n" for cell in found.cells)
    return "\n\n".join(parts) + f"\n\n{cells}"


def _machines(found: Results) -> list[str]:
    return list(dict.fromkeys(run.machine for run in found.runs))


def _commands(runs: tuple[Run, ...], machine: str) -> str:
    lines = [f"Measured on {machine}, by `python -m benchmarks.cluster` with\n"]
    for number, run in enumerate(runs, 1):
        if run.machine == machine:
            note = f" {run.note}" if run.note else ""
            lines.append(f"- Run {number}: `{run.command}`.{note}")
    return "\n".join(lines)
