"""docs/gain.md says what `make gain` writes; its first workload, which takes seconds."""

from __future__ import annotations

import json

import pytest

from benchmarks import gain
from benchmarks.report import DOCS


@pytest.fixture(scope="module")
def rows():
    return gain.rows(gain.WORKLOADS[0])


def _cells(line):
    return tuple(cell.strip() for cell in line.split("|"))


def test_the_page_is_what_is_written(rows):
    page = {_cells(line) for line in (DOCS / "gain.md").read_text().splitlines()}
    made = [_cells(line) for line in gain.table(rows).splitlines() if "---" not in line]
    assert [line for line in made if line not in page] == []
    assert len(made) == 2


def test_the_data_file_has_every_row(rows):
    stored = json.loads((DOCS / "data" / "gain.json").read_text())
    assert stored["columns"] == list(gain.COLUMNS)
    assert stored["rows"][: len(rows)] == gain.details(rows)
    assert stored["commands"] == [workload.command for workload in gain.WORKLOADS]
