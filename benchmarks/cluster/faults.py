"""What survivors say when a peer or a link fails in the middle of a ring.

Each fault hits a new cluster while `mb.attention` runs again and again. Judged: every survivor
ends within the timeout (a slow link may instead end with right results), nobody hangs, nobody
returns a wrong result, the error names the exchange and the peer, and a new cluster works after.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import measure
from .bench import built
from .cells import Problem, Rival
from .measure import State
from .network import Network, Rates
from .ranks import Answer, Ranks

TIMEOUT = 5.0  # seconds, of the process groups
SLACK = 5.0  # seconds that a survivor may take besides: a timeout ends what it waited for last
RIVALS = (
    Rival("ring", "ring"),
    Rival("burst query", "burst", "query"),
    Rival("double_ring", "double_ring"),
    Rival("all_gather", "all_gather"),
    Rival("ulysses", "ulysses", head="all"),
)
PROBLEM = Problem(tokens=256, heads=8, kv_heads=8, width=64)
VICTIM = 1


@dataclass(frozen=True)
class Fault:
    """name; strike: what happens to the running cluster; survives: may calls end well?"""

    name: str
    strike: Callable[[Ranks], None]
    survives: bool = False


FAULTS = (
    Fault("rank killed", lambda ranks: ranks.kill(VICTIM)),
    Fault("inter link down", lambda ranks: ranks.network.cut("inter", VICTIM)),
    Fault("intra link down", lambda ranks: ranks.network.cut("intra", VICTIM)),
    Fault(
        "inter link at 1 %",
        lambda ranks: ranks.network.shape(
            "inter", [VICTIM], ranks.network.rates.inter // 100
        ),
        survives=True,
    ),
)


def main(only: str = "", say: Callable[[str], None] = print) -> int:
    """Strike every rival with every fault; 1 if any survivor behaved badly."""
    bad = 0
    for rival in RIVALS:
        for fault in FAULTS:
            if only in f"{rival.name}, {fault.name}":
                lines, wrong = strike(rival, fault)
                bad += len(wrong)
                say(f"{rival.name}, {fault.name}: " + ("; ".join(wrong) if wrong else "good"))
                for line in lines:
                    say(f"    {line}")
    return int(bad > 0)


def strike(rival: Rival, fault: Fault) -> tuple[list[str], list[str]]:
    """What each rank said, and what was wrong with it."""
    network = Network(2, 2, Rates.parse("20M/80M"))
    with built(network), tempfile.TemporaryDirectory() as folder:
        measure.write_problem(PROBLEM, network.size, Path(folder))
        with Ranks(network, timeout=TIMEOUT) as ranks:
            ranks.run(measure.load, PROBLEM, Path(folder))
            ranks.run(measure.prepare, rival)
            struck: list[float] = []

            def hit() -> None:
                time.sleep(0.7)
                struck.append(time.monotonic())
                fault.strike(ranks)

            begin = time.monotonic()
            answers = ranks.answers(attend, rival, 3 * TIMEOUT, within=6 * TIMEOUT, meanwhile=hit)
            after = struck[0] - begin
        with Ranks(Network(2, 2, network.rates)) if False else _again(network) as fresh:
            fresh.run(measure.load, PROBLEM, Path(folder))
            fresh.run(measure.prepare, rival)
    survivors = {r: a for r, a in enumerate(answers) if not (fault.name == "rank killed" and r == VICTIM)}
    lines = [f"rank {r} {a.kind} {a.seconds - after:.1f} s after: {_first(a)}" for r, a in survivors.items()]
    return lines, [w for r, a in survivors.items() for w in _judge(r, a, after, fault)]


def attend(state: State, rival: Rival, seconds: float) -> dict[str, Any]:
    """Call attention until `seconds` have passed; how often, and the worst error of a result."""
    begin, worst, calls = time.monotonic(), 0.0, 0
    while time.monotonic() - begin < seconds:
        worst = max(worst, measure.timed(state, rival.name, None).error)
        calls += 1
    return {"calls": calls, "error": worst}
