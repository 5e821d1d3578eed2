"""The figure: one row per cell, one column per rival, the colour says what choosing it costs.

Every label is a number of the tables: a rival's time over that of the fastest fixed rival of its
row, and on the right the fastest of burst and `auto` over its own limit.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .cells import REGIMES
from .results import Kept, Setting

OURS = ("burst", "double_ring, overlapped", "auto")  # double_ring, overlapped is burst, side kv
# Heading, then for each of its columns the second line and the rival's name.
COLUMNS = (
    ("flat ring", (("whole", "ring"), ("4\nchunks", "ring, 4 head chunks"))),
    ("double\nring", (("published", "double_ring, published"),)),
    ("burst,\nside kv", (
        ("whole", "double_ring, overlapped (= burst kv)"),
        ("4\nchunks", "double_ring, overlapped, 4 head chunks"),
    )),
    ("burst,\nside query", (
        ("whole", "burst query"), ("4\nchunks", "burst query, 4 head chunks"),
    )),
    ("all-\ngather", (("", "all_gather"),)),
    ("Ulysses", (("", "ulysses"),)),

    ("hybrid:\nheads shared", (
        ("in the\nnode", "hybrid, heads in the node"),
        ("across\nnodes", "hybrid, heads across nodes"),
    )),
    ("auto", (("any", "auto"), ("one\nring", "auto, on one ring"))),
)  # fmt: skip
BANDS = {
    "communication": "communication: compute takes no time",
    "balanced": "balanced: compute takes as long as burst's busiest links",
    "compute": "compute: compute takes 3 times as long as burst's busiest links",
    "hidden": "hidden: compute takes 6 times as long as burst's busiest links",
    "real": "real: compute is real, on the cores that also carry the links",
}
# Ratio -> colour, in between by its logarithm: green is as good as it gets, darker red is slower.
COLOURS = (
    (0.9, "#5fb7a3"), (1.0, "#93d0bf"), (1.1, "#dcf0e8"), (1.25, "#fdf4de"), (1.6, "#fbd5a5"),
    (2.5, "#f18f63"), (5.0, "#c8403f"), (9.0, "#7c1d32"),
)  # fmt: skip
DARK = 2.8  # labels of larger ratios are white
INK, FAINT, NOTHING = "#1f2933", "#66727f", "#eef0f2"
# Inches: of the figure, of a row, of a band's heading; where words start; cells of a pair, alone.
WIDTH, LINE, BAND = 10.6, 0.262, 0.42
WORDS, CELLS = (0.12, 0.68, 1.48, 2.44), 2.56
PAIR, ALONE, BETWEEN = 0.49, 0.58, 0.06
DPI = 190  # twice what a page shows


class Line(NamedTuple):
    """One row of the figure: what it is, and a label per column ("" where nothing was run)."""

    regime: str
    words: tuple[str, ...]  # grid, rates, heads, tokens
    ratios: dict[str, float]  # rival -> time over that of the fastest fixed rival
    over_limit: float | None


def lines(settings: Iterable[Setting]) -> list[Line]:
    """The settings, by regime, grid, rates (fastest first), heads and tokens."""
    order = (*REGIMES, "real")

    def key(found: Setting) -> tuple[Any, ...]:
        cell = found.cell
        place = order.index(cell.regime), cell.nodes, cell.per_node, -cell.rates.inter
        return *place, cell.heads != "MHA", cell.heads, cell.tokens

    return [_line(found) for found in sorted(settings, key=key)]


def _line(found: Setting) -> Line:
    cell = found.cell
    best = None if found.gflops is None else fastest(found)
    return Line(
        cell.regime,
        (f"{cell.nodes} x {cell.per_node}", str(cell.rates), cell.heads, str(cell.tokens)),
        {kept.rival: kept.over_fixed for kept in found.rivals},
        best and best.over_limit,
    )


def fastest(found: Setting) -> Kept | None:
    """Of burst and `auto`; None if neither was run."""
    ours = [kept for kept in found.rivals if kept.rival.startswith(OURS)]
    return min(ours, key=lambda kept: kept.seconds, default=None)


def digest(settings: Iterable[Setting]) -> str:
    """Of all that the figure shows; `draw` writes it into the file, where a test finds it."""
    shown = [lines(settings), COLUMNS, BANDS]
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()


def draw(settings: Sequence[Setting], path: Path) -> None:
    """The figure, as a PNG."""
    from matplotlib.figure import Figure

    rows = lines(settings)
    top, bottom = 1.75, 0.12
    height = top + LINE * len(rows) + BAND * len({row.regime for row in rows}) + bottom
    figure = Figure(figsize=(WIDTH, height))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(height, 0))
    axes.axis("off")
    title = "Forward + backward: time over that of the fastest fixed algorithm of the row"
    _text(axes, WORDS[0], 0.24, title, size=12, weight="bold", ha="left")
    _legend(axes, 0.45)
    places = _headings(axes, top)
    y, regime = top, ""
    for row in rows:
        if row.regime != regime:
            regime = row.regime
            _text(axes, WORDS[0], y + 0.25, BANDS[regime], size=9.5, weight="bold", ha="left")
            y += BAND
        _draw_line(axes, row, places, y)
        y += LINE
    _save(figure, path, digest(settings))


def _save(figure: Any, path: Path, description: str) -> None:
    """As a PNG of few colours, a quarter of the size of all of them."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    figure.set_dpi(DPI)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    words = PngInfo()
    words.add_text("Description", description)
    image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB").quantize(128)
    image.save(path, optimize=True, pnginfo=words)


def _headings(axes: Any, bottom: float) -> dict[str, tuple[float, float]]:
    """Rival -> left edge and width of its column; "" is the last one."""
    places, x = {}, CELLS
    for heading, group in COLUMNS:
        left, width = x, PAIR if len(group) > 1 else ALONE
        for second, name in group:
            places[name] = x, width
            if second:
                _text(axes, x + width / 2, bottom - 0.12, second, size=8, color=FAINT)
            x += width
        _text(axes, (left + x) / 2, bottom - 0.58, heading, size=9, weight="bold")
        x += BETWEEN
    places[""] = x, ALONE
    _text(axes, x + ALONE / 2, bottom - 0.58, "over\nits limit", size=9, weight="bold")
    _text(axes, x + ALONE / 2, bottom - 0.12, "burst\nor auto", size=8, color=FAINT)
    _words(axes, ("nodes x\nranks", "bit/s", "heads", "tokens"), bottom - 0.12, 8, FAINT)
    return places


def _draw_line(axes: Any, row: Line, places: dict[str, tuple[float, float]], y: float) -> None:
    middle = y + LINE / 2
    _words(axes, row.words, middle, 8.5, INK)
    best = min(ratio for name, ratio in row.ratios.items() if not name.startswith("auto"))
    for name, (x, width) in places.items():
        if not name:
            continue
        ratio = row.ratios.get(name)
        _box(axes, x, y, width, NOTHING if ratio is None else _colour(ratio))
        if ratio is not None:
            _text(
                axes, x + width / 2, middle, f"{ratio:.2f}", size=8.5,
                weight="bold" if ratio <= best else "normal",
                color="white" if ratio > DARK else INK,
            )  # fmt: skip
    if row.over_limit is not None:
        x, width = places[""]
        _text(axes, x + width / 2, middle, f"{row.over_limit:.2f}", size=8.5)


def _words(axes: Any, words: tuple[str, ...], y: float, size: float, colour: str) -> None:
    """What a row is; the tokens are aligned to the right."""
    for place, word in zip(WORDS, words, strict=True):
        side = "right" if place == WORDS[-1] else "left"
        _text(axes, place, y, word, size=size, color=colour, ha=side)


def _legend(axes: Any, y: float) -> None:
    x = WORDS[0]
    for ratio in (0.95, 1.0, 1.1, 1.25, 1.6, 2.5, 5.0, 9.0):
        _box(axes, x, y, PAIR, _colour(ratio))
        _text(axes, x + PAIR / 2, y + LINE / 2, f"{ratio:.2f}", size=8,
              color="white" if ratio > DARK else INK)  # fmt: skip
        x += PAIR
    words = "bold: the fastest, and auto where it is as fast or faster; grey: not run"
    _text(axes, x + 0.12, y + LINE / 2, words, size=8.5, color=FAINT, ha="left")


def _box(axes: Any, x: float, y: float, width: float, colour: Any) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((x, y), width, LINE, facecolor=colour, edgecolor="white", lw=1.2))


def _text(axes: Any, x: float, y: float, words: str, **style: Any) -> None:
    axes.text(x, y, words, **{"ha": "center", "va": "center", "color": INK} | style)


def _colour(ratio: float) -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    ends = math.log(COLOURS[0][0]), math.log(COLOURS[-1][0])

    def place(value: float) -> float:
        return min(max((math.log(value) - ends[0]) / (ends[1] - ends[0]), 0.0), 1.0)

    anchors = [(place(value), colour) for value, colour in COLOURS]
    return LinearSegmentedColormap.from_list("ratio", anchors)(place(ratio))
