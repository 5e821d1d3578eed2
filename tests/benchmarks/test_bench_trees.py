"""`make bench-trees`: counts by hand, and docs/trees.md says what it prints."""

from __future__ import annotations

from statistics import median

import numpy as np
import pytest

from benchmarks import trees
from benchmarks.report import DOCS


def _cells(line):
    return tuple(cell.strip() for cell in line.split("|"))


def _on_the_page(table):
    page = {_cells(line) for line in (DOCS / "trees.md").read_text().splitlines()}
    made = [line for line in table.splitlines() if line.startswith("|") and "---" not in line]
    assert made
    assert [line for line in made if _cells(line) not in page] == []


def test_what_samples_of_one_prompt_save_by_hand():
    found = trees.saved(trees.COUNTED["8 samples x 12.8K, 75 % shared"].drawn())
    assert found.tree.rows == 9600 + 8 * 3200
    separate = 8 * 12800 * 12801 // 2
    merged = 9600 * 9601 // 2 + 8 * (3200 * 9600 + 3200 * 3201 // 2)
    assert (found.tokens, found.pairs) == (102400 / 35200, separate / merged)


def test_the_page_has_the_counts():
    _on_the_page(trees.counts())


@pytest.mark.slow
def test_the_page_has_the_simulated_steps():
    _on_the_page(trees.table(shared=True))


def test_lengths_have_the_published_quantiles():
    found = np.array(trees.lengths(10_000, 0))
    assert median(found) == pytest.approx(38 * 1024, rel=0.01)
    for share, length in trees.QUANTILES[1:-1]:
        assert (found <= length).mean() == pytest.approx(share, abs=0.002)
