"""Behaviour of survivors when a peer or a link fails in the middle of a ring.

Each fault hits a new cluster while `mb.attention` runs repeatedly. Every survivor must end within
the timeout (after a slow link, correct results are allowed too), no rank may return a wrong
result, the error must name the exchange and the peer, and a new cluster must work afterwards.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import megatron_burst as mb

from . import measure
from .bench import built
from .cells import Problem, Rival
from .measure import State
from .network import Network, Rates
from .ranks import Answer, Ranks

TIMEOUT = 5.0  # seconds, of the process groups
SLACK = 5.0  # additional seconds for a survivor, whose last wait ends by a timeout
RIVALS = (
    Rival("ring", "ring"),
    Rival("burst query", "burst", "query"),
    Rival("double_ring", "double_ring"),
    Rival("all_gather", "all_gather"),
    Rival("ulysses", "ulysses", ulysses="all"),
)
PROBLEM = Problem(tokens=256, heads=8, kv_heads=8, width=64)
VICTIM = 1
DELAY = 0.7  # seconds from the first call to the fault, which occurs in the middle of a ring
NAMED = r"exchange failed: attention (forward|backward).*(receiving from|sending to) rank \d"


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        strike: Function that causes it.
        survives: True if calls may succeed.
        kills: True if the victim dies.
    """

    name: str
    strike: Callable[[Ranks], None]
    survives: bool = False
    kills: bool = False


FAULTS = (
    Fault("rank killed", lambda ranks: ranks.kill(VICTIM), kills=True),
    Fault("inter link down", lambda ranks: ranks.network.cut("inter", VICTIM)),
    Fault("intra link down", lambda ranks: ranks.network.cut("intra", VICTIM)),
    Fault(
        "inter link at 1 %",
        lambda ranks: ranks.network.shape("inter", [VICTIM], ranks.network.rates.inter // 100),
        survives=True,
    ),
)


def main(only: str = "", say: Callable[[str], None] = print) -> int:
    """Cause every fault for every rival; return 1 if a survivor behaved badly."""
    mistake_count = 0
    for rival in RIVALS:
        for fault in FAULTS:
            if only in f"{rival.name}, {fault.name}":
                lines, mistakes = strike(rival, fault)
                mistake_count += len(mistakes)
                say(f"{rival.name}, {fault.name}: " + ("; ".join(mistakes) if mistakes else "good"))
                for line in lines:
                    say(f"    {line}")
    return int(mistake_count > 0)


def strike(rival: Rival, fault: Fault) -> tuple[list[str], list[str]]:
    """Return the messages of the survivors, and their mistakes."""
    network = Network(2, 2, Rates.parse("20M/80M"))
    with tempfile.TemporaryDirectory() as folder:
        measure.write_problem(PROBLEM, network, Path(folder))
        with built(network), Ranks(network, timeout=TIMEOUT) as ranks:
            ranks.run(measure.load, PROBLEM, Path(folder))
            ranks.run(measure.prepare, rival)
            outcomes = ranks.answers(
                attend, rival, 2 * TIMEOUT, within=6 * TIMEOUT, meanwhile=lambda: _hit(ranks, fault)
            )
        with built(network), Ranks(network, timeout=TIMEOUT) as new_ranks:
            new_ranks.run(measure.load, PROBLEM, Path(folder))
            new_ranks.run(measure.prepare, rival)  # a new cluster works; `prepare` checks results
    survivors = dict(enumerate(outcomes))
    if fault.kills:
        del survivors[VICTIM]
    lines = [
        f"rank {rank} {outcome.kind} {outcome.seconds - DELAY:.1f} s after: {_first(outcome)}"
        for rank, outcome in survivors.items()
    ]
    mistakes = [w for rank, outcome in survivors.items() for w in _judge(rank, outcome, fault)]
    return lines, mistakes


def _hit(ranks: Ranks, fault: Fault) -> None:
    time.sleep(DELAY)
    fault.strike(ranks)


def _judge(rank: int, outcome: Answer, fault: Fault) -> Iterator[str]:
    """Yield the mistakes of one survivor."""
    if outcome.kind == "done":
        if not fault.survives:
            yield f"rank {rank} noticed nothing"
        if not outcome.value["error"] <= 1.0:
            error = f"{outcome.value['error']:.2g}"
            yield f"rank {rank} returned a result that is off by {error} times its bound"
        return
    if outcome.kind != "failed":
        yield f"rank {rank} {outcome.kind}"
        return
    if outcome.seconds > DELAY + TIMEOUT + SLACK + fault.survives * 2 * TIMEOUT:
        yield f"rank {rank} took {outcome.seconds - DELAY:.1f} s to notice"
    words = _first(outcome)
    if not re.search(NAMED, words):
        yield f"rank {rank} does not name the exchange and the peer"


def _first(outcome: Answer) -> str:
    """Return the first line of a failed rank's exception."""
    if outcome.kind == "failed":
        return outcome.value.splitlines()[0]
    return str(outcome.value)


def attend(state: State, rival: Rival, seconds: float) -> dict[str, Any]:
    """Call attention until `seconds` have passed.

    Return the largest error in multiples of its bound, and the number of calls.
    """
    ((plan, share),) = state["plans"][rival.name]
    q, k, v, dout = share.inputs
    begin, worst, calls = time.monotonic(), 0.0, 0
    while time.monotonic() - begin < seconds:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = mb.attention(*leaves, plan=plan)
        grads = torch.autograd.grad(out, leaves, dout)
        worst = max(worst, measure.worst_error((out, *grads), share.truth, share.bounds))
        calls += 1
    return {"calls": calls, "error": worst}
