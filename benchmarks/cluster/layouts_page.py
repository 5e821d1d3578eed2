"""What the suite `balanced` says of layouts: layout `balanced` beside zigzag, over its batches.

Of several algorithms in one layout, the one with the smallest predicted time stands for it, as
`auto` would choose; where nothing was predicted, the fastest.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from statistics import median

from . import cuts
from .comparison import Compared, Entry
from .results import Ratio
from .suites import EACH, MIXED, PACK

READING = """\
The algorithm of layout `balanced` is the one that is predicted to be the fastest in each batch.
Its time is divided by that of zigzag per document in whole chunks, and by that of the fastest rival
with zigzag of the pack; the latter, times the imbalance of that zigzag (visible pairs of the
queries of its busiest rank over their mean), is 1 where only this imbalance counts. Where queries
travel, ranks compute for their keys, whose imbalance is another: that is *as computed*. Medians
over the batches, and the smallest and largest."""


def chosen(cell: Compared, layout: str) -> Entry | None:
    """The rival that stands for a layout; None if none ran."""
    some = [e for e in cell.entries if e.name.startswith(f"{layout}, ")]
    return min(some, key=lambda e: (e.predicted or 0.0, median(e.seconds)), default=None)


def ratio(ours: Entry, other: Entry) -> float:
    """Our time over the other's, the median over runs that followed one another."""
    return median(a / b for a, b in zip(ours.seconds, other.seconds, strict=True))


def row(cells: Sequence[Compared]) -> dict[str, Ratio]:
    """Over batches: "each", our time over zigzag per document's; "pack", over zigzag of the pack's
    times the imbalance of that; "over", over our limit; "imbalance" of the pack, the same as
    "computed", and "ours"."""
    found: dict[str, list[float]] = {}
    for cell in cells:
        ours = chosen(cell, MIXED)
        each = next((e for e in cell.entries if e.name == f"{EACH}, whole chunks"), None)
        packs = [e for e in cell.entries if e.name.startswith(f"{PACK}, ")]
        if ours is None:
            continue
        found.setdefault("over", []).append(ours.over_limit)
        found.setdefault("ours", []).append(ours.imbalance or 1.0)
        if each is not None:
            found.setdefault("each", []).append(ratio(ours, each))
        if packs:
            pack = min(packs, key=lambda e: median(e.seconds))
            uneven = _imbalance(cell)
            found.setdefault("imbalance", []).append(uneven)
            found.setdefault("computed", []).append(pack.imbalance or 1.0)
            found.setdefault("pack", []).append(ratio(ours, pack) * uneven)
    return {name: Ratio(median(x), min(x), max(x)) for name, x in found.items()}


def table(cells: Sequence[Compared]) -> str:
    """A row per grid, documents and regime."""
    lines = [
        "| setting | over zigzag per document | over zigzag of the pack, times its imbalance | "
        "over the limit | imbalance of the pack's zigzag; as computed; of balanced | algorithms |",
        "|-|-|-|-|-|-|",
    ]
    for where, some in groupby(sorted(cells, key=_setting), key=_setting):
        batch = list(some)
        found = row(batch)
        taken = [e.name.partition(", ")[2] for c in batch if (e := chosen(c, MIXED))]
        names = ", ".join(f"{name} {taken.count(name)}" for name in dict.fromkeys(sorted(taken)))
        lines.append(
            f"| {where}, {len(batch)} batches | {_words(found.get('each'))} | "
            f"{_words(found.get('pack'))} | {_words(found.get('over'))} | "
            f"{'; '.join(_words(found.get(x)) for x in ('imbalance', 'computed', 'ours'))} | "
            f"{names} |"
        )
    return "\n".join([READING, "", *lines])


def _imbalance(cell: Compared) -> float:
    nodes, per_node, tokens = (cell.cell[name] for name in ("nodes", "per_node", "tokens"))
    length = tokens * nodes * per_node
    return cuts.imbalance("zigzag", cell.cell["mask"], length, nodes, per_node)


def _setting(cell: Compared) -> str:
    where = cell.cell
    documents = where["mask"].partition(" seed ")[0]
    return f"{where['nodes']} x {where['per_node']}, {documents}, {where['regime']}"


def _words(found: Ratio | None) -> str:
    return "" if found is None else f"{found[0]:.2f} ({found[1]:.2f} to {found[2]:.2f})"
