"""What CI leaves out is a table in CONTRIBUTING, and names tests that there are."""

import re
from pathlib import Path

import pytest
from ci_rooms import AGAIN, FIRST, HALVED, RARE

ROOT = Path(__file__).parents[2]


def left_out():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text.split("## What CI leaves out", 1)[1].split("\n## ", 1)[0]
    return [line for line in table.splitlines() if line.startswith("| ")]


@pytest.mark.parametrize("path", RARE)
def test_what_ci_leaves_out_is_in_the_table_and_slow(path):
    file = path.split("::")[0]
    files = list((ROOT / "tests").glob(f"{file}*" if not file.endswith("/") else f"{file}*.py"))
    assert any(re.search(r"mark\.slow|\bslow\(", file.read_text()) for file in files)
    name = path.removesuffix(".py").replace(".py::", "::")
    (line,) = [line for line in left_out() if f"`{name}" in line]
    catches = line.split(" | ")[1]
    assert len(catches.strip(" |")) > 15, line


def test_every_row_of_the_table_is_left_out():
    rows = "".join(left_out()[1:])
    named = rows.split("`")[1::2]
    known = {path.removesuffix(".py").replace(".py::", "::") for path in RARE}
    assert {name for name in named if "/" in name and " " not in name} <= known


@pytest.mark.parametrize("path", [*FIRST, *AGAIN, *HALVED])
def test_rooms_and_files_that_are_named_exist(path):
    assert list((ROOT / "tests").glob(f"{path.removesuffix('/')}*"))


def test_no_two_files_of_tests_have_one_name():
    """Rooms are no packages, so pytest imports a file by its name alone, and refuses a second."""
    names = [file.name for file in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names))
