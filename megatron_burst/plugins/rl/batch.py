# SPDX-License-Identifier: Apache-2.0
"""One micro-batch of trajectories: packed, cut over context-parallel ranks, run through a model.

The model is Megatron's, unchanged. Its output layer, while it runs here, hands over hidden states
and weight in place of logits, and log-probabilities are computed of the rows that predict something
(`mb.linear_logprobs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.utils import get_attr_wrapped_model, get_model_config

from ...megatron import patching
from ...megatron.data.cut import cut_of_run
from ...megatron.data.packed import Pack, packs, params_of
from ...megatron.lm_head.fused_loss import check_output
from . import trees
from .logprobs import linear_logprobs
from .tree_pack import TreePack


class TrajectoryBatch:
    """Trajectories as one packed sequence, and the part of it that this rank holds.

    trajectories: token ids of each, on the host, the same on all ranks of a model. config: the
    `TransformerConfig` of the model, after `mb.megatron.configure`. device: of the model. merged:
    whether common prefixes are one; otherwise each trajectory is a document. rows: pad to so many
    rows, 0 for as few as the ranks need.

    tree: `mb.trees.PrefixTree`. tokens, positions: int64 [1, n], of this rank's rows, which a model
    takes as input_ids and position_ids together with packed_seq_params, from which rotary
    embeddings learn the same positions. edges: int64 [e], which predictions of `tree.edges` this
    rank makes, from its rows `local`.
    """

    def __init__(
        self,
        trajectories: Sequence[Any],
        config: Any,
        device: torch.device,
        *,
        merged: bool = True,
        rows: int = 0,
    ) -> None:
        group: Any = parallel_state.get_context_parallel_group()
        multiple = rows or rows_multiple(config, group.size(), merged)
        # A pack has at least one row, also where there is nothing to compute.
        filled = [*trajectories, *([] if any(map(len, trajectories)) else [[0]])]
        if merged:
            self.tree = trees.pack(filled, multiple=multiple)
            pack = TreePack.of(self.tree, config)
            self.packed_seq_params = pack.params(device)
        else:
            self.tree = trees.from_segments(filled, [-1] * len(filled), multiple=multiple)
            pack, self.packed_seq_params = _documents(self.tree, filled, device)
        self._count, self._group = len(trajectories), group
        layout = pack.layout(cut_of_run(config.burst.layout), group.size())
        mine = layout.positions(group.rank(), len(self.tree.tokens))
        self.tokens, self.positions = (
            torch.from_numpy(x[mine]).to(device)[None]
            for x in (self.tree.tokens, self.tree.positions)
        )
        self.edges, self.local = self.tree.edges.on(mine)

    def run(
        self, model: Any, temperature: float, entropy: bool, vocab_size: int | None = None
    ) -> torch.Tensor:
        """Forward of one pipeline stage, `model`, a chunk as Megatron's schedule hands it over.

        Returns the activations of the stage or, from the last one, [1, e] or with `entropy` [2, e]:
        log-probabilities of this rank's `edges`, and entropies below them, differentiable.
        temperature, vocab_size: as of `logprobs`. A collective of the ranks that hold the batch.
        """
        inputs = {
            "input_ids": self.tokens,
            "position_ids": self.positions,
            "attention_mask": None,
            "packed_seq_params": self.packed_seq_params,
        }
        if not get_attr_wrapped_model(model, "post_process"):
            return model(**inputs)
        layer = get_attr_wrapped_model(model, "output_layer")
        check_output(layer, "mb.rl")
        handed: list[Any] = []

        def hand_over(hidden: torch.Tensor, weight: Any = None, *_: Any, **__: Any) -> Any:
            handed[:] = [hidden, layer.weight if weight is None else weight]
            return hidden[:0], None  # what the model makes of its logits is not looked at

        with patching.instead(layer, "forward", hand_over):
            model(**inputs)
        hidden, weight = handed
        config = get_model_config(model)
        if layer.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=layer.tp_group
            )
        labels = torch.from_numpy(self.tree.edges.label[self.edges]).to(hidden.device)
        found = linear_logprobs(
            hidden.flatten(0, 1),
            weight,
            labels,
            rows=self.local,
            temperature=temperature,
            entropy=entropy,
            tp_group=layer.tp_group if layer.tp_group.size() > 1 else None,
            logit_scale=config.mup_output_mult if getattr(config, "use_mup", False) else 1.0,
            vocab_size=vocab_size,
        )
        return torch.stack([x for x in (found.logprobs, found.entropy) if x is not None])

    def of_trajectories(self, values: torch.Tensor) -> list[torch.Tensor]:
        """One tensor [n - 1] per trajectory of n tokens, of values [e] per edge of this rank.

        Entry i is of the prediction of token i + 1. Every context-parallel rank gets all of them; a
        collective of these. Differentiable: each rank must compute the same of what it gets, and
        its gradient then reaches the values that are its own.
        """
        edges = torch.from_numpy(self.edges).to(values.device)
        count = len(self.tree.edges.row)
        return self.tree.unpack(_Gathered.apply(values, edges, count, self._group))[: self._count]


class _Gathered(torch.autograd.Function):
    """Values [e] of this rank's edges -> those of all edges [count], on every rank."""

    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, edges: torch.Tensor, count: int, group: Any
    ) -> torch.Tensor:
        ctx.save_for_backward(edges)
        found = values.new_zeros(count)
        found[edges] = values
        if group.size() > 1:
            dist.all_reduce(found, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad[ctx.saved_tensors[0]], None, None, None


def rows_multiple(config: Any, cp_size: int, merged: bool) -> int:
    """What divides the rows of a pack: ranks take equally many, and those that share a tensor take
    equal parts of these. Documents are cut by the layout of the run, which may want two shares.
    """
    split = getattr(config, "sequence_parallel", False)
    shares = cp_size if merged or cp_size == 1 else 2 * cp_size
    return shares * (config.tensor_model_parallel_size if split else 1)


def _documents(
    tree: trees.PrefixTree, trajectories: Sequence[Any], device: torch.device
) -> tuple[Pack, Any]:
    """Trajectories behind each other, as every loop of Megatron packs documents."""
    lengths = [len(each) for each in trajectories if len(each)]
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    sent = ends.to(device)
    packs().note_values(sent, ends)
    pack = packs().of(len(tree.tokens), sent)
    packs().note_cut(pack)
    return pack, params_of(sent, int(np.max(lengths)))
