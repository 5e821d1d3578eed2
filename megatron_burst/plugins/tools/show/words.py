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
LONGEST = 60  # maximum number of characters of a mask in a title
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
    """Return the title of a scene's picture, one line."""
    if isinstance(scene, TreeScene):
        paths = _counted(len(scene.tree.paths), "trajectory", "trajectories")
        return f"{paths} as a tree, {_grid(scene.grid)}: {_short(scene.shards.layout_text)}"
    if isinstance(scene, ScanScene):
        direction = "backward" if scene.backward else "forward"
        return f"{scene.algorithm}, {direction}, {_grid(scene.grid)}: {_short(scene.layout_text)}"
    if isinstance(scene, ScheduleScene):
        plan, grid = scene.plan, _grid(scene.plan.grid)
        two_sides = {"kv", "query"} <= {*scene.families}  # both sides are sent
        side = "" if two_sides else f", side {plan.side}"
        direction = f"backward{side}" if scene.backward else "forward"
        route = " with direct sends" if plan.route == "direct" else ""
        return f"{plan.algorithm}{route}, {direction}, {grid}: {_pattern(scene.shards)}"
    if isinstance(scene, MaskScene):
        return _pattern(scene.shards)
    first = scene.rows[0]
    mask = f", mask {_short(first.mask_text)}" if first.mask_text else ""
    return f"{first.seq_len} positions over {first.size} ranks{mask}"


def subtitle(scene: Scene) -> str:
    """Return the subtitle of a scene's picture: one line that explains it."""
    if isinstance(scene, TreeScene):
        return "a bar is a run of tokens without a branch, in the colour of the rank that holds it"
    if isinstance(scene, ScanScene):
        cut = f", part 1 of {scene.blocks}: s3.1" if scene.blocks > 1 else ""
        state = "gradient of the state after piece 3" if scene.backward else "state before piece 3"
        nodes = "; red: to another node" if scene.grid.inter > 1 else ""
        return f"s3: {state}{cut}; m3: map from states before to states after piece 3{nodes}"
    if isinstance(scene, MaskScene):
        return (
            f"{scene.shards.seq_len} positions over {scene.shards.size} ranks; each visible pair "
            "has the colour of the rank that computes it"
        )
    if isinstance(scene, LayoutScene):
        bars = "; bars: the work of each rank; dashed line: the mean"
        bars = bars if scene.rows[0].mask_text else ""
        return f"each position has the colour of the rank that holds it{bars}"
    return f"{scene.shards.seq_len} positions; {_transfers(scene)}"


def _transfers(scene: ScheduleScene) -> str:
    names = COPIES | {"query": STATISTICS} if scene.backward else COPIES
    copies = " and ".join(name for family, name in names.items() if family in scene.families)
    gradients = any(KINDS[family] == "gradient" for family in scene.families)
    follow = ", with their gradients" if gradients else ""
    returned = ", partial outputs (O, lse) are sent back" if "out" in scene.families else ""
    return f"{copies} are sent{follow}{returned}"


def name_of(chunk: Chunk) -> str:
    """Return the short name of a chunk, such as dk3: its kind of tensors, then its owner."""
    return f"{LETTERS[chunk.family]}{chunk.owner}"


def caption(scene: Scene) -> list[str]:
    """Return the caption lines of a scene's picture: numbers of transfers, bytes and work."""
    if isinstance(scene, ScanScene):
        pieces, rounds = _counted(len(scene.chains), "piece"), _counted(scene.rounds, "round")
        return [f"{pieces}, {scene.seq_len} positions; {rounds}", *scene.counts()]
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
            lines.append(f"keys and values from other {name}s, if each row is sent once to every "
                         f"{name} that needs it: {received}")  # fmt: skip
    return [*lines, f"({heads}, one layer)"]


def _grid(grid: Grid) -> str:
    return grid_of(grid.intra, grid.inter)


def _pattern(shards: Shards) -> str:
    return f"{_short(shards.mask_text)}, {_short(shards.layout_text)}"


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def _balance(work: Sequence[int], imbalance: float) -> str:
    low, high = min(work), max(work)
    work_range = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    return f"work per rank {work_range} pairs, imbalance {imbalance:.2f}"


def _totals(scene: ScheduleScene) -> list[str]:
    lines: dict[str, list[str]] = {}
    for (link, content), total in scene.totals.items():
        part = f"{link} {_sent(total.hops, total.bytes)}"
        if (total.hops, total.bytes) != (total.hops_of_all, total.bytes_of_all):
            part += f" instead of {_sent(total.hops_of_all, total.bytes_of_all)}"
        lines.setdefault(content, []).append(part)
    totals = [f"{name} hops".lstrip() + f": {', '.join(parts)}" for name, parts in lines.items()]
    if scene.plan.grid.inter > 1:
        gradient = ", and its gradient back" if scene.backward else ""
        once = byte_size(scene.once_per_node)
        totals.append(
            f"if each row is sent once to every node that needs it{gradient}: {once} between nodes"
        )
    received = byte_size(scene.received_bytes)
    totals.append(f"memory of received chunks on a rank: at most {received}")
    sizes = scene.sizes
    heads = f"{sizes.heads} query heads and {sizes.kv_heads} key heads of width {sizes.width}"
    wire = ", gradients in fp32" if scene.backward else ""
    return [*totals, f"({heads} in bf16{wire}, batch 1)"]


def _counted(count: int, noun: str, plural: str = "") -> str:
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def _sent(hops: int, bytes_: int) -> str:
    return f"{hops} ({byte_size(bytes_)})" if hops else "none"
