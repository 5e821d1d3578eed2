# SPDX-License-Identifier: Apache-2.0
"""Selection rules: how an indexer scores the keys of a query, and in which units it selects them.

A rule is a class here and a line of `RULES`; a rule of your own is an object with the same
attributes. A unit is `block` consecutive positions, unit u those from u * block.

Shape letters: s query rows, t key rows, u units, b batch, i index heads, k index key heads,
d width; H: selections of a row, one for each group of attention heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class SelectionRule(Protocol):
    """How queries score units of keys.

    block: positions in a unit. own: is the unit in which a query lies always selected? weighted:
    does it take weights of the index heads? Ranks compare the class and the attributes of a rule.

    A rule may also have: means, which divides block: of each unit the means of so many equal parts
    travel, and `scores` gets these for keys (0: all keys travel). first, near: are the first unit
    that a query sees, and so many before its own, always selected? softmax: `scores` are
    [s, b, i, n] of single means, and what is compared is their softmax over all means that wholly
    lie before a query or at it, summed over the heads of a selection and the means of a unit.
    """

    @property
    def block(self) -> int: ...

    @property
    def own(self) -> bool: ...

    @property
    def weighted(self) -> bool: ...

    def selections(self, heads: int, key_heads: int) -> int:
        """How many selections a row has, given index heads and their key heads. ValueError for
        numbers that the rule does not take.
        """
        ...

    def scores(
        self, q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor | None
    ) -> torch.Tensor:
        """[s, b, H, u] of q [s, b, i, d], k [t, b, k, d], weights [s, b, i] or None; t = u * block
        keys (or u * means means), unit by unit. Each score depends on its query and the keys of its
        unit alone. By operators of torch that can be differentiated by these three: parameters of
        the rule get no gradient.
        """
        ...


def _shared(heads: int, key_heads: int) -> int:
    if key_heads != 1:
        raise ValueError(f"index_k: this rule has one index key head, got {key_heads}")
    return 1


def _weighted(
    q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor | None, relu: bool
) -> torch.Tensor:
    """sum_h weights[h] * relu(q[h] . k), or without relu."""
    assert weights is not None
    found = torch.einsum("sbid,tbd->sbit", q, k[:, :, 0])
    found = torch.relu(found) if relu else found
    return torch.einsum("sbi,sbit->sbt", weights, found).unsqueeze(2)


def _dots(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """[s, b, i, t]: q . k, each query head with its key head."""
    found = torch.einsum("sbkgd,tbkd->sbkgt", q.unflatten(2, (k.shape[2], -1)), k)
    return found.flatten(2, 3)


@dataclass(frozen=True)
class Dsa:
    """Tokens by sum_h w[h] * relu(q[h] . k), one selection for all heads (DeepSeek-V3.2); relu: or
    without it (GLM-5).
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
    """Blocks by the score of `Dsa` of their mean key, the own block always among them (Qwen)."""

    block: int = 4
    own: bool = True
    means: int = 1


@dataclass(frozen=True)
class Moba:
    """Blocks by q . their mean key, per query head, the own block always among them (Kimi)."""

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
    """Blocks by their largest q . k, per index head, the own block always among them (MiniMax-M3,
    which has an index head for each key/value head and one index key head).
    """

    block: int = 128
    means: int = 0

    def scores(
        self, q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor | None
    ) -> torch.Tensor:
        return _dots(q, k).unflatten(-1, (-1, self.block)).amax(-1)


@dataclass(frozen=True)
class Nsa:
    """Blocks by the attention to their compressed keys, summed over the query heads of a key head;
    always the first that is seen, the own, and the one before (DeepSeek NSA, arXiv 2502.11089,
    section 3.3.2). index_q, index_k: q and k of attention. Compressed keys are the means of equal
    parts without overlap; a compression that is learnt comes in as linear maps of the keys before.
    """

    block: int = 64
    means: int = 4
    scale: float | None = None  # of the compressed attention's scores, d ** -0.5
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
    """The rule that is meant. ValueError for a name that none has, or an object that is none."""
    if isinstance(rule, str) and rule in RULES:
        return RULES[rule]()
    parts = "block", "own", "weighted", "selections", "scores"
    if isinstance(rule, (str, type)) or not all(hasattr(rule, part) for part in parts):
        raise ValueError(
            f"rule must be one of {', '.join(RULES)}, or an object with {', '.join(parts)}, "
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
    """What ranks compare of a rule."""
    return type(rule).__name__, rule.block, rule.own, tuple(sorted(vars(rule).items()))


def forced(rule: SelectionRule) -> int:
    """How many units of a query are always selected, at most."""
    return rule.own + getattr(rule, "first", False) + getattr(rule, "near", 0)


def parts(rule: SelectionRule) -> int:
    """How many means, or keys, of a unit travel."""
    return getattr(rule, "means", 0) or rule.block
