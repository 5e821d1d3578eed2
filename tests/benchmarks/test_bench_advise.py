"""`make bench-advise`: tables are whole, figures are what they were, and the page says them."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.advise import __main__ as bench
from benchmarks.advise import emulated
from benchmarks.advise.published_tables import NAMES, table
from benchmarks.advise.section import Figure, Point, Section, spread

PAGE = Path(__file__).resolve().parents[2] / "docs" / "advise-accuracy.md"
ROWS = {
    "burstengine_attention_tflops": 4,
    "burstengine_table2_ablation": 6,
    "burstengine_table3_sparse": 3,
    "burstengine_table5_intra_node": 4,
    "easycontext_llama2_7b_a100": 5,
    "fpdt_table1_max_context": 5,
    "loongtrain_table2_end_to_end": 64,
    "loongtrain_table4_attention_ms": 96,
    "magi_document_lengths": 14,
    "magi_h100": 64,
    "nemo_llama2_7b_h100": 9,
    "nemo_llama3_8b_b200": 8,
    "ring_flash_attention": 4,
    "torchtitan_llama3_h100": 8,
    "trl_qwen3_8b_h100": 1,
}


@pytest.fixture(scope="module")
def rows():
    """All cells of the emulated cluster with their predictions."""
    return emulated.predicted(emulated.Host(), emulated.measured())


def test_published_tables_are_whole():
    assert set(NAMES) == set(ROWS)
    for name, count in ROWS.items():
        found = table(name)
        assert len(found) == count, name
        assert all(value for row in found for value in row.values()), name


def test_errors_by_hand():
    points = [Point("a", 100.0, 110.0), Point("b", 10.0, 9.5), Point("c", 1.0, 1.0)]
    found = spread(points)
    assert [round(p.error, 9) for p in points] == [0.1, -0.05, 0.0]
    assert (round(found.median, 9), round(found.worst, 9)) == (0.05, 0.1)
    assert round(found.p90, 9) == 0.09  # nine tenths of the way: 0.05 + 0.8 x 0.05


def test_emulated_cells_are_predicted_as_well_as_the_page_says(rows):
    assert len(rows) == 308
    assert rows[-1].place + 1 == 35
    off = spread([row.point for row in rows])
    assert off.median < 0.015
    assert off.p90 < 0.06
    found = emulated.ranking(rows)
    assert found.pairs == 1206
    assert len(found.wrong) <= 18


def test_two_level_rings_are_not_off_to_one_side(rows):
    """Neither double rings too long nor Burst too short, whatever the cells are bound by; cells
    that compute for real, of which there are two, are apart."""
    found = {}
    for row in rows:
        if row.rival.startswith(("double_ring", "burst")):
            found.setdefault((row.rival, row.cell.regime), []).append(row.point.error)
    assert sum(map(len, found.values())) == 164  # 2 x 33 + 2 x 35 + 28
    whole = {key: off for key, off in found.items() if key[1] != "real"}
    assert max(abs(sorted(off)[len(off) // 2]) for off in whole.values()) < 0.035
    assert max(max(off) for off in whole.values()) < 0.05  # none is much too long


def test_links_alone_give_the_flat_rings_time():
    """2 x 4 ranks, 8 MiB per hop at 25 MB/s between nodes: 7 hops of the slowest link."""
    still = emulated.Host(1.0, 1.0, 1e-12, 1e-12, 1e-20, 1e-20, 1e-12, 1e-20, 1e-12, 1e15)
    row = emulated.measured()[0]
    assert (row.rival, row.cell.regime) == ("ring", "communication")
    forward, backward = emulated.predict(still, row.cell, emulated.WAYS["ring"], 0.0)
    hop = 1024 * 16 * 64 * 2 * 4 / 25e6
    assert math.isclose(forward, 7 * hop, rel_tol=1e-6)
    assert math.isclose(backward, 14 * hop, rel_tol=1e-6)


def test_rankings_by_hand():
    one = emulated.measured()[0]
    cells = [
        one._replace(rival="a", seconds=1.00, predicted=(1.0, 0.0)),
        one._replace(rival="b", seconds=1.02, predicted=(0.9, 0.0)),  # too near to a
        one._replace(rival="c", seconds=1.10, predicted=(0.5, 0.45)),  # wrong beside a
    ]
    found = emulated.ranking(cells)
    assert found.pairs == 2
    assert [(name, other) for _, name, other, _, _ in found.wrong] == [("a", "c")]


def test_the_data_file_and_the_page_have_every_figure(rows):
    stored = json.loads((PAGE.parent / bench.DATA).read_text(encoding="utf-8"))
    sections = [Section(**record) for record in stored.values() if record["name"] != bench.SPEED]
    assert [section.name.replace("-", "_") for section in sections] == list(bench.SECTIONS)
    sections = [
        replace(section, figures=[Figure(*figure) for figure in section.figures])
        for section in sections
    ]
    assert bench.summary(sections) in PAGE.read_text(encoding="utf-8"), "run `make bench-advise`"
    emulated_now = emulated.section(emulated.Host(), rows)
    assert list(emulated_now.figures) == sections[-1].figures
    assert emulated_now.rows == sections[-1].rows
    not_empty = [section.rows and section.figures for section in sections]
    assert all(not_empty)


def test_every_section_has_a_module():
    for name in (*bench.SECTIONS, bench.SPEED):
        assert callable(bench.runner(name))


def test_a_page_is_written(tmp_path, monkeypatch):
    one = Section(
        "one", "One", ["Words."], ["row"], [["first"], ["second"]],
        [Figure("error", "2 %", "3 %", True), Figure("worst", "9 %", "5 %", False)],
    )  # fmt: skip
    monkeypatch.setattr(bench, "SECTIONS", ("one", "two"))
    bench.write([one], tmp_path)
    assert json.loads((tmp_path / bench.DATA).read_text())["one"]["rows"] == [["first"], ["second"]]
    bench.write([replace(one, name="two")], tmp_path)
    assert set(json.loads((tmp_path / bench.DATA).read_text())) == {"one", "two"}
    assert "second" in one.markdown()
    assert "**error**: 2 % (target: 3 %: met)" in one.markdown()
    lines = bench.summary([one]).splitlines()
    assert lines[0] == "1 of 2 targets are met."
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[4:]]
    assert cells == [["One", "error", "2 %", "3 %"], ["", "worst", "9 %", "5 % (missed)"]]
