"""The calls of `attention`, on real gloo ranks: `python -m tests.fuzz gloo`."""

from collections.abc import Callable, Iterable
from functools import cache

import torch.distributed as dist
from workers import WorkerError, Workers

import megatron_burst as mb

from . import attention
from .draw import Case, Grid, draw
from .judge import Run
from .tally import Tally

BLOCK = 25  # cases that share their processes
WORLDS = (2, 4, 3, 2, 4, 6, 8)


def world(number: int) -> int:
    return WORLDS[number // BLOCK % len(WORLDS)]


@cache
def _groups(grid: Grid) -> mb.Groups:
    """Made once in every process, by all of them at the same time."""
    return mb.Groups.from_topology(
        dist.group.WORLD, intra=grid.intra, ulysses=grid.ulysses, placement=grid.placement
    )


def drawn(number: int, size: int) -> Case:
    return draw(f"gloo {number}", size)


def on_rank(number: int, drawn: Callable[[int, int], Case], device: str):
    """(What is wrong on this rank with a case, the refusals it was told)."""
    case = drawn(number, dist.get_world_size())
    try:
        groups = _groups(case.grid)
    except ValueError as error:
        expected = not case.grid.even and "placement: " in str(error)
        return [] if expected else [f"{case.grid} was refused: {error}"], []
    run = Run(case, groups, device).go()
    return run.faults, run.messages


def search(
    cases: Iterable[int],
    pools: Callable[[int], Workers],
    drawn: Callable[[int, int], Case] = drawn,
    device: str = "cpu",
    name: str = "gloo",
) -> Tally:
    """Try these cases on `pools(n)`, n processes that live, until too many have failed."""
    tally = Tally(name)
    for number in cases:
        size = world(number)
        case = drawn(number, size)
        try:
            answers = pools(size).run(on_rank, number, drawn, device, timeout=60)
        except WorkerError as error:
            found = [str(error)]
        else:
            found = [fault for faults, _ in answers for fault in faults]
            if len({str(messages) for _, messages in answers}) > 1:
                found.append(f"ranks are told different things: {answers}")
        tally.add([f"ranks {size}", *attention.kinds(case)], found, case, number)
        if tally.full:
            break
    return tally
