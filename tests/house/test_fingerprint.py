"""`python -m tests.fingerprint`: the same twice, and different for the smallest faults."""

import json

from megatron_burst import options
from megatron_burst.linear_cross_entropy.formula import Formula
from megatron_burst.masks import Causal, Window
from tests.fingerprint import cases, record
from tests.fingerprint.__main__ import report

DRAWN = cases.cases()


def first(kind, fits):
    return next(case for case in DRAWN if case.kind == kind and fits(case))


SAMPLE = [
    first(kind, lambda case: case.grid[1] * case.grid[0] <= 2 and case.choices.get("tp", 1) == 1)
    for kind in cases.COUNTS
]


def recorded(*chosen):
    return {case.name: record.hashes(case) for case in chosen}


def test_there_are_300_calls_of_every_kind():
    assert len({case.name for case in DRAWN}) == 300
    algorithms = {case.options["algorithm"] for case in DRAWN if case.kind == "attention"}
    assert algorithms == {*cases.RINGS, "ulysses", "hybrid"} == {*options.algorithms()} - {"auto"}
    assert {case.options["form"] for case in DRAWN if case.kind == "linear"} == {*cases.FORMS}


def test_two_records_are_equal():
    once, twice = (recorded(*SAMPLE) for _ in range(2))
    assert once == twice
    assert report(once, twice) == 0
    assert not [name for name, found in once.items() if "refused" in found]
    for case in SAMPLE:
        assert ("bytes sent by rank 0" in once[case.name]) == (case.kind != "lm_head")


def test_one_rounding_is_noticed(monkeypatch, capsys):
    def fits(one):  # the first of several labels is ignored
        return one.choices["operation"] == "cross_entropy" and one.sizes["n"] > 1

    case = first("lm_head", fits)
    before, right = recorded(case), Formula.loss
    monkeypatch.setattr(Formula, "loss", lambda *given: right(*given) * (1 + 2**-23))
    assert report(before, recorded(case)) == 1
    assert f"{case.name}: 1 of 3 differ: loss\n" in capsys.readouterr().out


def test_a_mask_that_is_off_by_one_is_noticed(monkeypatch, capsys):
    case = first("attention", lambda one: one.mask == ("causal",) and one.grid == (1, 2))
    before = recorded(case)
    monkeypatch.setattr(Causal, "__init__", lambda self: Window.__init__(self, None, 1))
    assert report(before, recorded(case)) == 1
    assert f"{case.name}: " in capsys.readouterr().out


def test_files_are_compared(tmp_path, monkeypatch, capsys):
    from tests.fingerprint import __main__ as command

    files = [tmp_path / name for name in ("a.json", "b.json")]
    for file, sent in zip(files, ("(8, 0)", "(4, 4)"), strict=True):
        file.write_text(json.dumps({"attention 0": {"bytes sent by rank 0": sent}}))
    monkeypatch.setattr("sys.argv", ["fingerprint", "compare", *map(str, files)])
    assert command.main() == 1
    assert "bytes sent by rank 0: (8, 0) -> (4, 4)" in capsys.readouterr().out
