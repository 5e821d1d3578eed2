"""Time of a step of one batch by every method, ours and rivals, on the same documents."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_burst.layout import make

from . import megatron, ours
from .plans import Rings, apart, together
from .rings import BURST_WHOLE, FLAT, ROWS, Ring
from .setting import Lengths, Setting

METHODS = {
    "flat": "zigzag per document, all ranks: flat ring",
    "whole": "zigzag per document, all ranks: burst, whole chunks",
    "rows": "zigzag per document, all ranks: burst or multicast, rows",
    "pack": "zigzag of the pack, all ranks: `auto`",
    "fixed": "groups of one size that holds the longest: flat rings",
    "dynamic": "Megatron's default_dynamic_cp: flat rings",
    "balanced": "layout balanced, all ranks: `auto`",
}


@dataclass(frozen=True)
class Step:
    """One method on one batch: `layer` seconds of a layer, `note` on its plan."""

    method: str
    layer: float
    note: str = ""


class Forecast:
    """All methods on one number of ranks; results that do not depend on the batch are cached."""

    def __init__(self, setting: Setting, ranks: int):
        self.setting, self.ranks, self.flat = setting, ranks, Rings(setting, FLAT)

    @cached_property
    def _all(self) -> dict[str, Ring]:
        ways = {"flat": FLAT, "whole": BURST_WHOLE, "rows": ROWS}
        return {name: Ring(self.setting, self.ranks, way) for name, way in ways.items()}

    def draw(self, kind: Lengths, seed: int) -> np.ndarray:
        """Draw the documents of a batch."""
        return kind.draw(seed, self.ranks * self.setting.tokens)

    def ideal(self, lengths: np.ndarray) -> float:
        """Return seconds of a layer with equally busy ranks and free links."""
        pairs = float((lengths * (lengths + 1) / 2).sum()) / self.ranks
        return self.setting.per_token * self.setting.tokens + pairs * sum(self.setting.per_pair)

    def step(self, method: str, kind: Lengths, lengths: np.ndarray) -> Step | None:
        """Return the step of a method; None if it cannot run these documents."""
        setting, documents = self.setting, lengths.tolist()
        if method in self._all:
            squares = float((lengths.astype(float) ** 2).sum())
            return Step(method, self._all[method].layer(setting.tokens, squares))
        if method == "fixed":
            size = megatron.needed(kind.cap, setting.tokens)
            if size > self.ranks:
                return None
            plan = megatron.fixed(documents, self.ranks, size, setting.tokens)
            return Step(method, apart(plan, self.flat), f"groups of {size}")
        if method == "dynamic":
            plan = megatron.dynamic(documents, self.ranks, setting.tokens)
            return Step(method, together(plan, self.flat), f"{len(plan)} micro-batches")
        return self._layout(method, lengths)

    def _layout(self, method: str, lengths: np.ndarray) -> Step:
        name = {"pack": "zigzag", "balanced": "balanced"}[method]
        bounds = np.concatenate([[0], np.cumsum(lengths)])
        documents = {"cu_seqlens": bounds} if name == "balanced" else {}
        passes = ours.passes(self.setting, make(name, cp_size=self.ranks, **documents), lengths)
        note = f"{'/'.join(passes.algorithms)}, balance {passes.balance:.2f}"
        return Step(method, passes.seconds + self.setting.per_token * self.setting.tokens, note)

    def tokens_per_second(self, layer: float) -> float:
        """Return tokens per second of one GPU, over a whole step."""
        return self.setting.tokens / (self.setting.layers * (layer + self.setting.sync))
