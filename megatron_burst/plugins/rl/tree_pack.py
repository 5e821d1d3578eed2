# SPDX-License-Identifier: Apache-2.0
"""A prefix tree as a packed batch: its `PackedSeqParams`, and its rows on ranks.

Data path, rotary embedding and attention get the pack of a `PackedSeqParams` from `packed`. The
pack of a tree has the tree's mask, its positions along paths, and a balanced layout of its own,
independent of the layout of the run.

Cumulative lengths cannot describe a tree, so the `cu_seqlens` of a tree only identify its pack: the
registry `packed.packs()` finds the pack by the identity of this tensor. A field or a subclass of
`PackedSeqParams` cannot carry the pack, because Megatron passes only `cu_seqlens` to the function
that applies rotary embeddings. Views have the same base but are other tensors, so they are not
recognized, nor are copies: their values [0, -tokens] are no lengths, and all our functions refuse
them by name.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ...layout import Layout
from ...layout import make as make_layout
from ...masks import Mask
from ...megatron.data.cut import BatchCut, cut_for
from ...megatron.data.packed import Pack, packs, params_of
from .trees import PrefixTree


@dataclass(frozen=True)
class TreePack(Pack):
    """A prefix tree as one packed sequence, whose rows are a multiple of what divides them.

    digest: of the tree's form; trees with equal digests have one mask and one layout. own: the cut
    of the run as if its layout were balanced.
    """

    digest: bytes = field(kw_only=True)
    own: BatchCut = field(kw_only=True)
    tree: PrefixTree = field(kw_only=True, compare=False)

    @classmethod
    def of(cls, tree: PrefixTree, config: Any) -> TreePack:
        """config: the `TransformerConfig` of the model, after `configure`."""
        total = len(tree.tokens)
        form = np.stack([tree.out, tree.positions]).tobytes()
        digest = hashlib.blake2b(form, digest_size=16).digest()
        choices = dataclasses.replace(config.burst, layout="balanced", cluster=None)
        cut = cut_for(config, choices)
        bounds = 0, total
        return cls(total, bounds, total, bounds, digest=digest, own=cut, tree=tree)

    @property
    def mask(self) -> Mask:
        """A token sees itself and what is before it on its path."""
        return self.tree.mask

    @property
    def chained(self) -> dict[str, Any]:
        """The tree."""
        return {"tree": self.tree}

    @property
    def cut_key(self) -> tuple:
        """All that the layout of the pack depends on; no run's cut does."""
        return self.total, self.digest, self.own

    def _layout(self, cut: BatchCut, cp_size: int) -> Layout:
        if cp_size == 1:
            return make_layout("contiguous", cp_size=1)
        return make_layout(
            "balanced",
            cp_size=cp_size,
            tree=self.tree,
            per_node=None if self.own.per_node is None else math.gcd(self.own.per_node, cp_size),
            windows=self.own.windows,
        )

    def places(self, cut: BatchCut, cp_size: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """int64 [total / cp_size] each: rows of the tree, and their places on their paths."""
        rows = self.layout(cut, cp_size).positions(rank, self.total)
        return rows, self.tree.positions[rows]

    def successors(self, *unused: Any, **named: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Raises ValueError: a token may have several next ones."""
        raise ValueError("prefix trees: multi-token prediction wants one next token for each")

    def params(self, device: torch.device) -> Any:
        """Return the `PackedSeqParams` of the tree.

        Pass the same object to all layers, also when they run again in backward. Megatron's loops
        do so.
        """
        known_by = torch.tensor([0, -self.total], dtype=torch.int32, device=device)
        packs().note(known_by, self)
        packs().note_cut(self)
        return params_of(known_by, int(self.tree.positions.max()) + 1)
