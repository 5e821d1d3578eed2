"""Rows that the attention store keeps under a causal mask, and the work that it saves."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import megatron_burst as mb
from drawings.paper import box, figure
from megatron_burst.layout import Span
from megatron_burst.masks.seen import rows_seen
from megatron_burst.plugins.tools.show.colours import GREY, INK, RULE, mixed, of_rank
from megatron_burst.recompute import selection as store
from megatron_burst.schedule import cost

RANKS, POSITIONS = 4, 64
KEPT = (0.0, 0.5, 1.0)


def again(keep: float, length: int = 1024) -> tuple[float, float, float]:
    """Return fractions for a causal mask: rows kept, pairs recomputed, keys sent again."""
    mask, whole = mb.masks.Causal(), (Span(0, 1, length),)
    kept, rest = store.split_positions(mask, length, length, keep, RANKS)
    queries = [Span(a, 1, b - a) for a, b in rest]
    needed = np.zeros(length, dtype=bool)
    _, keys = rows_seen(mask, [queries], [whole])
    for first, stop in zip(keys.first, keys.stop, strict=True):
        needed[first:stop] = True
    pairs = sum(cost.visible_pairs(mask, (span,), whole) for span in queries)
    rows = sum(stop - start for start, stop in kept)
    return rows / length, pairs / cost.visible_pairs(mask, whole, whole), needed.mean()


def store_caption(keep: float) -> str:
    rows, pairs, _ = again(keep)
    return f"keep {keep:g}: {rows:.0%} of the rows kept, {pairs:.0%} of attention recomputed"


def draw_store() -> Figure:
    made = figure(9.4, 3.75, "Rows that the attention store keeps", f"a causal mask over "
                  f"{POSITIONS} positions; the curves are for 1,024 positions")  # fmt: skip
    done, redo = mixed(of_rank(2, 4), "#ffffff", 0.55), of_rank(0, 4)
    for i, keep in enumerate(KEPT):
        axes = box(made, 0.45 + 2.0 * i, 0.75, 1.8, 1.8)
        _, rest = store.split_positions(mb.masks.Causal(), POSITIONS, POSITIONS, keep, RANKS)
        rows = np.zeros(POSITIONS, dtype=bool)
        for start, stop in rest:
            rows[start:stop] = True
        for q in range(POSITIONS):
            colour = redo if rows[q] else done
            axes.add_patch(Rectangle((0, q), q + 1, 1.02, facecolor=colour, edgecolor="none"))
        axes.set_xlim(0, POSITIONS)
        axes.set_ylim(POSITIONS, 0)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_title(f"keep={keep:g}", loc="left", fontsize=10, fontweight="bold", color=INK)
        axes.set_xlabel("keys", fontsize=8, labelpad=2)
        if not i:
            axes.set_ylabel("queries", fontsize=8, labelpad=2)
    for x, colour, text in (
        (0.45, done, "result kept"),
        (1.75, redo, "recomputed in backward"),
    ):
        patch = box(made, x, 0.25, 0.16, 0.14)
        patch.set_facecolor(colour)
        patch.set_xticks([])
        patch.set_yticks([])
        patch.spines[:].set_visible(False)
        made.text((x + 0.24) / 9.4, 0.27 / 3.75, text, fontsize=8.5, color=INK)
    _trade(box(made, 7.0, 0.75, 2.1, 1.8))
    return made


def _trade(axes: Axes) -> None:
    found = np.array([again(keep) for keep in np.linspace(0, 1, 33)])
    lines = ((1, "attention", of_rank(0, 4), "-"), (2, "keys and\nvalues sent", GREY, "--"))
    for column, name, colour, dashes in lines:
        axes.plot(found[:, 0], found[:, column], dashes, color=colour, linewidth=1.8)
        at = 10 if column == 1 else 14
        side = "right" if column == 1 else "left"
        x, y = found[at, 0] + (-0.03 if column == 1 else 0.04), found[at, column]
        axes.text(x, y - 0.02 * (column == 1), name, fontsize=8, color=colour, ha=side,
                  va="top" if column == 1 else "bottom")  # fmt: skip
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.02)
    axes.set_xticks([0, 0.5, 1])
    axes.set_yticks([0, 0.25, 0.5, 1])
    axes.grid(color=RULE, linewidth=0.6)
    axes.tick_params(length=0, labelsize=8)
    axes.set_xlabel("rows kept", fontsize=8, labelpad=2)
    axes.set_title("repeated", loc="left", fontsize=10, fontweight="bold", color=INK)
    axes.spines[["top", "right"]].set_visible(False)


def captions() -> list[str]:
    """Return the numbers of the drawings as lines of text."""
    return [store_caption(keep) for keep in KEPT]


DRAWINGS = {"store": draw_store}
