"""docs/packed-published.md: its tables are those of the record, parts of which are simulated again.
By hand: documents of a pack, tiles, rows that are added."""

import json

import numpy as np
import pytest

from benchmarks.advise.fitting import errors
from benchmarks.packed.charts import documents, fit, kernel, ours, page, rivals
from benchmarks.packed.charts.__main__ import RECORD
from benchmarks.report import DOCS

FFA = kernel.Kernel(rate=2.0, edge=3.0, flops=4.0, backward=False)


@pytest.fixture(scope="module")
def known():
    return json.loads(RECORD.read_text())


def test_the_page_says_what_was_recorded(known):
    text = (DOCS / "packed-published.md").read_text()
    for name, made in page.SECTIONS.items():
        assert f"<!-- begin {name}: generated -->\n{made(known).strip()}\n<!-- end" in text, name


def test_dense_cells_are_predicted_as_the_record_says(known, monkeypatch):
    alone = tuple(kernel.Kernel(**each) for each in known["kernel"])
    monkeypatch.setattr(rivals, "kernels", lambda name: alone)
    fitted = rivals.Constants(**known["constants"])
    some = [row for row in known["rivals"] if row["ranks"] == 8 and "varlen" not in row["mask"]]
    for row in some[::3]:
        cell = fit.Cell(*(row[name] for name in fit.Cell._fields))
        assert cell.fitted == row["fitted"]
        assert fit.predicted(cell, fitted) == pytest.approx(row["predicted"], abs=0.06)


def test_the_fit_is_as_near_as_it_was(known):
    for was_fitted, median, most in ((True, 0.04, 0.08), (False, 0.06, 0.15)):
        some = [row for row in known["rivals"] if row["fitted"] == was_fitted
                and (row["rival"], row["way"]) != ("allgather", "bwd")]  # fmt: skip
        off = errors([row["predicted"] for row in some], [row["speed"] for row in some])
        assert off.median < median
        assert off.p90 < most


def test_packs_are_whole_and_no_document_is_longer_than_a_quarter(monkeypatch):
    rows = [{"first": "0", "last": "10", "documents": "40"},
            {"first": "90", "last": "110", "documents": "6"}]  # fmt: skip
    monkeypatch.setattr(documents, "table", lambda name: rows)
    found = documents.magi_packs.__wrapped__(160, 4)
    assert [int(each.sum()) for each in found] == [160] * 4
    # 100 tokens are two parts of 40 and one of 20; the shortest have 5.
    assert {int(x) for each in found for x in each} >= {5, 40}
    assert max(int(each.max()) for each in found) == 40
    assert documents.area([3, 2], causal=True) == 6 + 3


def test_a_kernel_is_as_fast_as_it_was_alone(monkeypatch):
    packs = (np.array([8192] * 4), np.array([1024] * 32))
    monkeypatch.setattr(kernel, "magi_packs", lambda pack: packs)
    for each, (causal, packed) in zip(
        kernel.kernels.__wrapped__("FA3"), kernel.ALONE["FA3"], strict=True
    ):
        speeds = [
            each.flops * documents.area(x, True) / each.own(x.astype(float), True).sum() / 1e12
            for x in (np.array([32768]), *packs)
        ]
        assert speeds[0] == pytest.approx(causal)
        assert np.mean(speeds[1:]) == pytest.approx(packed)


def test_rectangles_are_rounded_up_to_tiles():
    # 130 rows are 256; two flops a second: 2 s per pair.
    assert FFA.tiles(np.array(130.0), np.array(5.0)) == 2.0 * 256 * 128
    assert FFA.triangle(np.array(130.0)) == 2.0 * (256 * 384 / 2)
    assert FFA.besides(np.array(130.0), np.array(5.0)) == 2.0 * 3 * 256


@pytest.fixture
def simple(monkeypatch):
    """A kernel of one second per pair, in whole tiles, and 7 seconds for each row that is added."""
    one = kernel.Kernel(1.0, 0.0, 1.0, False)
    monkeypatch.setattr(ours, "kernels", lambda name: (one, one))
    return ours.documents(np.array([512]), 2, True)


def test_rows_are_added_once_for_each_rank_whose_keys_they_see(simple):
    # Two mirrored shares of 256 rows, in tiles of 128: rank 0 has 0 and 3, rank 1 has 1 and 2.
    found = ours.work(simple, row=7.0).seconds[0]
    tile = 128 * 128
    # Of its own, a tile's triangle counts whole; tile 3 sees tile 0.
    assert found.diagonal().tolist() == [3 * tile, 3 * tile]
    assert found[0, 1] == 2 * tile + 7 * 128  # tile 3 sees 1 and 2
    assert found[1, 0] == 2 * tile + 7 * 256  # 1 and 2 see 0


def test_in_one_call_rows_are_added_once(simple):
    four = ours.documents(np.array([1024]), 4, True)
    one_call = np.ones((4, 4), dtype=int)
    apart, together = (ours.work(four, 7.0, each).seconds[0] for each in (None, one_call))
    foreign = ~np.eye(4, dtype=bool)
    bare = ours.work(four, 0.0).seconds[0]
    # Rank 0 has tiles 0 and 7: of others 7 alone sees any, those of three ranks.
    assert (apart - bare)[0][foreign[0]].tolist() == pytest.approx([7 * 128] * 3)
    # Their 6 tiles of keys are copied: 4 times 2 bytes of k and v of an eighth of the heads, beside
    # 10 bytes of every head of a row that is added.
    copied = 7 * 6 * 128 * 8 * 2 / 8 / 10
    assert (together - bare)[0].sum() == pytest.approx(7 * 128 + copied)
    # In two calls, for rank 1 and for the others, its rows are added twice.
    one_call[0, 1] = 2
    twice = ours.work(four, 7.0, one_call).seconds[0]
    assert (twice - bare)[0].sum() == pytest.approx(2 * 7 * 128 + copied)
