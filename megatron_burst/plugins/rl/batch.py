# SPDX-License-Identifier: Apache-2.0
"""One micro-batch of trajectories, packed and distributed over context-parallel ranks.

The model is an unchanged Megatron model. During `TrajectoryBatch.run`, hidden states and weight are
captured at the output layer, which computes no logits. `mb.linear_logprobs` then computes the
log-probabilities of the rows that predict a token.
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
    """One packed sequence of trajectories, with the rows of this rank.

    Args:
        trajectories: Token ids of each trajectory, on the host. All ranks of a model pass the same
            trajectories.
        config: `TransformerConfig` of the model, after `mb.megatron.configure`.
        device: Device of the model.
        merged: True to merge common prefixes; otherwise each trajectory is a document.
        rows: Number of rows after padding; 0 for the smallest valid number.

    Attributes:
        tree: `mb.trees.PrefixTree` of the trajectories.
        tokens: Token ids of this rank's rows, int64 [1, n], for the model's `input_ids`.
        positions: Positions of this rank's rows, int64 [1, n], for the model's `position_ids`.
            Rotary embeddings get the same positions from `packed_seq_params`.
        packed_seq_params: `PackedSeqParams` of the batch, for the model.
        edges: Predictions made from this rank's rows, as indices into `tree.edges`, int64 [e].
        local: Row of this rank from which each of these predictions is made, int64 [e].
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
        # A pack has at least one row, even if there is nothing to compute.
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
        own_rows = layout.positions(group.rank(), len(self.tree.tokens))
        self.tokens, self.positions = (
            torch.from_numpy(x[own_rows]).to(device)[None]
            for x in (self.tree.tokens, self.tree.positions)
        )
        self.edges, self.local = self.tree.edges.on(own_rows)

    def run(
        self, model: Any, temperature: float, entropy: bool, vocab_size: int | None = None
    ) -> torch.Tensor:
        """Run the forward of one pipeline stage.

        All ranks with rows of the batch must call this method.

        Args:
            model: Model chunk of the stage, as Megatron's schedule passes it.
            temperature: Same as in `mb.rl.logprobs`.
            entropy: True to return entropies too.
            vocab_size: Same as in `mb.rl.logprobs`.

        Returns:
            The activations of the stage. The last stage returns the log-probabilities of this
            rank's `edges` as [1, e], or log-probabilities and entropies as [2, e]. They are
            differentiable.
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
        captured: list[Any] = []

        def capture(hidden: torch.Tensor, weight: Any = None, *_: Any, **__: Any) -> Any:
            captured[:] = [hidden, layer.weight if weight is None else weight]
            return hidden[:0], None  # the output of the model is not used

        with patching.instead(layer, "forward", capture):
            model(**inputs)
        hidden, weight = captured
        config = get_model_config(model)
        if layer.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=layer.tp_group
            )
        labels = torch.from_numpy(self.tree.edges.label[self.edges]).to(hidden.device)
        results = linear_logprobs(
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
        return torch.stack([x for x in (results.logprobs, results.entropy) if x is not None])

    def of_trajectories(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Return one tensor [n - 1] per trajectory of n tokens; entry i belongs to token i + 1.

        This is a collective call over context-parallel ranks. Every rank gets the values of all
        trajectories. The result is differentiable if every rank computes the same loss from it.
        Backward returns gradients only for the values of this rank.

        Args:
            values: Values [e] of this rank's `edges`.
        """
        edges = torch.from_numpy(self.edges).to(values.device)
        count = len(self.tree.edges.row)
        return self.tree.unpack(_Gathered.apply(values, edges, count, self._group))[: self._count]


class _Gathered(torch.autograd.Function):
    """Autograd function that gathers each rank's values [e] to the values of all edges [count]."""

    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, edges: torch.Tensor, count: int, group: Any
    ) -> torch.Tensor:
        ctx.save_for_backward(edges)
        gathered = values.new_zeros(count)
        gathered[edges] = values
        if group.size() > 1:
            dist.all_reduce(gathered, group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad[ctx.saved_tensors[0]], None, None, None


def rows_multiple(config: Any, cp_size: int, merged: bool) -> int:
    """Return the number that must divide the number of rows of a pack.

    Context-parallel ranks get equal numbers of rows. With sequence parallelism, tensor-parallel
    ranks also get equal numbers of rows. For documents, some layouts require two pieces per rank.

    Args:
        config: `TransformerConfig` of the model.
        cp_size: Number of context-parallel ranks.
        merged: True if the pack is a prefix tree.
    """
    split = getattr(config, "sequence_parallel", False)
    shares = cp_size if merged or cp_size == 1 else 2 * cp_size
    return shares * (config.tensor_model_parallel_size if split else 1)


def _documents(
    tree: trees.PrefixTree, trajectories: Sequence[Any], device: torch.device
) -> tuple[Pack, Any]:
    """Pack trajectories one after the other, as Megatron packs documents.

    Args:
        tree: Tree in which each trajectory is a separate root, with padding at the end.
        trajectories: Token ids of each trajectory.
        device: Device of the model.

    Returns:
        The pack and its `PackedSeqParams`.
    """
    lengths = [len(trajectory) for trajectory in trajectories if len(trajectory)]
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    sent = ends.to(device)
    packs().note_values(sent, ends)
    pack = packs().of(len(tree.tokens), sent)
    packs().note_cut(pack)
    return pack, params_of(sent, int(np.max(lengths)))
