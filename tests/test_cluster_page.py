"""docs/cluster.md, its tables and its figure: what the generator makes of docs/cluster.json; and
every figure of a finding is the number of the table that it stands for."""

import re
import shlex
from pathlib import Path

import pytest

from benchmarks.cluster import __main__ as command
from benchmarks.cluster import compare, comparison, comparison_page, document, heatmap, results
from benchmarks.cluster.cells import RIVALS

PAGE = Path(__file__).parents[1] / "docs" / "cluster.md"
FOUND = results.load(PAGE.with_suffix(".json"))
COMPARED = comparison.load(comparison_page.data(PAGE))
CHUNKS = {"kv": "double_ring, overlapped, 4 head chunks", "query": "burst query, 4 head chunks"}
GRIDS = ("2x2", "2x4", "4x2")


def ratio(grid, heads, regime, rival, column, rates="200M/800M"):
    """A number of the tables, of the first cell that is asked for: "limit", "burst" or "fixed"."""
    for found in FOUND.cells:
        cell = found.cell
        here = f"{cell['nodes']}x{cell['per_node']}", cell["rates"], cell["heads"], cell["regime"]
        if here == (grid, rates, heads, regime):
            row = next(row for row in found.rows if row.name == rival)
            return {"limit": row.over_limit, "burst": row.against[0], "fixed": row.fixed[0]}[column]
    raise AssertionError(f"no {grid} {rates} {heads} {regime}")


def ends(heads, side):
    """Smallest and largest of all grids, without and with balanced compute."""
    ratios = [
        ratio(grid, heads, regime, CHUNKS[side], "burst")
        for grid in GRIDS
        for regime in ("communication", "balanced")
    ]
    return min(ratios), max(ratios)


def expected():
    """The figures of the findings, in the order of the page."""
    mha, gqa, none, some = "MHA", "GQA 4:1", "communication", "balanced"
    yield ratio("2x4", mha, none, "ring", "burst")
    yield ratio("2x4", mha, none, "double_ring, published", "burst")
    yield ratio("2x4", mha, none, CHUNKS["kv"], "burst")
    yield ratio("2x4", mha, some, "ring", "burst")
    yield ratio("2x4", mha, some, "double_ring, published", "burst")
    for grid in GRIDS:
        for rival in ("burst query", CHUNKS["query"]):
            yield ratio(grid, mha, some, rival, "limit")
    for rival in ("auto", CHUNKS["kv"]):
        yield ratio("2x4", "GQA 32:8", some, rival, "limit", "50M/200M")
    yield ratio("2x4", gqa, some, CHUNKS["kv"], "burst")
    yield from ends(gqa, "query")
    yield from ends(mha, "kv")
    for regime in (none, some):
        for grid in GRIDS:
            yield ratio(grid, mha, regime, "ulysses", "burst")
    yield ratio("2x4", gqa, none, "hybrid, heads in the node", "burst")
    for rival in ("ring", "ring, 4 head chunks"):
        for heads in (mha, gqa):
            yield ratio("2x2", heads, "hidden", rival, "burst")
    for rival in ("ring", "ring, 4 head chunks"):
        yield ratio("2x2", gqa, "hidden", rival, "burst", "1G/4G")
    yield ratio("2x4", mha, none, "auto", "fixed")
    yield ratio("2x4", mha, none, "auto, on one ring", "fixed")
    for regime in (none, some):
        yield ratio("2x2", gqa, regime, "auto", "fixed", "1G/4G")


def section(title):
    return PAGE.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_every_figure_of_a_finding_is_that_of_the_table():
    words = re.sub(r"(?m)^    .*$", "", section("Findings"))
    assert re.findall(r"\d+\.\d+", words) == [f"{value:.2f}" for value in expected()]


def test_the_commands_of_the_findings_measure_settings_of_the_tables():
    lines = re.findall(r"(?m)^    python -m benchmarks\.cluster (.*)$", section("Findings"))
    assert len(lines) >= 6
    known = [found.cell for found in FOUND.cells]
    for line in lines:
        cells = command._cells(command._parser().parse_args(shlex.split(line)))
        assert all(cell._asdict() | {"rates": str(cell.rates)} in known for cell in cells), line


def test_page_and_tables_are_what_the_generator_writes():
    text = PAGE.read_text()
    assert text == document.with_block(text, document.block(FOUND, PAGE), PAGE)
    assert document.tables(PAGE).read_text() == document.appendix(FOUND, PAGE)
    body = comparison_page.block(COMPARED)
    assert text == comparison_page.with_block(text, body, PAGE)
    everything = comparison_page.everything(COMPARED, PAGE)
    assert comparison_page.appendix(PAGE).read_text() == everything
    assert len(text.splitlines()) <= 240


def test_the_figure_was_drawn_from_the_data():
    image = pytest.importorskip("PIL.Image")
    with image.open(PAGE.with_suffix(".png")) as picture:
        assert picture.text["Description"] == heatmap.digest(FOUND)
        width, height = picture.size
    assert height < 1.5 * width  # it can be read at the width of a page


def test_the_figure_has_a_column_for_every_rival():
    names = [name for _, group in heatmap.COLUMNS for _, name in group]
    assert sorted(names) == sorted(rival.name for rival in RIVALS)


def test_the_figure_shows_each_setting_once_and_what_was_not_run_as_nothing():
    lines = heatmap.lines(FOUND.cells)
    assert len(lines) == len(FOUND.cells)
    assert [line.regime for line in lines] == sorted(
        (line.regime for line in lines), key=[*heatmap.BANDS].index
    )
    line = next(x for x in lines if x.words == ("2 x 4", "50M/200M", "GQA 32:8", "2048"))
    assert line.ratios == {
        "double_ring, overlapped (= burst kv)": 1.29, CHUNKS["kv"]: 1.0, "auto": 0.94,
        "auto, on one ring": 0.94,
    }  # fmt: skip
    assert line.over_limit == 1.07
    assert all(line.over_limit is None for line in lines if line.regime == "real")
