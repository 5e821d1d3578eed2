"""Tables and chart of docs/packed-published.md, made from the record alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.advise.fitting import errors
from benchmarks.report import DOCS, markdown, write_section

from . import fit
from .speeds import CHOSEN, CHOSEN_SHARED, SHARES, STREAMS

PAGE, CHART = DOCS / "packed-published.md", "packed-published-speed.png"
Known = dict[str, Any]
RIVAL_NAMES = {
    "ring_p2p": "ring of Transformer Engine", "ulysses": "Ulysses", "allgather": "all-gather",
    "usp": "USP", "loongtrain": "LoongTrain", "hybrid_dcp": "Megatron, hybrid",
    "magi_a2av": "MagiAttention, all-to-all-v", "magi_native": "MagiAttention",
}  # fmt: skip
PASSES = {"fwd": "forward", "bwd": "backward"}
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
    magi = {way: _published("varlen_causal_mask", way)["magi_native"] for way in PASSES}
    lines = []
    for name in (CHOSEN, CHOSEN_SHARED, BEST, *(n + STREAMS for n in (CHOSEN, CHOSEN_SHARED))):
        own = {way: _ours(record, True, way)[name] for way in PASSES}
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
    """Write all sections and the chart."""
    from matplotlib.figure import Figure

    for name, table in SECTIONS.items():
        write_section(page, name, table(record))
    figure = Figure(figsize=(10, 7), layout="constrained")
    _speeds(figure, record)
    figure.savefig(page.with_name(CHART), dpi=100)


# --- the chart -----------------------------------------------------------------------------------

GREY = {"ring_p2p": "#b9bec6", "ulysses": "#8d96a3", "allgather": "#c9a45c", "usp": "#626d7d",
        "loongtrain": "#76b900", "magi_native": "#4a7fb5"}  # fmt: skip
RED = {CHOSEN: "#e59a8c", BEST: "#c8452e", CHOSEN_SHARED + STREAMS: "#7a2b1d"}


def _speeds(figure: Any, record: Known) -> None:
    """Draw published and simulated speeds on 8 to 64 GPUs."""
    axes = figure.subplots(2, 2, sharex=True)
    for row, causal in zip(axes, (True, False), strict=True):
        mask = "varlen_causal_mask" if causal else "varlen_full_mask"
        for ax, (way, title) in zip(row, PASSES.items(), strict=True):
            for name, speeds in _published(mask, way).items():
                if name in GREY:
                    ax.plot(fit.RANKS, speeds, "o-", color=GREY[name], ms=4,
                            label=RIVAL_NAMES[name])  # fmt: skip
            for name, speeds in _ours(record, causal, way).items():
                if name in RED:
                    ax.plot(fit.RANKS, speeds, "s--", color=RED[name], lw=2, ms=5,
                            label=f"ours: {name}")  # fmt: skip
            shape = "causal" if causal else "full"
            ax.set_title(f"packed documents, {shape} mask, {title}", fontsize=10)
            ax.set_xscale("log", base=2)
            ax.set_xticks(fit.RANKS, [f"{ranks}" for ranks in fit.RANKS])
            ax.set_ylim(0, None)
            ax.grid(alpha=0.3)
    for ax in axes[:, 0]:
        ax.set_ylabel("TFLOP/s per GPU")
    for ax in axes[1]:
        ax.set_xlabel("H100 GPUs, 8K tokens each")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3,
                  fontsize=8, title="dashed: ours, simulated; solid: published")  # fmt: skip
