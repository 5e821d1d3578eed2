"""Least squares for a few positive constants, and the errors of a fit. numpy only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

Residuals = Callable[[np.ndarray], np.ndarray]


class Errors(NamedTuple):
    """Absolute relative errors of all rows, as fractions."""

    median: float
    p90: float
    worst: float

    def __str__(self) -> str:
        return f"median {self.median:.1%}, p90 {self.p90:.1%}, worst {self.worst:.1%}"


def errors(predicted: Sequence[float], published: Sequence[float]) -> Errors:
    """Return the errors of predictions, relative to the published values."""
    off = np.abs(np.asarray(predicted) / np.asarray(published) - 1)
    return Errors(float(np.median(off)), float(np.quantile(off, 0.9)), float(off.max()))


def fit(
    residuals: Residuals, start: Sequence[float], low: Sequence[float], high: Sequence[float],
    rounds: int = 30, tight: float = 0.02,
) -> np.ndarray:  # fmt: skip
    """Return the constants between `low` and `high`, all above 0, that minimize the residuals.

    Levenberg and Marquardt on logarithms. Residuals above `tight` have less weight (soft L1), so
    that one contradicting row does not dominate the fit.
    """
    below, above = np.log(low), np.log(high)
    at = np.clip(np.log(start), below, above)
    errors, damping = residuals(np.exp(at)), 1e-2
    for _ in range(rounds):
        slope = np.stack([
            (residuals(np.exp(at + step)) - errors) / 1e-3 for step in 1e-3 * np.eye(len(at))
        ], axis=1)  # fmt: skip
        weight = 1 / np.sqrt(1 + (errors / tight) ** 2)
        normal = slope.T @ (slope * weight[:, None])
        downhill = -slope.T @ (errors * weight)
        better = False
        for _ in range(8):
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-9), downhill)
            candidate = np.clip(at + step, below, above)
            tried = residuals(np.exp(candidate))
            if _loss(tried, tight) < _loss(errors, tight):
                better = _loss(tried, tight) < (1 - 1e-5) * _loss(errors, tight)
                at, errors, damping = candidate, tried, damping / 5
                break
            damping *= 5
        if not better:
            break
    return np.exp(at)


def _loss(off: np.ndarray, tight: float) -> float:
    return float((np.sqrt(1 + (off / tight) ** 2) - 1).sum())
