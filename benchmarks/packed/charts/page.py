"""The tables and pictures of docs/packed-published.md, from the record alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.advise.fitting import errors
from benchmarks.report import DOCS, markdown, write_section

from . import fit
from .speeds import CHOSEN, CHOSEN_SHARED, SHARES

PAGE = DOCS / "packed-published.md"
Known = dict[str, Any]
Rows = list[dict[str, Any]]
RIVAL_NAMES = {
    "ring_p2p": "ring (TransformerEngine)", "ulysses": "Ulysses", "allgather": "all-gather",
    "usp": "USP", "loongtrain": "LoongTrain", "hybrid_dcp": "Megatron, hybrid",
    "magi_a2av": "MagiAttention, all-to-all-v", "magi_native": "MagiAttention, native",
}  # fmt: skip
PASSES = {"fwd": "forward", "bwd": "backward"}
BEST = f"{SHARES[-1]} GPUs share heads, prefetch"
PARTS = {
    "kernel": ("kernel, whole documents", "#4a7fb5"),
    "pieces": ("kernel, smaller pieces", "#9cbcd9"),
    "adding": ("adding partial results", "#c9a45c"),
    "busiest": ("busiest rank over the mean", "#8d96a3"),
    "exposed": ("exposed transfers", "#c8452e"),
}
TREE_BARS = {
    "usp": ("USP, documents", "#8d96a3"),
    "plain": ("documents", "#e59a8c"),
    "tree": ("trees", "#c8452e"),
    "plain_shared": ("documents, 8 GPUs share heads", "#9cbcd9"),
    "tree_shared": ("trees, 8 GPUs share heads", "#4a7fb5"),
}
STEP_NAMES = {
    "dp_balanced": "Megatron, dp_balanced", "dynamic_cp": "Megatron, dynamic CP",
    "fours": "balanced in groups of four", "all": "balanced over all GPUs",
}  # fmt: skip


def _odd(row: dict[str, Any]) -> bool:
    return row["rival"] == "allgather" and row["way"] == "bwd"


def constants(known: Known) -> str:
    """What was fitted, with units."""
    found = known["constants"]
    said = [
        f"{one['rate'] / 1e12:.0f} TFLOP/s in tiles; a row besides as {one['edge']:.0f} keys"
        for one in known["kernel"]
    ]
    lines = [
        *(["kernel alone, " + way, each] for way, each in zip(PASSES.values(), said, strict=True)),
        ["NVLink, each way", f"{found['intra'] / 1e9:.0f} GB/s"],
        ["network, each way and GPU", f"{found['inter'] / 1e9:.1f} GB/s"],
        ["an all-to-all or a gather, besides its bytes", f"{found['start'] * 1e3:.2f} ms"],
        ["a step of a ring besides its kernel, forward", f"{found['forward'] * 1e3:.2f} ms"],
        ["a step of a ring besides its kernel, backward", f"{found['backward'] * 1e3:.2f} ms"],
    ]
    return markdown(["fitted", "value"], lines)


def summary(known: Known) -> str:
    """Errors of the fit."""
    groups: list[tuple[str, Callable[[dict[str, Any]], bool]]] = [
        ("fitted: causal and packed causal at 8 and 64 GPUs, without LoongTrain",
         lambda row: row["fitted"]),
        ("predicted: all others, but for backward of all-gather",
         lambda row: not row["fitted"] and not _odd(row)),
        ("of these packed, forward",
         lambda row: not row["fitted"] and "varlen" in row["mask"] and row["way"] == "fwd"),
        ("of these packed, backward",
         lambda row: not row["fitted"] and "varlen" in row["mask"] and row["way"] == "bwd"
         and not _odd(row)),
        ("backward of all-gather, left out of the fit", _odd),
    ]  # fmt: skip
    lines = []
    for name, belongs in groups:
        some = [row for row in known["rivals"] if belongs(row)]
        off = errors([row["predicted"] for row in some], [row["speed"] for row in some])
        lines.append([name, str(len(some)), *(f"{each:.1%}" for each in off)])
    return markdown(["cells", "number", "median error", "90 %", "worst"], lines)


def by_row(known: Known) -> str:
    """Every row of the charts beside its prediction."""
    lines = []
    for mask, title in fit.MASKS.items():
        for way, said in PASSES.items():
            for rival in dict.fromkeys(row["rival"] for row in known["rivals"]):
                row = {r["ranks"]: r for r in known["rivals"]
                       if (r["mask"], r["way"], r["rival"]) == (mask, way, rival)}  # fmt: skip
                lines.append([f"{title}, {said}", RIVAL_NAMES[rival], *(
                    f"{one['speed']:.0f}, {one['predicted']:.0f} "
                    f"({one['predicted'] / one['speed'] - 1:+.0%}{', fitted' * one['fitted']})"
                    for one in row.values()
                )])  # fmt: skip
    return markdown(["", "", *(f"{ranks} GPUs" for ranks in fit.RANKS)], lines)


def _published(mask: str, way: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for cell in fit.cells():
        if (cell.mask, cell.way) == (mask, way):
            found.setdefault(cell.rival, []).append(cell.speed)
    return found


def _ours(known: Known, causal: bool, way: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for row in known["ours"]:
        if row["causal"] == causal:
            found.setdefault(row["name"], []).append(row[way])
    return found


def speeds(known: Known, causal: bool) -> str:
    """TFLOP/s of a GPU, ours beside the published ones."""
    mask = "varlen_causal_mask" if causal else "varlen_full_mask"
    lines = []
    for published in (True, False):
        both = [_published(mask, way) if published else _ours(known, causal, way) for way in PASSES]
        for name in both[0]:
            said = f"{RIVAL_NAMES[name]}, published" if published else f"{name}, simulated"
            cells = [f"{each:.0f}" for found in both for each in found[name]]
            kept = [f"{found[name][-1] / found[name][0]:.2f}" for found in both]
            lines.append([said, *cells[:4], kept[0], *cells[4:], kept[1]])
    heads = [f"{said} {ranks}" for said in PASSES.values() for ranks in (*fit.RANKS, "64 over 8")]
    return markdown(["TFLOP/s per GPU", *heads], lines)


def goals(known: Known) -> str:
    """What was hoped for, at 64 GPUs packed causal, beside what was found."""
    magi = {way: _published("varlen_causal_mask", way)["magi_native"] for way in PASSES}
    lines = []
    for name in (CHOSEN, CHOSEN_SHARED, BEST, "prefetch"):
        own = {way: _ours(known, True, way)[name] for way in PASSES}
        lines.append([
            name,
            f"{own['fwd'][-1] / own['fwd'][0]:.2f}",
            f"{own['fwd'][-1] / magi['fwd'][-1]:.2f}",
            f"{own['bwd'][-1] / magi['bwd'][-1]:.2f}",
            f"{own['fwd'][0] / magi['fwd'][0]:.2f}, {own['bwd'][0] / magi['bwd'][0]:.2f}",
        ])  # fmt: skip
    lines.append(["goal", "0.95", "1.70", "1.30", "-"])
    heads = ["packed causal", "forward, 64 over 8 GPUs", "forward over Magi's at 64",
             "backward over Magi's at 64", "both over Magi's at 8"]  # fmt: skip
    return markdown(heads, lines)


def parts(known: Known) -> str:
    """Where the time of what `auto` picks goes."""
    lines = []
    for row in known["parts"]:
        for way, said in PASSES.items():
            each = [row[f"{way}_{key}"] for key in PARTS]
            title = f"packed {'causal' if row['causal'] else 'full'}, {said}, {row['ranks']} GPUs"
            lines.append([title, *(f"{one:.2f}" for one in each), f"{sum(each):.2f}"])
    return markdown(["milliseconds", *(name for name, _ in PARTS.values()), "all"], lines)


def dynamic(known: Known) -> str:
    """Megatron's example."""
    lines = []
    for row in known["dynamic"]:
        given = f"{row['published']:.1f}" if row["published"] else "-"
        base = next(x for x in known["dynamic"]
                    if x["way"] == "dp_balanced" and x["gpus"] == row["gpus"])  # fmt: skip
        gain = f"{base['published'] / row['published']:.2f}" if row["published"] else "-"
        lines.append([
            STEP_NAMES[row["way"]], str(row["gpus"]), f"{row['micro_batches']:.2f}",
            f"{row['calls']:.1f}", given, gain, f"{row['predicted']:.0f}",
            f"{base['predicted'] / row['predicted']:.2f}",
        ])  # fmt: skip
    heads = ["", "GPUs", "micro-batches", "calls", "published ms", "gain", "counted ms", "gain"]
    return markdown(heads, lines)


def trees(known: Known) -> str:
    """Agent trajectories."""
    lines = [
        [f"{'prompt and turns' if row['turns'] else 'system prompt'}, {row['ranks']} GPUs",
         f"{row['tokens']:.2f}", f"{row['pairs']:.2f}",
         *(f"{row[key]:.0f}" for key in TREE_BARS),
         f"{row['plain'] / row['tree']:.2f}, {row['plain_shared'] / row['tree_shared']:.2f}"]
        for row in known["trees"]
    ]  # fmt: skip
    heads = ["shared by samples", "fewer tokens", "fewer pairs",
             *(f"{name}, ms" for name, _ in TREE_BARS.values()),
             "speed of trees over documents"]  # fmt: skip
    return markdown(heads, lines)


SECTIONS: dict[str, Callable[[Known], str]] = {
    "goals": goals,
    "packed causal": lambda known: speeds(known, True),
    "packed full": lambda known: speeds(known, False),
    "parts": parts,
    "constants": constants,
    "errors": summary,
    "rows": by_row,
    "dynamic": dynamic,
    "trees": trees,
}


def write(known: Known, page: Path = PAGE) -> None:
    """All sections and pictures."""
    for name, made in SECTIONS.items():
        write_section(page, name, made(known))
    for name, draw in PICTURES.items():
        _saved(draw, known, page.with_name(f"packed-published-{name}.png"))


# --- pictures ------------------------------------------------------------------------------------

GREY = {"ring_p2p": "#b9bec6", "ulysses": "#8d96a3", "allgather": "#c9a45c", "usp": "#626d7d",
        "loongtrain": "#76b900", "magi_native": "#4a7fb5"}  # fmt: skip
RED = {CHOSEN: "#e59a8c", BEST: "#c8452e"}


def _saved(draw: Callable[[Any, Known], None], known: Known, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    draw(figure, known)
    figure.savefig(path, dpi=100)


def _speeds(figure: Any, known: Known) -> None:
    """How fast are packed documents on 8 to 64 GPUs?"""
    figure.set_size_inches(10, 7)
    axes = figure.subplots(2, 2, sharex=True)
    for row, causal in zip(axes, (True, False), strict=True):
        mask = "varlen_causal_mask" if causal else "varlen_full_mask"
        for ax, (way, said) in zip(row, PASSES.items(), strict=True):
            for name, each in _published(mask, way).items():
                if name in GREY:
                    ax.plot(fit.RANKS, each, "o-", color=GREY[name], ms=4,
                            label=f"{RIVAL_NAMES[name]}, published")  # fmt: skip
            for name, each in _ours(known, causal, way).items():
                if name in RED:
                    ax.plot(fit.RANKS, each, "s--", color=RED[name], lw=2, ms=5,
                            label=f"balanced: {name}, simulated")  # fmt: skip
            ax.set_title(f"packed {'causal' if causal else 'full'}, {said}", fontsize=10)
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


def _fit(figure: Any, known: Known) -> None:
    """How well do five constants describe the rivals?"""
    from matplotlib.ticker import FixedLocator, NullLocator

    figure.set_size_inches(10, 4.8)
    for ax, (way, said) in zip(figure.subplots(1, 2), PASSES.items(), strict=True):
        for rival in dict.fromkeys(row["rival"] for row in known["rivals"]):
            for was_fitted in (True, False):
                some = [
                    row
                    for row in known["rivals"]
                    if (row["way"], row["rival"], row["fitted"]) == (way, rival, was_fitted)
                ]
                colour = GREY[rival]
                ax.scatter([row["speed"] for row in some], [row["predicted"] for row in some], s=28,
                           edgecolors=colour, facecolors=colour if was_fitted else "none",
                           label=RIVAL_NAMES[rival] if not was_fitted else None)  # fmt: skip
        ends = [18, 800]
        ax.plot(ends, ends, color="black", lw=0.8)
        ax.fill_between(ends, [0.9 * x for x in ends], [1.1 * x for x in ends], color="black",
                        alpha=0.08)  # fmt: skip
        ax.set(xscale="log", yscale="log", xlim=ends, ylim=ends, title=said,
               xlabel="published, TFLOP/s per GPU", ylabel="simulated")  # fmt: skip
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(FixedLocator([20, 50, 100, 200, 500]))
            axis.set_major_formatter("{x:.0f}")
            axis.set_minor_locator(NullLocator())
        ax.legend(fontsize=8, title="filled: fitted; open: predicted", title_fontsize=8)


def _stacked(figure: Any, known: Known) -> None:
    """Where does the time go?"""
    rows = [row for row in known["parts"] if row["causal"]]
    for ax, (way, said) in zip(figure.subplots(1, 2), PASSES.items(), strict=True):
        base = np.zeros(len(rows))
        for key, (name, colour) in PARTS.items():
            each = np.array([row[f"{way}_{key}"] for row in rows])
            ax.bar(range(len(rows)), each, 0.6, bottom=base, color=colour, label=name)
            base += each
        ax.set_xticks(range(len(rows)), [f"{row['ranks']} GPUs" for row in rows])
        ax.set(title=f"packed causal, {said}, auto: simulated", ylabel="ms")
        ax.grid(axis="y", alpha=0.3)
        ax.set_axisbelow(True)
    figure.axes[0].legend(fontsize=8)


def _steps(figure: Any, known: Known) -> None:
    """What do groups gain in Megatron's example?"""
    ax = figure.subplots()
    gpus = sorted({row["gpus"] for row in known["dynamic"]})
    colours = dict(zip(STEP_NAMES, ("#8d96a3", "#76b900", "#c8452e", "#e59a8c"), strict=True))
    width = 0.14
    bars: list[tuple[str, str, Sequence[float]]] = []
    for way in STEP_NAMES:
        rows = [row for row in known["dynamic"] if row["way"] == way]
        if rows[0]["published"]:
            bars.append((way, "published", [row["published"] for row in rows]))
        bars.append((way, "simulated", [row["predicted"] for row in rows]))
    for at, (way, kind, each) in enumerate(bars):
        places = np.arange(len(gpus)) + (at - (len(bars) - 1) / 2) * width
        real = kind == "published"
        ax.bar(places, each, 0.92 * width, color=colours[way], alpha=1.0 if real else 0.55,
               hatch="" if real else "//", edgecolor="white",
               label=f"{STEP_NAMES[way]}, {kind}")  # fmt: skip
    ax.set_xticks(range(len(gpus)), [f"{each} GPUs" for each in gpus])
    ax.set(ylabel="ms of a step", title="Megatron's example of dynamic CP; hatched: simulated")
    ax.grid(axis="y", alpha=0.3)
    ax.set_axisbelow(True)
    ax.legend(fontsize=8)


def _trees(figure: Any, known: Known) -> None:
    """What does a tree gain on agent trajectories?"""
    for ax, turns in zip(figure.subplots(1, 2), (False, True), strict=True):
        rows = [row for row in known["trees"] if row["turns"] == turns]
        for at, (key, (name, colour)) in enumerate(TREE_BARS.items()):
            ax.bar(np.arange(len(rows)) + (at - 2) * 0.17, [row[key] for row in rows], 0.16,
                   color=colour, label=name)  # fmt: skip
        ax.set_xticks(range(len(rows)), [f"{row['ranks']} GPUs" for row in rows])
        ax.set(title=f"shared {'prompt and turns' if turns else 'system prompt'}, simulated",
               ylabel="ms of attention of a layer")  # fmt: skip
        ax.grid(axis="y", alpha=0.3)
        ax.set_axisbelow(True)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5,
                  fontsize=8)  # fmt: skip


PICTURES: dict[str, Callable[[Any, Known], None]] = {
    "speed": _speeds, "fit": _fit, "parts": _stacked, "dynamic": _steps, "trees": _trees,
}  # fmt: skip
