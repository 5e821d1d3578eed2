"""Rows of docs/compatibility.md: tests that stand for them are there, or a run shows nothing."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
import compatibility  # noqa: E402


def missing(test):
    """What of `file::function[case-case]` its file does not have, or None."""
    file, _, name = test.partition("::")
    function, _, cases = name.partition("[")
    text = (ROOT / file).read_text()
    if f"def {function}(" not in text:
        return function
    places = [m.start() for m in re.finditer("-", cases)]
    splits = [[cases.removesuffix("]")]] + [[cases[:p], cases[p + 1 : -1]] for p in places]
    text = text.replace("{CP4}", "--context-parallel-size 4")
    known = ("2", "4")  # numbers
    if not cases or any(all(f'"{x}"' in text or x in known for x in one) for one in splits):
        return None
    return cases


def test_every_row_names_tests_that_are_there():
    rows = [*compatibility.FEATURES]
    assert {test: missing(test) for row in rows for test in row.tests if missing(test)} == {}
    assert len({row.name for row in rows}) == len(rows)


def test_a_test_that_is_not_there_is_found():
    there = compatibility.FEATURES[0].tests[0]
    assert missing(there) is None
    assert missing(there.replace("[", "[no-such-")) == "no-such-cp2]"
    assert missing(there.replace("::test", "::text")) == "text_split_run_equals_one_rank"


def test_rows_of_a_checkout_keep_the_commit_that_they_ran_at():
    """Also those that a later run of other rows leaves as they were."""
    first, second = compatibility.FEATURES[:2]
    earlier = {"tests": {}, "commits": {row.name: "one" for row in (first, second)}}
    found = {"date": "2026-01-02", "tests": {}, "commits": {second.name: "two"}}
    known = compatibility.added(earlier, found, [second])
    assert known["commits"] == {first.name: "one", second.name: "two"}
    assert compatibility._commits(known["commits"]) == "earlier, one, two"
    assert compatibility._commits({}) == "-"
    assert re.fullmatch("[0-9a-f]{8}|unknown", compatibility.commit(ROOT))
