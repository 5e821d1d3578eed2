# SPDX-License-Identifier: Apache-2.0
"""Indexer of a GPT layer with a selection rule: parameters and computation of index tensors.

Parameters are the same on all tensor-parallel ranks, so checkpoints do not depend on the
tensor-parallel size. Hidden states are detached, because only the indexer's own loss trains the
indexer.

Shape letters: s local rows, b batch, i index heads, d index width, w hidden width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule

from ....kernels.online_softmax import accumulation_dtype
from ..rules import Dsa, Qsa, SelectionRule


@dataclass(frozen=True)
class LayerRule:
    """Selection rule and indexer of a layer: the checked arguments of `mb.sparse_layer_spec`.

    Attributes:
        rule: Selection rule.
        top_k: Number of units per query and selection.
        index_heads: Number of index heads. None means one per key/value head. 0 means no indexer:
            the index tensors are then the queries and keys of attention.
        index_width: Width of index heads.
        loss_coeff: Weight of the indexer's loss, or None for the default.
    """

    rule: SelectionRule
    top_k: int
    index_heads: int | None
    index_width: int
    loss_coeff: float | None

    @property
    def pooled(self) -> bool:
        """True if norm and rotary embedding apply to the mean of the index keys of a block."""
        return isinstance(self.rule, Qsa)

    @property
    def weighing(self) -> bool:
        """True if weights of index heads are computed from hidden states."""
        return self.rule.weighted and not self.pooled


class IndexTensors(NamedTuple):
    """Index tensors of a layer, and how the indexer's loss uses them.

    Attributes:
        tensors: index_q [s, b, i, d], index_k [s, b, 1, d] and, if the rule uses weights,
            index_weights [s, b, i].
        heads_of: Tensor-parallel group if all ranks of the group have the same index tensors but
            different attention heads. None if no other rank has the same index tensors.
        attach: Function (output of attention, losses) -> output with the losses attached; None if
            the indexer is not trained.
    """

    tensors: tuple[torch.Tensor, ...]
    heads_of: Any
    attach: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None


class IndexBranch(MegatronModule):
    """Indexer of a layer: projections and norms.

    Names in checkpoints: `linear_q.weight` [i * d, w], `linear_k.weight` [d, w] and `k_norm.weight`
    [d]. Rule `dsa` also has `k_norm.bias` [d]; all other rules have `q_norm.weight` [d]. If
    `LayerRule.weighing` is True, there is also `linear_weights.weight` [i, w].
    """

    def __init__(self, config: Any, choice: LayerRule, heads: int) -> None:
        super().__init__(config=config)
        self.choice, self.heads = choice, heads
        width, hidden = choice.index_width, config.hidden_size
        self.linear_q = replicated_linear(config, hidden, heads * width)
        self.linear_k = replicated_linear(config, hidden, width)
        self.linear_weights = None
        if choice.weighing:
            self.linear_weights = replicated_linear(config, hidden, heads)
        latest = isinstance(choice.rule, Dsa) and not choice.pooled
        self.q_norm = None if latest else RowNorm(config, width)
        self.k_norm = RowNorm(config, width, centers=latest)

    def forward(
        self, hidden: torch.Tensor, rotate: Callable[[torch.Tensor], torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return index queries, index keys, and the weights of index heads or None.

        Args:
            hidden: Hidden states [s, b, w].
            rotate: Function that applies rotary embedding to [s, b, heads, d].

        Returns:
            Queries [s, b, i, d], keys [s, b, 1, d], and weights [s, b, i] if the rule uses them.
        """
        width, block = self.choice.index_width, self.choice.rule.block
        q = self.linear_q(hidden).unflatten(-1, (self.heads, width))
        if self.q_norm is not None:
            q = self.q_norm(q)
        q, k = rotate(q), self.linear_k(hidden).unsqueeze(2)
        if self.choice.pooled:
            # One key per block, rotated by the position of the first row of the block, and repeated
            # for all rows of the block. The mean over the block is then that key.
            wide = k.unflatten(0, (-1, block)).to(accumulation_dtype(k.dtype))
            k = self.k_norm(wide.mean(dim=1).to(k.dtype))
            k = rotate(k.repeat_interleave(block, 0))[::block].repeat_interleave(block, 0)
        else:
            k = rotate(self.k_norm(k))
        scale = width**-0.5
        if not self.choice.rule.weighted:
            return q * scale, k, None
        if self.linear_weights is None:
            return q, k, q.new_full(q.shape[:3], scale)
        return q, k, self.linear_weights(hidden) * (scale * self.heads**-0.5)


def replicated_linear(config: Any, inputs: int, outputs: int) -> torch.nn.Linear:
    """Return a linear layer without bias that is the same on all tensor-parallel ranks.

    Args:
        config: `TransformerConfig` of the model.
        inputs: Number of input columns.
        outputs: Number of output columns.
    """
    linear = torch.nn.Linear(
        inputs, outputs, bias=False, device=device_of(config), dtype=config.params_dtype
    )
    if config.perform_initialization:
        config.init_method(linear.weight)
    return linear


class RowNorm(MegatronModule):
    """RMS norm over the last dimension or, if `centers` is True, layer norm.

    The parameters are the same on all tensor-parallel ranks. With `layernorm_zero_centered_gamma`
    the weights are offsets from 1, as in Megatron's norms.
    """

    def __init__(self, config: Any, width: int, centers: bool = False) -> None:
        super().__init__(config=config)
        like = {"device": device_of(config), "dtype": config.params_dtype}
        self.add = 1.0 if config.layernorm_zero_centered_gamma else 0.0
        self.weight = torch.nn.Parameter(torch.full((width,), 1.0 - self.add, **like))
        self.bias = torch.nn.Parameter(torch.zeros(width, **like)) if centers else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        config: Any = self.config
        weight, shape = self.weight + self.add, self.weight.shape
        if self.bias is None:
            return F.rms_norm(x, shape, weight, config.layernorm_epsilon)
        return F.layer_norm(x, shape, weight, self.bias, config.layernorm_epsilon)


def device_of(config: Any) -> Any:
    """Return the device on which parameters are created.

    Args:
        config: `TransformerConfig` of the model.
    """
    return "cpu" if config.use_cpu_initialization else torch.cuda.current_device()


def of_this_rank(x: torch.Tensor | None, heads: int, group: Any) -> torch.Tensor | None:
    """Return the part of x for the index heads of this tensor-parallel rank.

    All ranks share a single head. The gradient of x is summed over the ranks.

    Args:
        x: Tensor [s, b, heads or 1, ...] that is the same on all ranks, or None.
        heads: Number of index heads of all ranks.
        group: Tensor-parallel group.

    Returns:
        [s, b, heads / ranks, ...], or x if it has a single head.
    """
    if x is None or group.size() == 1:
        return x
    x = copy_to_tensor_model_parallel_region(x, group=group)
    assert x is not None
    rank_heads = heads // group.size()
    return x.narrow(2, group.rank() * rank_heads, rank_heads) if x.shape[2] == heads > 1 else x
