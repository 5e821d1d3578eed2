"""The flags of a schedule, checked, and the scene that they describe.

The schedule comes from `cost`, as that of a plan does.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...schedule import cost
from ...schedule.algorithms import ALGORITHMS
from ...schedule.tables import Grid
from .passes import ScheduleScene
from .scene import Shards


@dataclass(frozen=True)
class Choices:
    """The choices of a schedule; "auto" is resolved by bytes, as for a plan."""

    algorithm: str = "burst"
    backward: bool = False
    side: str = "auto"
    route: str = "auto"
    kv_cache: float = 0.0


def schedule_scene(
    shards: Shards, grid: Grid, sizes: cost.Sizes, choices: Choices
) -> ScheduleScene:
    """The scene of one pass. Raises ValueError for choices that do not go together."""
    if not choices.backward and (choices.side != "auto" or choices.kv_cache):
        raise ValueError("--side and --kv-cache apply to backward; add --backward")
    if not 0 <= choices.kv_cache <= 1:
        raise ValueError(f"--kv-cache must be in 0..1, got {choices.kv_cache}")
    if choices.kv_cache and choices.side == "query":
        raise ValueError("--kv-cache: with side query no keys travel; use --side kv")
    keep_none = [name for name, algorithm in ALGORITHMS.items() if not algorithm.keeps]
    if choices.kv_cache and choices.algorithm in keep_none:
        raise ValueError(
            f"--kv-cache: {choices.algorithm} computes elsewhere in backward than in forward and "
            "keeps no keys; leave out --kv-cache or take another --algorithm than "
            f"{', '.join(keep_none)}"
        )
    kept = round(choices.kv_cache * (grid.size - 1))

    if choices.backward:
        plan = cost.backward_schedule(
            choices.algorithm, grid, shards.wanted, sizes,
            side=choices.side, route=choices.route, kept=kept,
        )  # fmt: skip
    else:
        plan = cost.forward_schedule(
            choices.algorithm, grid, shards.wanted, sizes, route=choices.route
        )
    return ScheduleScene(shards, plan, sizes, choices.backward)
