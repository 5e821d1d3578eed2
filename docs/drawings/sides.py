"""Bytes per token and hop in backward, from the sizes that a plan uses."""

from __future__ import annotations

from matplotlib.figure import Figure

from drawings.paper import box, figure
from megatron_burst.plugins.tools.show.colours import INK, ink_on, mixed, of_rank
from megatron_burst.schedule import cost
from megatron_burst.schedule.demand import all_visible
from megatron_burst.schedule.tables import Grid

GRID = Grid(2, 4)
HEADS = ((32, 32, 4), (32, 32, 2), (32, 8, 4))  # query heads, key heads, bytes of a gradient
WIDTH = 128


def sizes(heads: int, kv_heads: int, wire: int) -> cost.Sizes:
    """Return the sizes of one token in bf16; `wire` is the bytes per element of sent gradients."""
    return cost.Sizes(1, 1, heads, kv_heads, WIDTH, WIDTH, 2, 4, wire, (True, True, True))


def side_bytes(side: str, of: cost.Sizes) -> tuple[int, int]:
    """Return the bytes per token of the chunk that is sent, and of its gradient."""
    return getattr(of.backward, side), getattr(of.backward, "d" + side)


def picked(of: cost.Sizes) -> str:
    """Return the side that "auto" picks."""
    return cost.backward_schedule("burst", GRID, all_visible(GRID.size), of).side


def side_label(heads: int, kv_heads: int, wire: int) -> str:
    return f"{heads} query, {kv_heads} key heads; gradients in {'fp32' if wire == 4 else 'bf16'}"


def side_caption(case: tuple[int, int, int]) -> str:
    of = sizes(*case)
    kv, query = (sum(side_bytes(side, of)) / 1024 for side in ("kv", "query"))
    return f"{side_label(*case)}: kv {kv:.4g} KiB, query {query:.4g} KiB, auto picks {picked(of)}"


def draw_sides() -> Figure:
    made = figure(
        9.4,
        4.0,
        "Bytes sent per token and hop in backward",
        f"activations in bf16, heads of width {WIDTH}",
    )
    axes = box(made, 1.5, 0.75, 7.5, 2.4)
    parts = {"kv": ("K, V", "dK, dV"), "query": ("Q, dO, lse, delta", "dQ")}
    y, ticks = 0.0, []
    for case in HEADS:
        of = sizes(*case)
        axes.text(0, y - 0.62, side_label(*case), fontsize=9, color=INK, va="center")
        for side, names in parts.items():
            start = 0.0
            shades = (of_rank(0, 2), mixed(of_rank(0, 2), "#ffffff", 0.62))
            for name, count, shade in zip(names, side_bytes(side, of), shades, strict=True):
                axes.barh(y, count / 1024, 0.72, left=start, color=shade)
                if count / 1024 > 2.5:
                    axes.text(start + count / 2048, y, name, ha="center", va="center_baseline",
                              fontsize=8.5, color=ink_on(shade))  # fmt: skip
                start += count / 1024
            auto = side == picked(of)
            axes.text(start + 0.4, y, f"{start:.4g} KiB" + ", picked by auto" * auto, fontsize=9,
                      va="center_baseline", fontweight="bold" if auto else "normal")  # fmt: skip
            ticks.append((y, f"side {side}"))
            y += 0.85
        y += 1.0
    axes.set_ylim(y - 1.35, -1.0)
    axes.set_yticks([t for t, _ in ticks], [label for _, label in ticks], fontsize=9)
    axes.set_xlim(0, 56)
    axes.set_xlabel("KiB per token and hop")
    axes.tick_params(length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    return made


def captions() -> list[str]:
    """Return the numbers of the drawing as lines of text."""
    return [side_caption(case) for case in HEADS]


DRAWINGS = {"sides": draw_sides}
