"""Whole steps on the emulated cluster: packs, losses and speeds by hand; a small run."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.cluster import __main__ as command
from benchmarks.cluster import problems, steps
from benchmarks.cluster.ranks import RankError

ROOT = Path(__file__).parents[2]


def test_padding_moves_documents_and_changes_nothing_in_them(monkeypatch):
    """Documents of 3, 1 and 4 tokens, each padded to a multiple of 4: 4, 4 and 4."""
    monkeypatch.setattr(steps, "bounds", lambda *_: [0, 3, 4, 8])
    tight, padded = (steps.pack("500", 1, 8, multiple) for multiple in (1, 4))
    assert tight.ends == tight.padded == padded.ends == [0, 3, 4, 8]
    assert padded.padded == [0, 4, 8, 12]
    assert tight.positions.tolist() == [0, 1, 2, 0, 0, 1, 2, 3]
    assert tight.counts.tolist() == [1, 1, 0, 0, 1, 1, 1, 0]
    t = tight.tokens.tolist()
    assert tight.labels.tolist() == [t[1], t[2], 0, 0, t[5], t[6], t[7], 0]
    for whole, loose in zip(tight[:4], padded[:4], strict=True):
        a, b, c, d, e, f, g, h = whole.tolist()
        assert loose.tolist() == [a, b, c, 0, d, 0, 0, 0, e, f, g, h]


def test_dynamic_groups_hold_every_document_once(monkeypatch):
    """16, 2, 7 and 5 tokens over 4 ranks of 8 each, padded to multiples of 8: 16, 8, 8 and 8. The
    longest needs two ranks; two of the others take one each, and the last waits for a second
    micro-batch, where it gets all four. Of equal lengths the first comes first."""
    monkeypatch.setattr(steps, "bounds", lambda *_: [0, 16, 18, 25, 30])
    whole = steps.pack("500", 1, 30, 8)
    plans = [steps.dynamic(whole, 8, 4, rank) for rank in range(4)]
    ends = [[(share.ranks, share.pack.ends, share.pack.padded) for share in plan] for plan in plans]
    last = (4, [0, 5], [0, 8])
    assert ends == [
        [(2, [0, 16], [0, 16]), last],
        [(2, [0, 16], [0, 16]), last],
        [(1, [0, 2], [0, 8]), last],
        [(1, [0, 7], [0, 8]), last],
    ]
    for share, rows in ((plans[2][0], np.r_[16:24]), (plans[3][0], np.r_[24:32])):
        for held, all_of in zip(share.pack[:4], whole[:4], strict=True):
            assert (held == all_of[rows]).all()


def test_some_documents_of_a_pack_keep_their_order_and_padding(monkeypatch):
    """The last and the first of documents of 3, 1 and 4 tokens, each padded to a multiple of 4."""
    monkeypatch.setattr(steps, "bounds", lambda *_: [0, 3, 4, 8])
    whole = steps.pack("500", 1, 8, 4)
    some = whole.of([2, 0])
    assert (some.ends, some.padded) == ([0, 4, 7], [0, 4, 8])
    for held, (a, b, c, d, *_, e, f, g, h) in zip(some[:4], whole[:4], strict=True):
        assert held.tolist() == [e, f, g, h, a, b, c, d]


def test_packs_of_a_step_are_joined(monkeypatch):
    """Documents of 3 and 1 tokens, and of 2, each padded to a multiple of 4."""
    lengths = {1: [0, 3, 4], 2: [0, 2]}
    monkeypatch.setattr(steps, "bounds", lambda _, seed, __: lengths[seed])
    one, two = steps.pack("500", 1, 4, 4), steps.pack("500", 2, 2, 4)
    both = steps.Pack.joined([one, two])
    assert (both.ends, both.padded) == ([0, 3, 4, 6], [0, 4, 8, 12])
    for held, *parts in zip(both[:4], one[:4], two[:4], strict=True):
        assert held.tolist() == [x for part in parts for x in part.tolist()]


def test_a_document_of_all_tokens_takes_all_ranks_whatever_its_padding(monkeypatch):
    """27 tokens over 4 ranks of 7 are 32 with their padding: 8 on each rank, not a fifth rank."""
    monkeypatch.setattr(steps, "bounds", lambda *_: [0, 27])
    whole = steps.pack("500", 1, 27, 8)
    assert [share.ranks for share in steps.dynamic(whole, 7, 4, 3)] == [4]


def test_a_seed_says_which_documents_and_tokens():
    one, again, other = (steps.pack("500", seed, 4096, 8) for seed in (1, 1, 2))
    assert one.ends == again.ends == problems.bounds("500", 1, 4096) != other.ends
    assert (one.tokens == again.tokens).all()
    assert all(end % 8 == 0 for end in one.padded)


def test_a_step_lasts_from_the_first_begin_to_the_last_end():
    ranks = [[(1.0, 3.0, 0.5), (4.0, 5.0, 0.25)], [(0.5, 2.0, 0.5), (4.5, 7.0, 0.25)]]
    assert steps.stepped(ranks) == [(2.5, 0.5), (3.0, 0.25)]


def test_the_speed_is_that_of_real_tokens():
    """100 tokens in medians of 4 and 2 s; run by run ours is 2, 1.5 and 4 times as fast."""
    found = {"Megatron p2p": [steps.Step(s, 1.0) for s in (4.0, 3.0, 8.0)],
             steps.OURS: [steps.Step(2.0, 1.0)] * 3}  # fmt: skip
    assert steps.table("500", found, 100) == [
        ["500", "Megatron p2p", "4.000 (3.000 to 8.000)", "25", "2.00 (1.50 to 4.00)"],
        ["500", "ours", "2.000 (2.000 to 2.000)", "50", "1.00 (1.00 to 1.00)"],
    ]


def test_ways_whose_losses_differ_are_an_error():
    same = {"a": [steps.Step(1.0, 5.0)], "b": [steps.Step(2.0, 5.0004)]}
    steps.agree(same)
    for wrong in (5.001, float("nan")):
        with pytest.raises(RankError, match=r"c: the loss is .*, a's 5.0"):
            steps.agree(same | {"c": [steps.Step(1.0, wrong)]})


def test_documents_that_there_are_not_are_refused():
    parsed = command.parser().parse_args(["steps", "--documents", "500,2K"])
    with pytest.raises(ValueError, match="--documents: there is 500, 1K, tail, got '2K'"):
        parsed.run(parsed)


@pytest.mark.slow
def test_steps_of_all_ways_have_one_loss():
    """The run compares the losses itself."""
    pytest.importorskip("megatron.core")
    words = ["steps", "--documents", "500", "--tokens", "256", "--packs", "2"]
    words += ["--rounds", "1", "--steps", "1"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "benchmarks.cluster", *words],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    if done.returncode == 2:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    names = [way.name for way in steps.WAYS]
    rows = done.stdout.splitlines()[2 : 2 + len(names)]
    assert [row.split("|")[2].strip() for row in rows] == names
