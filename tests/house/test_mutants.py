"""The planted faults of `make mutants`: all still apply, and a sample of them is caught."""

import subprocess
import sys
from pathlib import Path

import mutants

SAMPLE = 4


def test_every_planted_fault_still_applies():
    """Where this fails, the source has moved on: give each fault named its new file and text."""
    outdated = list(mutants.stale(mutants.MUTANTS))
    assert not outdated, "\n".join(outdated)
    assert len(mutants.MUTANTS) > 80


def test_the_tests_of_every_fault_are_known():
    """Or a fault would be tried with the slowest tests first, and no sample would contain it."""
    here = Path(mutants.__file__).parent
    assert all(list(here.glob(f"**/test_{name}.py")) for name in mutants.QUICK)
    assert {x for mutant in mutants.MUTANTS for x in mutants.nearest(mutant.file)} <= {
        *mutants.QUICK
    }
    for name in mutants.NEAR:
        path = mutants.ROOT / "megatron_burst" / name
        assert path.is_dir() or path.with_suffix(".py").exists(), name


def test_faults_that_no_longer_apply_are_named(monkeypatch, capsys):
    gone = mutants.Mutant("masks/tiling.py", "no such text", "", "nothing")
    moved = mutants.Mutant("no_such_file.py", "", "", "nothing")
    twice = mutants.Mutant("masks/tiling.py", "import", "", "nothing")
    monkeypatch.setattr(mutants, "MUTANTS", [*mutants.MUTANTS[:3], gone, moved, twice])
    assert mutants.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert "megatron_burst/masks/tiling.py: 0 times in it: 'no such text'" in lines[0]
    assert "megatron_burst/no_such_file.py: there is no such file" in lines[1]


def test_a_sample_of_the_planted_faults_is_caught():
    done = subprocess.run(
        [sys.executable, mutants.__file__, "--sample", str(SAMPLE)],
        cwd=Path(mutants.__file__).parents[1],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{SAMPLE} of {SAMPLE} planted faults caught" in done.stdout
