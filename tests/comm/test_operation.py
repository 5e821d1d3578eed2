"""From a call to a plan: `prepared` and `derived` with an operation."""

from dataclasses import dataclass, field
from typing import NamedTuple

import pytest

from megatron_burst.comm.groups import Groups
from megatron_burst.comm.operation import Operation, derived, prepared
from megatron_burst.comm.recent import RecentCache
from megatron_burst.plugins.testing import in_process


class Stated(NamedTuple):
    """A request or a plan."""

    facts: dict[str, object]


@dataclass
class Call(Operation):
    """A call with one argument that records its steps in order."""

    groups: Groups
    size: int
    measuring: bool = False
    breaks: str = ""
    steps: list[str] = field(default_factory=list)

    def _step(self, name):
        self.steps.append(name)
        if self.breaks == name:
            raise ValueError(f"{name} of size {self.size}")

    def check(self):
        self._step("check")
        return Stated({"size": self.size})

    def agree(self, facts):
        self.steps.append("agree")
        self.groups.agree(facts)

    @property
    def measures(self):
        return self.measuring

    def choose(self, request):
        self.steps.append("choose")
        return request

    def build(self, request):
        self._step("build")
        return Stated(request.facts | {"tables": self.size})

    def connect(self, plan):
        self.steps.append("connect")


def run(*calls, **keywords):
    """Run the operations of two ranks in one process; return their plans or the common error."""
    groups = in_process.groups(intra=2)
    operations = [
        Call(rank, size, **(keywords if own else {}))
        for rank, size, own in zip(groups.ranks, calls, (False, True), strict=True)
    ]
    try:
        return operations, groups.run(prepared, operations)
    except ValueError as error:
        return operations, str(error)


def test_equal_calls_are_checked_built_compared_and_connected():
    operations, plans = run(8, 8)
    assert plans == [Stated({"size": 8, "tables": 8})] * 2
    assert [one.steps for one in operations] == [["check", "build", "agree", "connect"]] * 2


def test_ranks_compare_their_requests_before_they_measure():
    groups = in_process.groups(intra=2)
    operations = [Call(rank, 8, measuring=True) for rank in groups.ranks]
    groups.run(prepared, operations)
    steps = ["check", "agree", "choose", "build", "agree", "connect"]
    assert [one.steps for one in operations] == [steps] * 2


@pytest.mark.parametrize("step", ["check", "build"])
def test_the_error_of_one_rank_is_raised_by_all(step):
    operations, error = run(8, 8, breaks=step)
    assert error == f"rank 1: {step} of size 8"
    assert all("connect" not in one.steps for one in operations)
    assert all(one.steps.count("agree") == 1 for one in operations)


def test_different_calls_are_refused():
    operations, error = run(8, 9)
    assert "rank 0 has size 8" in error
    assert "rank 1 has size 9" in error
    assert all("connect" not in one.steps for one in operations)


def test_a_derived_plan_is_built_once_and_not_compared():
    (rank,) = in_process.groups(intra=1).ranks
    plans, calls = RecentCache(2), [Call(rank, size) for size in (8, 8, 9)]
    first, again, other = (derived(call, plans) for call in calls)
    assert first is again
    assert other == Stated({"size": 9, "tables": 9})
    assert [call.steps for call in calls] == [
        ["check", "build", "connect"], ["check", "connect"], ["check", "build", "connect"],
    ]  # fmt: skip


def test_a_cache_removes_what_was_used_longest_ago():
    cache = RecentCache(2)
    assert cache.keep("a", 1) == 1
    assert cache.keep("b", 2) == 2
    assert cache.find("a") == 1
    assert cache.find("c") is None
    cache.keep("c", 3)
    assert list(cache) == ["a", "c"]
    assert cache.of("a", pytest.fail) == 1
    assert cache.of("d", lambda: 4) == 4
    assert list(cache) == ["a", "d"]
