# SPDX-License-Identifier: Apache-2.0
"""The indexer of a GPT layer with a selection rule: its parameters, and index tensors of hidden
states.

Parameters are the same on all tensor-parallel ranks, so a checkpoint does not depend on how many
there are. Hidden states come in detached: only the indexer's own loss trains it.

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
    """What `mb.sparse_layer_spec` was asked for. index_heads 0: queries and keys of attention are
    the index tensors; None: one for each key/value head.
    """

    rule: SelectionRule
    top_k: int
    index_heads: int | None
    index_width: int
    loss_coeff: float | None

    @property
    def pooled(self) -> bool:
        """Are index keys averaged over their block before norm and rotary embedding?"""
        return isinstance(self.rule, Qsa)

    @property
    def weighing(self) -> bool:
        """Do index heads have weights that depend on hidden states?"""
        return self.rule.weighted and not self.pooled


class IndexTensors(NamedTuple):
    """What a rule selects by, index_q [s, b, i, d], index_k [s, b, 1, d] and, if it weighs,
    index_weights [s, b, i]. heads_of: ranks that hold other heads of attention and the same index
    tensors, None for this one. attach: attaches the loss of the indexer to the output of attention,
    None where it is not trained.
    """

    tensors: tuple[torch.Tensor, ...]
    heads_of: Any
    attach: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None


class IndexBranch(MegatronModule):
    """Projections and norms of an indexer, under these names in checkpoints:

    `linear_q.weight` [i * d, w], `linear_k.weight` [d, w], `k_norm.weight` [d]; all rules but
    `dsa` `q_norm.weight` [d]; `dsa` `k_norm.bias` [d]; rules that weigh heads
    `linear_weights.weight` [i, w].
    """

    def __init__(self, config: Any, choice: LayerRule, heads: int) -> None:
        super().__init__(config=config)
        self.choice, self.heads = choice, heads
        width, hidden = choice.index_width, config.hidden_size
        self.linear_q = self._linear(hidden, heads * width)
        self.linear_k = self._linear(hidden, width)
        self.linear_weights = self._linear(hidden, heads) if choice.weighing else None
        latest = isinstance(choice.rule, Dsa) and not choice.pooled
        self.q_norm = None if latest else _IndexNorm(config, width)
        self.k_norm = _IndexNorm(config, width, centers=latest)

    def forward(
        self, hidden: torch.Tensor, turn: Callable[[torch.Tensor], torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Index queries, keys and weights of all index heads, of hidden [s, b, w]. turn: rotary
        embedding of [s, b, heads, d].
        """
        width, block = self.choice.index_width, self.choice.rule.block
        q = self.linear_q(hidden).unflatten(-1, (self.heads, width))
        if self.q_norm is not None:
            q = self.q_norm(q)
        q, k = turn(q), self.linear_k(hidden).unsqueeze(2)
        if self.choice.pooled:
            # One key of each block, turned as its first row, and on all its rows: the rule's mean
            # of equal keys is that key.
            wide = k.unflatten(0, (-1, block)).to(accumulation_dtype(k.dtype))
            k = self.k_norm(wide.mean(dim=1).to(k.dtype))
            k = turn(k.repeat_interleave(block, 0))[::block].repeat_interleave(block, 0)
        else:
            k = turn(self.k_norm(k))
        scale = width**-0.5
        if not self.choice.rule.weighted:
            return q * scale, k, None
        if self.linear_weights is None:
            return q, k, q.new_full(q.shape[:3], scale)
        return q, k, self.linear_weights(hidden) * (scale * self.heads**-0.5)

    def _linear(self, inputs: int, outputs: int) -> torch.nn.Linear:
        config: Any = self.config
        linear = torch.nn.Linear(
            inputs, outputs, bias=False, device=_device(config), dtype=config.params_dtype
        )
        if config.perform_initialization:
            config.init_method(linear.weight)
        return linear


class _IndexNorm(MegatronModule):
    """RMS norm over the index width, or layer norm where it `centers`. Weights are factors, or
    what is added to 1 with `layernorm_zero_centered_gamma`, as in other norms of the model.
    """

    def __init__(self, config: Any, width: int, centers: bool = False) -> None:
        super().__init__(config=config)
        like = {"device": _device(config), "dtype": config.params_dtype}
        self.add = 1.0 if config.layernorm_zero_centered_gamma else 0.0
        self.weight = torch.nn.Parameter(torch.full((width,), 1.0 - self.add, **like))
        self.bias = torch.nn.Parameter(torch.zeros(width, **like)) if centers else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        config: Any = self.config
        weight, shape = self.weight + self.add, self.weight.shape
        if self.bias is None:
            return F.rms_norm(x, shape, weight, config.layernorm_epsilon)
        return F.layer_norm(x, shape, weight, self.bias, config.layernorm_epsilon)


def _device(config: Any) -> Any:
    return "cpu" if config.use_cpu_initialization else torch.cuda.current_device()


def of_this_rank(x: torch.Tensor | None, heads: int, group: Any) -> torch.Tensor | None:
    """The index heads [s, b, heads / ranks, ...] of a tensor-parallel rank, out of [s, b, heads or
    1, ...] that all ranks have; their gradients are summed over the ranks.
    """
    if x is None or group.size() == 1:
        return x
    x = copy_to_tensor_model_parallel_region(x, group=group)
    assert x is not None
    each = heads // group.size()
    return x.narrow(2, group.rank() * each, each) if x.shape[2] == heads > 1 else x
