# SPDX-License-Identifier: Apache-2.0
"""Selection rules: the scores of keys for a query, and the units in which keys are selected.

A rule is a class in this module with an entry in `RULES`. A user's rule is an object with the same
attributes. A unit is a block of `block` consecutive positions; unit u starts at position u * block.

Shape letters: s query rows, t key rows, u units, b batch, i index heads, k index key heads, d
width; H selections of a query row, one for each group of attention heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class SelectionRule(Protocol):
    """Interface of a selection rule: it scores units (blocks of consecutive keys) for queries.

    All ranks must pass the same rule: the class and the attributes must be equal. A rule may have
    these optional attributes:

    - `means` (int): a divisor of `block`. Each unit is divided into `means` equal parts. The mean
      key of each part is sent, and `scores` gets the means in place of keys. If `means` is 0, all
      keys are sent.
    - `first` (bool): True if the first visible unit is always selected.
    - `near` (int): number of units before the query's own unit that are always selected.
    - `softmax` (bool): if True, `scores` returns one score per mean, [s, b, i, means of all units],
      instead of one per unit. The softmax of these scores is over all means that end at or before
      the query. The score of a unit is the sum of the probabilities of its means, over all index
      heads that share a selection.

    Attributes:
        block: Number of positions of a unit.
        own: True if the unit that contains the query is always selected.
        weighted: True if the rule uses weights of the index heads.
    """

    @property
    def block(self) -> int: ...

    @property
    def own(self) -> bool: ...

    @property
    def weighted(self) -> bool: ...

    def selections(self, heads: int, key_heads: int) -> int:
        """Return H, the number of selections of a query row.

        Args:
            heads: Number of index heads.
            key_heads: Number of index key heads.

        Raises:
            ValueError: The rule does not support these numbers of heads.
        """
        ...

    def scores(
        self, q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the scores [s, b, H, u] of units.

        The score of a query and a unit must depend only on this query and the keys of this unit.
        Use torch operators that are differentiable in the three tensors. Parameters of the rule get
        no gradient.

        Args:
            q: Index queries [s, b, i, d].
            k: Index keys [t, b, k, d] in the order of units, with t = u * block; or means of keys,
                with t = u * means.
            weights: Weights of the index heads [s, b, i], or None.
        """
        ...


def _shared(heads: int, key_heads: int) -> int:
    if key_heads != 1:
        raise ValueError(f"index_k: this rule has one index key head, got {key_heads}")
    return 1


def _weighted(
    q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor | None, relu: bool
) -> torch.Tensor:
    """Return the scores [s, b, 1, t]: the sum over heads h of weights[h] * relu(q[h] . k).

    If `relu` is False, relu is omitted.
    """
    assert weights is not None
    products = torch.einsum("sbid,tbd->sbit", q, k[:, :, 0])
    products = torch.relu(products) if relu else products
    return torch.einsum("sbi,sbit->sbt", weights, products).unsqueeze(2)


def _dots(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return the products q . k [s, b, i, t]; consecutive query heads share a key head."""
    products = torch.einsum("sbkgd,tbkd->sbkgt", q.unflatten(2, (k.shape[2], -1)), k)
    return products.flatten(2, 3)


@dataclass(frozen=True)
class Dsa:
    """Rule that selects single tokens by the score sum_h w[h] * relu(q[h] . k) (DeepSeek-V3.2).

    All heads share one selection. If `relu` is False, relu is omitted (GLM-5).
    """

    block: int = 1
    own: bool = False
    weighted: bool = True
    relu: bool = True

    def selections(self, heads: int, key_heads: int) -> int:
        return _shared(heads, key_heads)

    def scores(
        self, q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor | None
    ) -> torch.Tensor:
        return _weighted(q, k, weights, self.relu)


@dataclass(frozen=True)
class Qsa(Dsa):
    """Rule that selects blocks by the `Dsa` score of their mean key (Qwen).

    The query's own block is always selected.
    """

    block: int = 4
    own: bool = True
    means: int = 1


@dataclass(frozen=True)
class Moba:
    """Rule that selects blocks for each query head, by the product of q and the mean key (Kimi).

    The query's own block is always selected.
    """

    block: int = 512
    own: bool = True
    weighted: bool = False
    means: int = 1

    def selections(self, heads: int, key_heads: int) -> int:
        return heads

    def scores(
        self, q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor | None
    ) -> torch.Tensor:
        return _dots(q, k)


@dataclass(frozen=True)
class Msa(Moba):
    """Rule that selects blocks for each index head, by the largest q . k in the block (MiniMax-M3).

    The query's own block is always selected. MiniMax-M3 has one index head per key/value head, and
    one index key head.
    """

    block: int = 128
    means: int = 0

    def scores(
        self, q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor | None
    ) -> torch.Tensor:
        return _dots(q, k).unflatten(-1, (-1, self.block)).amax(-1)


@dataclass(frozen=True)
class Nsa:
    """Rule that selects blocks by the query's attention to compressed keys (DeepSeek NSA).

    The attention probabilities are summed over the query heads that share a key head. The first
    visible block, the query's own block and the block before it are always selected. Pass q and k
    of the attention as index_q and index_k. Each compressed key is the mean of one of `means` equal
    parts of a block. For a learned compression, apply a linear map to the keys before the call.

    Source: arXiv 2502.11089, section 3.3.2.

    Attributes:
        scale: Factor of the scores of the attention to compressed keys; None means d ** -0.5.
    """

    block: int = 64
    means: int = 4
    scale: float | None = None
    own: bool = True
    first: bool = True
    near: int = 1
    softmax: bool = True
    weighted: bool = False

    def selections(self, heads: int, key_heads: int) -> int:
        return key_heads

    def scores(
        self, q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor | None
    ) -> torch.Tensor:
        return _dots(q, k) * (q.shape[-1] ** -0.5 if self.scale is None else self.scale)


RULES: dict[str, type[SelectionRule]] = {
    "dsa": Dsa,
    "qsa": Qsa,
    "moba": Moba,
    "msa": Msa,
    "nsa": Nsa,
}


def rule_of(rule: str | SelectionRule) -> SelectionRule:
    """Return the rule of this module with the given name, or check and return a rule object.

    Raises:
        ValueError: The name is unknown, or the object does not implement `SelectionRule`.
    """
    if isinstance(rule, str) and rule in RULES:
        return RULES[rule]()
    required = "block", "own", "weighted", "selections", "scores"
    if isinstance(rule, (str, type)) or not all(hasattr(rule, name) for name in required):
        raise ValueError(
            f"rule must be one of {', '.join(RULES)}, or an object with {', '.join(required)}, "
            f"got {rule!r:.100}"
        )
    if type(rule.block) is not int or rule.block < 1:
        raise ValueError(f"rule: block must be a positive integer, got {rule.block!r}")
    means = getattr(rule, "means", 0)
    if type(means) is not int or means < 0 or (means and rule.block % means):
        raise ValueError(
            f"rule: means must divide its block of {rule.block} positions, or be 0, got {means!r}"
        )
    return rule


def described(rule: SelectionRule) -> tuple[object, ...]:
    """Return the values of a rule that must be equal on all ranks: class name and attributes."""
    return type(rule).__name__, rule.block, rule.own, tuple(sorted(vars(rule).items()))


def forced(rule: SelectionRule) -> int:
    """Return the maximum number of units that the rule always selects for a query."""
    return rule.own + getattr(rule, "first", False) + getattr(rule, "near", 0)


def parts_per_unit(rule: SelectionRule) -> int:
    """Return n: the number of means per unit, or of keys per unit if the rule has no means."""
    return getattr(rule, "means", 0) or rule.block
