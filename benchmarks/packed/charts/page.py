"""Tables of docs/packed-published.md, made from the record alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.advise.fitting import errors
from benchmarks.report import DOCS, markdown, write_section

from . import fit
from .speeds import CHOSEN, CHOSEN_SHARED, SHARES, STREAMS

PAGE = DOCS / "packed-published.md"
Known = dict[str, Any]
BEST = f"{SHARES[-1]} GPUs share heads, prefetch"


def _odd(row: dict[str, Any]) -> bool:
    return row["rival"] == "allgather" and row["way"] == "bwd"


def summary(record: Known) -> str:
    """Return a table of the errors of the fit."""
    groups: list[tuple[str, Callable[[dict[str, Any]], bool]]] = [
        ("fitted: causal and packed causal at 8 and 64 GPUs, without LoongTrain",
         lambda row: row["fitted"]),
        ("predicted: all other cells, without backward of all-gather",
         lambda row: not row["fitted"] and not _odd(row)),
        ("predicted: packed documents, forward",
         lambda row: not row["fitted"] and "varlen" in row["mask"] and row["way"] == "fwd"),
        ("predicted: packed documents, backward",
         lambda row: not row["fitted"] and "varlen" in row["mask"] and row["way"] == "bwd"
         and not _odd(row)),
        ("backward of all-gather, not fitted", _odd),
    ]  # fmt: skip
    lines = []
    for name, belongs in groups:
        rows = [row for row in record["rivals"] if belongs(row)]
        off = errors([row["predicted"] for row in rows], [row["speed"] for row in rows])
        lines.append([name, str(len(rows)), *(f"{error:.1%}" for error in off)])
    return markdown(["cells", "number", "median error", "p90", "worst"], lines)


def _published(mask: str, way: str) -> dict[str, list[float]]:
    speeds: dict[str, list[float]] = {}
    for cell in fit.cells():
        if (cell.mask, cell.way) == (mask, way):
            speeds.setdefault(cell.rival, []).append(cell.speed)
    return speeds


def _ours(record: Known, causal: bool, way: str) -> dict[str, list[float]]:
    speeds: dict[str, list[float]] = {}
    for row in record["ours"]:
        if row["causal"] == causal:
            speeds.setdefault(row["name"], []).append(row[way])
    return speeds


def goals(record: Known) -> str:
    """Return a table of goals and results for packed causal documents."""
    magi = {way: _published("varlen_causal_mask", way)["magi_native"] for way in fit.PASSES}
    lines = []
    for name in (CHOSEN, CHOSEN_SHARED, BEST, *(n + STREAMS for n in (CHOSEN, CHOSEN_SHARED))):
        own = {way: _ours(record, True, way)[name] for way in fit.PASSES}
        lines.append([
            name,
            f"{own['fwd'][-1] / own['fwd'][0]:.2f}",
            f"{own['fwd'][-1] / magi['fwd'][-1]:.2f}",
            f"{own['bwd'][-1] / magi['bwd'][-1]:.2f}",
        ])  # fmt: skip
    lines.append(["goal", "0.95", "1.70", "1.30"])
    heads = ["speed on 64 GPUs, packed causal", "forward / on 8 GPUs", "forward / MagiAttention",
             "backward / MagiAttention"]  # fmt: skip
    return markdown(heads, lines)


SECTIONS: dict[str, Callable[[Known], str]] = {"goals": goals, "errors": summary}


def write(record: Known, page: Path = PAGE) -> None:
    """Write all sections."""
    for name, table in SECTIONS.items():
        write_section(page, name, table(record))
