"""Five constants, fitted to rows of rivals in MagiAttention's charts; other rows are predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from typing import NamedTuple

import numpy as np

from benchmarks.advise.fitting import fit
from benchmarks.advise.published_tables import table

from .documents import magi_packs
from .kernel import TOKENS
from .rivals import HIGH, LOW, PASSES, RIVALS, Constants, speed

RANKS = (8, 16, 32, 64)
MASKS = {"causal_mask": "causal", "full_mask": "full", "varlen_causal_mask": "packed causal",
         "varlen_full_mask": "packed full"}  # fmt: skip
FITTED_RIVALS = ("ring_p2p", "ulysses", "allgather", "usp")
FITTED_MASKS = ("causal_mask", "varlen_causal_mask")
FITTED_RANKS = (8, 64)


class Cell(NamedTuple):
    """One number of a chart: `speed` in TFLOP/s per GPU."""

    mask: str
    way: str
    rival: str
    ranks: int
    speed: float

    @property
    def fitted(self) -> bool:
        """Return True if the constants were fitted to this cell."""
        return (self.rival in FITTED_RIVALS and self.mask in FITTED_MASKS
                and self.ranks in FITTED_RANKS and not self.odd)  # fmt: skip

    @property
    def odd(self) -> bool:
        """Return True for backward of all-gather.

        All-gather computes gradients of all keys of the pack on every GPU. The time of this step
        grows with the pack and is not modelled.
        """
        return self.rival == "allgather" and self.way == "bwd"


def cells() -> list[Cell]:
    """Return all cells of the charts, including MagiAttention's own cells."""
    return [
        Cell(row["mask"], row["pass"], row["algo"], ranks, float(row[str(ranks)]))
        for row in table("magi_h100")
        for ranks in RANKS
    ]


def packs_of(mask: str, ranks: int, count: int | None = None) -> Sequence[np.ndarray]:
    """Return the packs of a cell as document lengths."""
    pack = ranks * TOKENS
    if not mask.startswith("varlen"):
        return [np.array([pack], dtype=np.int64)]
    return magi_packs(pack)[:count]


def predicted(cell: Cell, fitted: Constants, count: int | None = None) -> float:
    """Return the mean speed over the packs, as in the charts."""
    causal, backward = "causal" in cell.mask, cell.way == "bwd"
    return float(np.mean([
        speed(cell.rival, cell.ranks, lengths, causal, backward, fitted)
        for lengths in packs_of(cell.mask, cell.ranks, count)
    ]))  # fmt: skip


def fitted_constants(rounds: int = 12) -> Constants:
    """Return the constants that fit the cells of `Cell.fitted`, by least squares of logarithms."""
    fitted_cells = [cell for cell in cells() if cell.fitted and cell.rival in RIVALS]
    published = np.array([cell.speed for cell in fitted_cells])

    def residuals(values: np.ndarray) -> np.ndarray:
        constants = Constants(*values.tolist())
        return np.log(np.array([predicted(cell, constants) for cell in fitted_cells]) / published)

    solution = fit(residuals, astuple(Constants()), astuple(LOW), astuple(HIGH), rounds, tight=0.1)
    return Constants(*solution.tolist())


__all__ = ["MASKS", "PASSES", "RANKS", "Cell", "cells", "fitted_constants", "packs_of", "predicted"]
