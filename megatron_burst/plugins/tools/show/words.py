# SPDX-License-Identifier: Apache-2.0
"""Title, subtitle and caption of a scene, for pictures and for the gallery."""

from __future__ import annotations

from collections.abc import Sequence

from ....schedule.tables import Chunk, Grid
from ....units import byte_size, grid_of
from .scans import ScanScene
from .scene import KINDS, LayoutScene, MaskScene, ScheduleScene, Shards
from .trees import TreeScene

Scene = MaskScene | LayoutScene | ScanScene | ScheduleScene | TreeScene
LONGEST = 60  # characters of a mask in a title
COPIES = {"kv": "keys and values (K, V)", "query": "queries (Q)"}
STATISTICS = "queries and their row statistics (Q, dO, delta, lse)"  # in backward
FAMILIES = {
    "kv": "keys and values",
    "query": "queries",
    "dkv": "gradient of keys and values",
    "dquery": "gradient of queries",
    "out": "partial output with its lse",
}
LETTERS = {"kv": "k", "query": "q", "dkv": "dk", "dquery": "dq", "out": "o"}


def title(scene: Scene) -> str:
    """One line that names the scene."""
    if isinstance(scene, TreeScene):
        what = _counted(len(scene.tree.paths), "trajectory", "trajectories")
        return f"{what} as a tree, {_grid(scene.grid)}: {_short(scene.shards.layout_text)}"
    if isinstance(scene, ScanScene):
        way = "backward" if scene.backward else "forward"
        return f"{scene.algorithm}, {way}, {_grid(scene.grid)}: {_short(scene.layout_text)}"
    if isinstance(scene, ScheduleScene):
        plan, where = scene.plan, _grid(scene.plan.grid)
        both = {"kv", "query"} <= {*scene.families}  # then no side is the travelling one
        side = "" if both else f", side {plan.side}"
        way = f"backward{side}" if scene.backward else "forward"
        route = " with direct sends" if plan.route == "direct" else ""
        return f"{plan.algorithm}{route}, {way}, {where}: {_pattern(scene.shards)}"
    if isinstance(scene, MaskScene):
        return _pattern(scene.shards)
    first = scene.rows[0]
    mask = f", mask {_short(first.mask_text)}" if first.mask_text else ""
    return f"{first.seq_len} positions over {first.size} ranks{mask}"


def subtitle(scene: Scene) -> str:
    """One line on how to read the scene."""
    if isinstance(scene, TreeScene):
        return "a bar is a run of tokens without a branch, in the colour of the rank that holds it"
    if isinstance(scene, ScanScene):
        cut = f", part 1 of {scene.blocks}: s3.1" if scene.blocks > 1 else ""
        what = (
            "gradient of a state that enters piece 3 from behind"
            if scene.backward
            else ("state that enters piece 3")
        )
        nodes = "; red: to another node" if scene.grid.inter > 1 else ""
        return f"s3: the {what}{cut}; m3: what piece 3 does to any{nodes}"
    if isinstance(scene, MaskScene):
        return (
            f"{scene.shards.seq_len} positions over {scene.shards.size} ranks; each visible pair "
            "has the colour of the rank that computes it"
        )
    if isinstance(scene, LayoutScene):
        bars = "; bars: the work of each rank; dashed line: the mean"
        bars = bars if scene.rows[0].mask_text else ""
        return f"each position has the colour of the rank that holds it{bars}"
    return f"{scene.shards.seq_len} positions; {_travels(scene)}"


def _travels(scene: ScheduleScene) -> str:
    names = COPIES | {"query": STATISTICS} if scene.backward else COPIES
    copies = " and ".join(name for family, name in names.items() if family in scene.families)
    gradients = any(KINDS[family] == "gradient" for family in scene.families)
    follow = ", with their gradients" if gradients else ""
    returned = ", partial outputs (O, lse) return" if "out" in scene.families else ""
    return f"{copies} are sent{follow}{returned}"


def name_of(chunk: Chunk) -> str:
    """A chunk in short: its family's letter and its owner."""
    return f"{LETTERS[chunk.family]}{chunk.owner}"


def caption(scene: Scene) -> list[str]:
    """The numbers of the scene, one line each."""
    if isinstance(scene, ScanScene):
        many, rounds = _counted(len(scene.chains), "piece"), _counted(scene.rounds, "round")
        return [f"{many}, {scene.seq_len} positions; {rounds}", *scene.counts()]
    if isinstance(scene, TreeScene):
        return _tree(scene)
    if isinstance(scene, MaskScene):
        return [_balance(scene.shards.work, scene.shards.imbalance)]
    if isinstance(scene, LayoutScene):
        if not scene.rows[0].mask_text:
            return []
        lines = [f"{s.layout_text}: {_balance(s.work, s.spread)}" for s in scene.rows]
        return [*lines, f"least imbalance: {scene.best}"] if scene.best else lines
    pairs = scene.size**2
    return [
        f"{scene.computed} of {pairs} pairs of shards have work; "
        + _balance(scene.work, scene.imbalance),
        *_totals(scene),
    ]


def _tree(scene: TreeScene) -> list[str]:
    low, high = min(scene.rows), max(scene.rows)
    padding = scene.shards.seq_len - sum(scene.rows)
    rows = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    filled = f" and {_counted(padding, 'row')} of padding" if padding else ""
    heads = f"{_counted(scene.key_heads, 'key head')} of width {scene.width} in bf16"
    lines = [
        scene.tree.describe(),
        f"{rows} rows per rank{filled}; {_balance(scene.work, scene.imbalance)}",
    ]
    for name, size in (("rank", 1), ("node", scene.grid.intra)):
        if size < scene.grid.size:
            received = byte_size(scene.received(size))
            lines.append(f"keys and values from other {name}s, each row once to every {name} that "
                         f"needs it: {received}")  # fmt: skip
    return [*lines, f"({heads}, one layer)"]


def _grid(grid: Grid) -> str:
    return grid_of(grid.intra, grid.inter)


def _pattern(shards: Shards) -> str:
    return f"{_short(shards.mask_text)}, {_short(shards.layout_text)}"


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def _balance(work: Sequence[int], imbalance: float) -> str:
    low, high = min(work), max(work)
    each = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    return f"work per rank {each} pairs, imbalance {imbalance:.2f}"


def _totals(scene: ScheduleScene) -> list[str]:
    lines: dict[str, list[str]] = {}
    for (link, what), total in scene.totals.items():
        part = f"{link} {_sent(total.hops, total.bytes)}"
        if (total.hops, total.bytes) != (total.hops_of_all, total.bytes_of_all):
            part += f" instead of {_sent(total.hops_of_all, total.bytes_of_all)}"
        lines.setdefault(what, []).append(part)
    said = [f"{what} hops".lstrip() + f": {', '.join(parts)}" for what, parts in lines.items()]
    if scene.plan.grid.inter > 1:
        gradient = ", and its gradient back" if scene.backward else ""
        once = byte_size(scene.once_per_node)
        said.append(f"each row once to every node that needs it{gradient}: {once} between nodes")
    said.append(f"memory of received chunks on a rank: at most {byte_size(scene.held)}")
    sizes = scene.sizes
    heads = f"{sizes.heads} query heads and {sizes.kv_heads} key heads of width {sizes.width}"
    wire = ", gradients in fp32" if scene.backward else ""
    return [*said, f"({heads} in bf16{wire}, batch 1)"]


def _counted(count: int, noun: str, many: str = "") -> str:
    return f"{count:,} {noun if count == 1 else many or noun + 's'}"


def _sent(hops: int, bytes_: int) -> str:
    return f"{hops} ({byte_size(bytes_)})" if hops else "none"
