"""The models in the table of docs/nemo.md behave as it states."""

import re
from pathlib import Path

import pytest
from models import MODELS

PAGE = Path(__file__).parents[2] / "docs" / "nemo.md"
ROW = re.compile(r"^\| ([^|]+) \| `(\w+)` \| ([^|]+) \|", re.M)


def table():
    """Return name -> (provider, behaviour) of every row."""
    rows = ROW.findall(PAGE.read_text(encoding="utf-8"))
    return {name: (provider, what) for name, provider, what in rows if name in MODELS}


REFUSED = [name for name, (_, what) in table().items() if what != "trains"]


@pytest.fixture(scope="module")
def results(serve):
    """Return name -> losses or error, on one rank unchanged and on two with BurstAttention."""
    both = []
    for world in (1, 2):
        code, text, each = serve(world, models=True, refused=REFUSED)
        assert code == 0, text[-3000:]
        both.append(each)
    return both


def test_the_table_has_all_models():
    assert {name: provider for name, (provider, _) in table().items()} == {
        name: provider for name, (_, provider, _) in MODELS.items()
    }


@pytest.mark.parametrize("name", MODELS)
def test_a_model_does_what_the_table_says(results, name):
    alone, split = (each.get(name) for each in results)
    what = table()[name][1]
    if name in REFUSED:
        assert isinstance(split, str), split
        assert re.sub(r"[`\s]+", " ", what.removeprefix("refused: ")).strip(" .") in re.sub(
            r"\s+", " ", split
        )
        return
    assert not isinstance(split, str), split
    assert alone[0] != pytest.approx(alone[1], rel=1e-4)  # it learns
    assert split == pytest.approx(alone, rel=1e-6)
