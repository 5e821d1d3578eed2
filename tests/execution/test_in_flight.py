"""A missing wait, or a buffer used too early, gives wrong numbers on ranks that share a process.

On a device it would give them only sometimes. Each fault is planted in the loop of the ring, or
between the loop and its endpoint. The same calls without faults are exact (`test_attention`).
"""

from functools import partial

import cases
import oracle
import pytest

from megatron_burst.comm.transport import all_to_all_by_messages
from megatron_burst.execution.ring import Ring
from megatron_burst.plugins.testing import in_process

CAUSAL = cases.Problem("causal", (4, 2), 1, (4, 4), 32)
BURST = cases.Case(2, 2, "burst", "zigzag", "query", "reference", CAUSAL)
SIDES = [BURST, BURST._replace(side="kv"), BURST._replace(algorithm="ring", side="kv")]
RANK = 1  # which has the fault


class Forgetful:
    """An endpoint that never waits for its `number`-th exchange that receives something."""

    def __init__(self, real, number):
        self.real, self.number, self.count = real, number, 0

    def __getattr__(self, name):
        return getattr(self.real, name)

    def exchange(self, channel, sends, receives, label):
        pending = self.real.exchange(channel, sends, receives, label)
        self.count += bool(receives)
        return _NeverWaited() if receives and self.count == self.number else pending

    def all_to_all(self, trade):
        all_to_all_by_messages(self, trade)


class _NeverWaited:
    def wait(self):
        pass


def found(case, monkeypatch, plant=lambda rank: None, ulysses=1):
    """Return the errors in the results, or the error of the transport."""
    made = in_process.groups

    def planted(**sizes):
        groups = made(**sizes, ulysses=ulysses)
        plant(groups.ranks[RANK])
        return groups

    with monkeypatch.context() as patch:
        patch.setattr(in_process, "groups", planted)
        try:
            results, _ = cases.run_in_process(case)
        except RuntimeError as error:
            return [str(error)]
    truth = cases.shards(case, cases.solve(case.problem)[1])
    return [
        f"rank {rank}: {name}"
        for rank, of_rank in enumerate(zip(results, truth, strict=True))
        for name, mine, right in zip(("out", "dq", "dk", "dv"), *of_rank, strict=True)
        if not oracle.worst(mine, right) <= cases.TOLERANCE
    ]


@pytest.mark.parametrize("name", ["ring", "ulysses"])
@pytest.mark.parametrize("case", SIDES, ids=lambda case: f"{case.algorithm}-{case.side}")
def test_every_wait_is_needed(case, name, monkeypatch):
    ends = []

    def plant(rank, number):
        ends.append(Forgetful(getattr(rank, name), number))
        setattr(rank, name, ends[-1])

    ulysses = 2 if name == "ulysses" else 1
    assert not found(case, monkeypatch, partial(plant, number=0), ulysses)
    count = ends[0].count
    assert count >= 4
    for number in range(1, count + 1):
        faults = found(case, monkeypatch, partial(plant, number=number), ulysses)
        assert faults, f"exchange {number} of {count} need not have been waited for"


@pytest.mark.parametrize("case", SIDES, ids=lambda case: f"{case.algorithm}-{case.side}")
def test_a_buffer_given_back_while_it_is_read_is_seen(case, monkeypatch):
    """The next receive reuses it, so its content is overwritten at any time."""
    finish = Ring._finish

    def early(self, boundary):
        arriving = [m for f in self._pending.get(boundary, ()) for m in f.arriving]
        finish(self, boundary)
        for payload, message in arriving:
            if self.me == RANK and payload.target is None:
                self.buffers.give(payload.hop.chunk.family, message)

    monkeypatch.setattr(Ring, "_finish", early)
    assert found(case, monkeypatch)


@pytest.mark.parametrize("case", SIDES[:2], ids=lambda case: f"{case.algorithm}-{case.side}")
def test_a_gradient_given_back_before_it_left_is_seen(case, monkeypatch):
    post = Ring._post

    def early(self, exchange, boundary):
        post(self, exchange, boundary)
        if self.me == RANK:
            for payload, message in self._pending[exchange.land][-1].leaving:
                if payload.target is not None:
                    self.buffers.give(self._wire[payload.hop.chunk.family], message)

    monkeypatch.setattr(Ring, "_post", early)
    assert "a sent tensor was overwritten" in "".join(found(case, monkeypatch))
