"""Whole calls of `mb.attention` on grids in one process: `python -m tests.fuzz attention`.

What the ranks posted and waited for is replayed under NCCL's rules, on every choice of
communicators.
"""

import random
from collections.abc import Callable, Iterable

import nccl_rules
from workers import Workers

from megatron_burst.plugins.testing import in_process

from .draw import Case, draw
from .judge import Run
from .tally import Tally, tried

SIZES = (1, 2, 3, 4, 4, 6, 8)


def case(number: int) -> Case:
    return draw(f"attention {number}", random.Random(number).choice(SIZES))


def faults(case: Case) -> list[str]:
    """What is wrong with one case."""
    grid = case.grid
    try:
        groups = in_process.groups(
            inter=grid.inter, intra=grid.intra, ulysses=grid.ulysses, placement=grid.placement
        )
    except ValueError as error:
        expected = not grid.even and "placement: " in str(error)
        return [] if expected else [f"{grid} was refused: {error}"]
    if not grid.even:
        return [f"{grid} was served: its rings have nodes of unequal size"]
    traces = nccl_rules.record(groups)
    found = Run(case, groups).go().faults
    for name, communicators in nccl_rules.COMMUNICATORS.items():
        broken = nccl_rules.faults(traces, communicators(groups.topology))
        found += [f"NCCL, communicators {name}: {fault}" for fault in broken]
    return found


def kinds(case: Case) -> list[str]:
    """What a case counts for in the tally."""
    if not case.grid.even:
        return ["refused: placement of a grid"]
    found = [f"grid {case.grid.inter} x {case.grid.intra}, {case.grid.ulysses} sharing heads"]
    for call in case.calls:
        if call.refused:
            found.append(f"refused: {call.refused}")
            continue
        found += [*call.kinds, f"form {call.form}", f"sink {call.sink}", f"strides {call.strides}"]
        found += ["checkpoint"] * (call.keep is not None) + ["frozen"] * (not all(call.needs))
        found += [name for name in ("softcap", "head_chunks", "grad_wire_dtype",
                                    "sequence_chunks") if call.choices.get(name)]  # fmt: skip
    return [*found, f"calls in flight {len(case.calls)}"]


def search(cases: Iterable[int], _: Callable[[int], Workers] | None = None) -> Tally:
    """Try these cases, until too many have failed."""
    return tried("attention", cases, case, kinds, faults)
