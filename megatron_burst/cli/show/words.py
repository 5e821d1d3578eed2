"""Title, subtitle and caption of a scene, for text, pictures and the gallery alike."""

from __future__ import annotations

from collections.abc import Sequence

from ...units import byte_size
from .scene import LayoutScene, MaskScene, ScheduleScene, Shards

Scene = MaskScene | LayoutScene | ScheduleScene
LONGEST = 60  # characters of a mask in a title
FAMILIES = {
    "kv": "keys and values (K, V)",
    "query": "queries and their row statistics (Q, dO, delta, lse)",
}


def title(scene: Scene) -> str:
    """One line that names the scene."""
    if isinstance(scene, ScheduleScene):
        grid, plan = scene.plan.grid, scene.plan
        where = (
            f"{grid.inter} nodes x {grid.intra} ranks" if grid.inter > 1 else f"{grid.size} ranks"
        )
        way = f"backward, side {plan.side}" if scene.backward else "forward"
        return f"{plan.algorithm}, {way}, {where}: {_pattern(scene.shards)}"
    if isinstance(scene, MaskScene):
        return _pattern(scene.shards)
    first = scene.rows[0]
    mask = f", mask {_short(first.mask_text)}" * bool(first.mask_text)
    return f"{first.seq_len} positions over {first.size} ranks{mask}"


def subtitle(scene: Scene) -> str:
    """One line on how to read the scene."""
    if isinstance(scene, MaskScene):
        return (
            f"{scene.shards.seq_len} positions over {scene.shards.size} ranks; each visible pair "
            "has the colour of the rank that computes it"
        )
    if isinstance(scene, LayoutScene):
        bars = "; bars: the work of each rank; dashed line: the mean" * bool(
            scene.rows[0].mask_text
        )
        return f"each position has the colour of the rank that holds it{bars}"
    travels = FAMILIES[scene.plan.side]
    gradients = ", their gradients follow" if scene.backward else ""
    route = " directly from owner to reader" if scene.plan.route == "direct" else ""
    every = "all" if scene.plan.kept == scene.size - 1 else "some"
    kept = f", {every} travelling chunks kept from forward" if scene.plan.kept else ""
    return f"{scene.shards.seq_len} positions; {travels} travel{route}{gradients}{kept}"


def caption(scene: Scene) -> list[str]:
    """The numbers of the scene, one line each."""
    if isinstance(scene, MaskScene):
        return [_balance(scene.shards.work, scene.shards.imbalance)]
    if isinstance(scene, LayoutScene):
        if not scene.rows[0].mask_text:
            return []
        lines = [f"{s.layout_text}: {_balance(s.work, s.imbalance)}" for s in scene.rows]
        return [*lines, f"least imbalance: {scene.best}"] if scene.best else lines
    pairs = scene.size**2
    return [
        f"{scene.computed} of {pairs} pairs of shards have a visible position pair; "
        + _balance(scene.work, scene.imbalance),
        *_totals(scene),
    ]


def _pattern(shards: Shards) -> str:
    return f"{_short(shards.mask_text)}, {_short(shards.layout_text)}"


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def _balance(work: Sequence[int], imbalance: float) -> str:
    low, high = min(work), max(work)
    each = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    return f"work per rank {each} pairs, imbalance {imbalance:.2f}"


def _totals(scene: ScheduleScene) -> list[str]:
    lines = []
    for (link, gradient), total in scene.totals.items():
        line = f"{link}{' gradient' * gradient} hops of all ranks: {_sent(total.hops, total.bytes)}"
        if total.hops < total.hops_of_all:
            line += f", instead of {_sent(total.hops_of_all, total.bytes_of_all)}"
        lines.append(line)
    sizes = scene.sizes
    heads = f"{sizes.heads} query heads and {sizes.kv_heads} key heads of width {sizes.width}"
    wire = ", gradients in fp32" * scene.backward
    return [*lines, f"({heads} in bf16{wire}, batch 1)"]


def _sent(hops: int, bytes_: int) -> str:
    return f"{hops} ({byte_size(bytes_)})" if hops else "none"
