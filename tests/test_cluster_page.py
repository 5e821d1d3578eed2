"""docs/cluster.md, its tables and its figure: what the generator makes of docs/cluster.json; and
every figure of a finding is the number of the table that it stands for."""

import re
import shlex
from pathlib import Path

import pytest

from benchmarks.cluster import __main__ as command
from benchmarks.cluster import comparison, comparison_page, document, heatmap, results
from benchmarks.cluster.cells import RIVALS, Cell

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
    known = [Cell._field_defaults | found.cell for found in FOUND.cells]
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
    assert len(text.splitlines()) <= 310


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


# --- comparisons ---------------------------------------------------------------------------


def settings(suite, grid, mask, **more):
    """The settings of a suite on a grid whose mask begins so."""
    found = [
        c for c in COMPARED.cells
        if c.suite == suite and f"{c.cell['nodes']}x{c.cell['per_node']}" == grid
        and c.cell["mask"].startswith(mask) and more.items() <= c.cell.items()
    ]  # fmt: skip
    assert found, f"no {suite} {grid} {mask} {more}"
    return found


def fastest(cell, way):
    """Of the entries of a setting: that of a way with its best head chunks."""
    some = [e for e in cell.entries if comparison_page.family(e.name) == way]
    return min(some, key=lambda e: sorted(e.seconds)[len(e.seconds) // 2])


def figures():
    """Those of the comparisons, in the order of the page."""
    for name in ("500", "1K"):
        for grid in GRIDS[1:]:
            found = comparison_page.summarized(
                settings("documents", grid, f"documents {name} "), "multicast"
            )
            yield from (*found["gain"], found["permitted"][0])
    for name in ("500", "1K"):
        for grid in GRIDS[1:]:
            batch = settings("documents", grid, f"documents {name} ")
            yield comparison_page.summarized(batch, "burst")["gain"][0]
    over = [
        comparison_page.summarized(settings("documents", grid, f"documents {name} "), "multicast")
        for name in ("500", "1K")
        for grid in GRIDS[1:]
    ]
    yield min(found["over"][0] for found in over)
    yield max(found["over"][0] for found in over)
    for grid, mask, wire in TILES:
        (cell,) = settings("tiles", grid, mask, wire=wire)
        yield 1 / fastest(cell, "tile").ratio.middle
    for way in ("two_way", "token_ring"):
        for mask in ("full", "causal"):
            (cell,) = settings("two_ways", "1x4", mask, wiring="node")
            yield 1 / fastest(cell, way).ratio.middle
    for way in ("two_way", "token_ring"):
        (cell,) = settings("two_ways", "1x4", "full", wiring="nic")
        yield 1 / fastest(cell, way).ratio.middle
    for wiring in ("nic", "node"):
        (cell,) = settings("two_ways", "2x4", "full", wiring=wiring)
        yield 1 / fastest(cell, "two_way").ratio.middle
    for mask in ("causal", "window", "blocks"):
        (cell,) = settings("multicast", "2x4", mask)
        for way in ("multicast", "burst"):
            yield fastest(cell, way).ratio.middle


TILES = [
    ("4x2", "full", "fp32"), ("4x4", "full", "fp32"), ("4x2", "causal", "fp32"),
    ("4x2", "full", "bf16"), ("4x2", "causal", "bf16"),
]  # fmt: skip


def test_every_figure_of_the_comparisons_is_that_of_the_data():
    """The sentences between the tables, the commands left out."""
    before, _, rest = section("Comparisons").partition(document.COMPARED[0])
    words = before + rest.partition(document.COMPARED[1])[2]
    words = re.sub(r"(?m)^    .*$", "", words)
    assert re.findall(r"\d+\.\d\d", words) == [f"{value:.2f}" for value in figures()]


def test_multicast_sends_between_nodes_what_the_layout_needs_and_no_more():
    found = [
        e for cell in COMPARED.cells for e in cell.entries
        if e.name == "multicast" and cell.suite in ("documents", "multicast")
    ]  # fmt: skip
    assert len(found) > 40
    assert all(abs(e.between[0] - e.least) < 0.002 for e in found)
