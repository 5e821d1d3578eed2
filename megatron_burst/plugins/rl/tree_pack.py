# SPDX-License-Identifier: Apache-2.0
"""Prefix tree as a packed batch of Megatron, and distribution of its rows over ranks.

Data loading, rotary embedding and attention look up the pack of a `PackedSeqParams` in the module
`data.packed`. The pack of a tree has the mask of the tree, positions along paths, and a balanced
layout that does not depend on the layout of the run.

Cumulative lengths cannot describe a tree, so `cu_seqlens` only identifies the pack of a tree. The
registry `packed.packs()` finds the pack by the identity of this tensor. A field or a subclass of
`PackedSeqParams` cannot carry the pack, because Megatron passes only `cu_seqlens` to the function
that applies rotary embeddings. Views and copies of `cu_seqlens` are other tensors, and are not
recognized. The values [0, -tokens] are no valid lengths, so all our functions raise an error for
them.
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
    """Prefix tree as one packed sequence.

    Attributes:
        digest: Digest of the tree's structure. Trees with equal digests have the same mask and
            layout.
        own: How the run splits batches over ranks, with layout "balanced" in place of the layout of
            the run.
        tree: The prefix tree.
    """

    digest: bytes = field(kw_only=True)
    own: BatchCut = field(kw_only=True)
    tree: PrefixTree = field(kw_only=True, compare=False)

    @classmethod
    def of(cls, tree: PrefixTree, config: Any) -> TreePack:
        """Return the pack of a tree.

        Args:
            tree: Prefix tree. The number of rows must be divisible by the number of
                context-parallel ranks (see the argument `multiple` of `trees.pack`).
            config: `TransformerConfig` of the model, after `configure`.
        """
        total = len(tree.tokens)
        form = np.stack([tree.out, tree.positions]).tobytes()
        digest = hashlib.blake2b(form, digest_size=16).digest()
        choices = dataclasses.replace(config.burst, layout="balanced", cluster=None)
        cut = cut_for(config, choices)
        bounds = 0, total
        return cls(total, bounds, total, bounds, digest=digest, own=cut, tree=tree)

    @property
    def mask(self) -> Mask:
        """Mask of the tree: a token sees itself and the earlier tokens of its path."""
        return self.tree.mask

    @property
    def chained(self) -> dict[str, Any]:
        """Keyword arguments that make linear attention follow the paths of the tree."""
        return {"tree": self.tree}

    @property
    def cut_key(self) -> tuple:
        """Cache key of the layout of the pack; it does not depend on the run's `BatchCut`."""
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
        """Return the rows of the tree on a rank, and their positions on their paths.

        Both are int64 [total / cp_size].
        """
        rows = self.layout(cut, cp_size).positions(rank, self.total)
        return rows, self.tree.positions[rows]

    def successors(self, *unused: Any, **named: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Raise ValueError, because a token of a tree may have several successors."""
        raise ValueError(
            "multi-token prediction does not support prefix trees, in which a token may have "
            "several next tokens; remove --mtp-num-layers"
        )

    def params(self, device: torch.device) -> Any:
        """Return the `PackedSeqParams` of the tree.

        All layers must get the same object, also when backward recomputes them. Megatron's training
        loops ensure this.
        """
        identity = torch.tensor([0, -self.total], dtype=torch.int32, device=device)
        packs().note(identity, self)
        packs().note_cut(self)
        return params_of(identity, int(self.tree.positions.max()) + 1)
