# SPDX-License-Identifier: Apache-2.0
"""Modules of DeepSeek-V4's hybrid attention in a Megatron layer.

One softmax covers the keys of a window, compressed keys and a sink. Parameters have the names and
shapes of Megatron's branch for DeepSeek-V4, so checkpoints are interchangeable. Heads and output
groups are split over tensor-parallel ranks; all other parameters are the same on these ranks. A
tensor-parallel rank computes gradients only for its own heads. Backward sums them over these ranks
before it reaches the replicated part of the layer.

Shape letters: s local rows, t local compressed keys, b batch, h query heads of this tensor-parallel
rank, d head width, w hidden width, g output groups of this tensor-parallel rank, r output rank, i
index heads.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings import yarn_rotary_pos_embedding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from ....attention import joint_attention
from ....kernels.online_softmax import accumulation_dtype
from ....megatron.checks.problem import refuse
from ....megatron.data.cut import cut_of_run
from ....megatron.selection import burst_of
from ....planning.plan import Plan
from ....recompute.checkpoint import current_store
from ..attention import selected_plan
from ..compress import compress
from ..indexer import select
from ..loss import indexer_loss
from .hybrid_plans import (
    HybridKind,
    HybridPlans,
    IndexerSettings,
    all_visible,
    needs_lists,
)
from .hybrid_settings import HybridRule, HybridSettings, hybrid_problems, is_megatrons
from .index_branch import RowNorm, device_of, replicated_linear
from .index_loss import attached
from .selecting_layers import PlannedLayer

RULE = "dsa"  # the selection rule of the indexer: a weighted sum of ReLU(q . k)


class Rotation:
    """Rotary embedding of the last columns of queries, keys and outputs, in pairs of columns.

    Args:
        config: `MLATransformerConfig` of the model.
        base: Base of the frequencies.
        yarn: True to scale the frequencies for long sequences as `config` states.

    Attributes:
        frequencies: Angle per position of each pair of columns, float32.
    """

    def __init__(self, config: Any, base: float, yarn: bool) -> None:
        width = self.width = config.qk_pos_emb_head_dim
        columns = torch.arange(0, width, 2, dtype=torch.float32, device=device_of(config))
        self.frequencies = base ** -(columns / width)
        if yarn:
            low, high = yarn_rotary_pos_embedding._yarn_find_correction_range(
                config.beta_fast, config.beta_slow, width, base,
                config.original_max_position_embeddings,
            )  # fmt: skip
            scaled = yarn_rotary_pos_embedding._yarn_linear_ramp_mask(
                low, high, width // 2, device=columns.device
            )
            self.frequencies *= 1 - scaled + scaled / config.rotary_scaling_factor

    def __call__(self, x: torch.Tensor, positions: torch.Tensor, sign: int = 1) -> torch.Tensor:
        """Rotate the last columns of each row of x by its position.

        Args:
            x: Rows [s, b, heads, d].
            positions: int64 [s].
            sign: -1 to rotate back.
        """
        dtype = accumulation_dtype(x.dtype)
        angles = torch.outer(positions.to(dtype), self.frequencies.to(x.device, dtype))
        cos, sin = angles.cos()[:, None, None], angles.sin()[:, None, None] * sign
        same, turned = x.split([x.shape[-1] - self.width, self.width], dim=-1)
        first, second = turned.to(dtype).unflatten(-1, (-1, 2)).unbind(-1)
        pairs = torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1)
        return torch.cat([same, pairs.flatten(-2).to(x.dtype)], dim=-1)


class Compressor(MegatronModule):
    """Projections that compute compressed keys, or index keys, from hidden states.

    Names in checkpoints: `linear_wkv.weight` and `linear_wgate.weight` [n * d, w], `ape` [ratio, n
    * d] and `norm.weight` [d]. n is 2 with `overlap`, otherwise 1.

    Args:
        config: `TransformerConfig` of the model.
        ratio: Number of rows of a key.
        width: Width d of a key.
        overlap: True if a key also covers the rows of the previous window.
    """

    def __init__(self, config: Any, ratio: int, width: int, overlap: bool) -> None:
        super().__init__(config=config)
        self.overlap, columns = overlap, width * (1 + overlap)
        self.linear_wkv = replicated_linear(config, config.hidden_size, columns)
        self.linear_wgate = replicated_linear(config, config.hidden_size, columns)
        self.ape = torch.nn.Parameter(
            torch.empty(ratio, columns, device=device_of(config), dtype=config.params_dtype)
        )
        if config.perform_initialization:
            config.init_method(self.ape)
        self.norm = RowNorm(config, width)

    def forward(
        self, hidden: torch.Tensor, plans: HybridPlans, rotation: Rotation, label: object
    ) -> torch.Tensor:
        """Return the rotated keys of this rank [t, b, 1, d]. This is a collective call.

        Args:
            hidden: Hidden states [s, b, w].
            plans: Plans of the layer.
            rotation: Rotary embedding of the layer.
            label: Label of the call.
        """
        assert plans.compressed is not None
        keys = compress(
            self.linear_wkv(hidden), self.linear_wgate(hidden), self.ape, plan=plans.compressed,
            overlap=self.overlap, label=label,
        )  # fmt: skip
        return rotation(self.norm(keys).unsqueeze(2), plans.key_positions)


class CompressedIndexer(MegatronModule):
    """Indexer that computes the index queries, index keys and head weights for compressed keys.

    Names in checkpoints: `linear_wq_b.weight` [i * d, q rank], `linear_weights_proj.weight` [i, w],
    and the names of `compressor`. Index queries and keys are not multiplied by a Hadamard matrix,
    because this multiplication would not change their products.

    Args:
        config: `MLATransformerConfig` of the model.
        settings: Settings of the layers.
        ratio: Number of rows of a compressed key.
    """

    def __init__(self, config: Any, settings: HybridSettings, ratio: int) -> None:
        super().__init__(config=config)
        self.heads, self.width = settings.dsa_indexer_n_heads, settings.dsa_indexer_head_dim
        self.linear_wq_b = replicated_linear(config, config.q_lora_rank, self.heads * self.width)
        self.linear_weights_proj = replicated_linear(config, config.hidden_size, self.heads)
        self.compressor = Compressor(config, ratio, self.width, overlap=True)

    def forward(
        self,
        hidden: torch.Tensor,
        latents: torch.Tensor,
        plans: HybridPlans,
        rotation: Rotation,
        label: object,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return index queries [s, b, i, d], index keys [t, b, 1, d] and weights [s, b, i].

        Args:
            hidden: Hidden states [s, b, w].
            latents: Normalized latent queries [s, b, q rank].
            plans: Plans of the layer.
            rotation: Rotary embedding of the layer.
            label: Label of the call.
        """
        queries = self.linear_wq_b(latents).unflatten(-1, (self.heads, self.width))
        weights = self.linear_weights_proj(hidden) * (self.heads * self.width) ** -0.5
        keys = self.compressor(hidden, plans, rotation, label)
        return rotation(queries, plans.row_positions), keys, weights


class HybridSubmodules(NamedTuple):
    """Classes of the linear layers that are split over tensor-parallel ranks."""

    column_linear: Any
    row_linear: Any


def hybrid_submodules(row_linear: Any) -> HybridSubmodules:
    """Return the linear layer classes of the library that `row_linear` is from.

    Args:
        row_linear: Class of the row-parallel linear layer of Megatron or of Transformer Engine.

    Raises:
        ValueError: `row_linear` is another class.
    """
    if row_linear is tensor_parallel.RowParallelLinear:
        return HybridSubmodules(tensor_parallel.ColumnParallelLinear, row_linear)
    engine: Any = importlib.import_module("megatron.core.extensions.transformer_engine")
    if row_linear is not getattr(engine, "TERowParallelLinear", None):
        raise ValueError(
            "base: linear_proj of the layer must be the row-parallel linear layer of Megatron or "
            f"Transformer Engine, got {row_linear!r:.100}"
        )
    return HybridSubmodules(engine.TEColumnParallelLinear, row_linear)


class HybridCoreAttention(MegatronModule):
    """Attention to a window, to compressed keys and to a sink, in one softmax.

    Names in checkpoints: `attn_sink` [h], and the names of `compressor` and `indexer`.

    Args:
        config: `MLATransformerConfig` of the model.
        settings: Settings of the layers.
        layer_number: Layer number, from 1.
        pg_collection: Process groups of Megatron.
    """

    def __init__(
        self, config: Any, settings: HybridSettings, layer_number: int, pg_collection: Any
    ) -> None:
        super().__init__(config=config)
        ratio, burst = settings.ratio(layer_number), config.burst
        self.number, self.settings = layer_number, settings
        self.tp_group, self.cp_group = pg_collection.tp, pg_collection.cp
        kind = HybridKind(burst, cut_of_run(burst.layout), settings.csa_window_size)
        kinds, self.compressor, self.indexer = [kind], None, None
        selecting = None
        if settings.selects(layer_number):
            selecting = IndexerSettings(
                settings.dsa_indexer_n_heads, settings.dsa_indexer_head_dim,
                settings.dsa_indexer_topk, settings.loss_coeff,
            )  # fmt: skip
        if ratio:
            overlap = settings.overlaps(layer_number)
            self.compressor = Compressor(config, ratio, config.v_head_dim, overlap)
            kinds.append(dataclasses.replace(kind, ratio=ratio, indexer=selecting))
        if selecting:
            self.indexer = CompressedIndexer(config, settings, ratio)
            self.indexer.requires_grad_(settings.loss_coeff > 0)
        self.planned = PlannedLayer(config, pg_collection, layer_number, "hybrid attention", kinds)
        yarn = bool(ratio) and (config.rope_type == "yarn" or is_megatrons(config))
        base = settings.csa_compress_rotary_base if ratio else config.rotary_base
        self.rotation = Rotation(config, base, yarn)
        heads = config.num_attention_heads // self.tp_group.size()
        sink = torch.zeros(heads, device=device_of(config), dtype=config.params_dtype)
        self.attn_sink = torch.nn.Parameter(sink)
        set_tensor_model_parallel_attributes(self.attn_sink, True, 0, 1)

    def plans(self, query: torch.Tensor, packed_seq_params: Any, unsupported: Any) -> HybridPlans:
        """Return the plans of one forward.

        This is a collective call in the first layer of each kind (see `PlannedLayer.plans`).

        Args:
            query: Queries [s, b, h, d]; only shape, dtype and device are read.
            packed_seq_params: Megatron's `PackedSeqParams`, or None.
            unsupported: Further arguments of Megatron by name, which must be None.
        """
        return HybridPlans(*self.planned.plans({"q": query}, packed_seq_params, unsupported))

    def forward(
        self,
        plans: HybridPlans,
        query: torch.Tensor,
        kv: torch.Tensor,
        hidden: torch.Tensor,
        latents: torch.Tensor,
    ) -> torch.Tensor:
        """Compute attention, and return the output [s, b, h, d] rotated back by the row positions.

        Args:
            plans: Result of `plans`.
            query: Queries [s, b, h, d] before the rotation.
            kv: Keys, which are also the values, [s, b, 1, d] before the rotation.
            hidden: Hidden states [s, b, w].
            latents: Normalized latent queries [s, b, q rank].
        """
        positions, turn = plans.row_positions, self.rotation
        query = turn(query, positions)
        keys: Any = copy_to_tensor_model_parallel_region(turn(kv, positions), group=self.tp_group)
        key_sets = [(keys, None, self._with_lists(query, keys, plans.window))]
        index = chosen = None
        if self.compressor is not None and plans.compressed is not None:
            keys = self.compressor(hidden, plans, turn, (self.number, "keys"))
            keys = copy_to_tensor_model_parallel_region(keys, group=self.tp_group)
            plan = plans.compressed
            if self.indexer is not None:
                index = self.indexer(
                    hidden.detach(), latents.detach(), plans, turn, (self.number, "index keys")
                )
                top_k = self.settings.dsa_indexer_topk
                chosen = select(*index, rule=RULE, top_k=top_k, plan=plan, label=self.number)
                plan = selected_plan(query, keys, None, chosen, plan=plan, sink=self.attn_sink)
            else:
                plan = self._with_lists(query, keys, plan)
            key_sets.append((keys, None, plan))
        out, lse = joint_attention(
            query, key_sets, sink=self.attn_sink, label=self.number, return_lse=True
        )
        if index is not None and self.training and self.settings.loss_coeff > 0:
            out = self._with_loss(out, lse, index, query.detach(), keys.detach(), chosen, plans)
        return turn(out, positions, -1)

    def _with_lists(self, query: torch.Tensor, keys: torch.Tensor, plan: Plan) -> Plan:
        """Return the plan, or a plan with a list of all visible keys if `needs_lists` is True."""
        if not needs_lists(query):
            return plan
        visible = all_visible(plan, self.settings.csa_window_size)
        if visible is None:
            return plan
        return selected_plan(query, keys, None, visible, plan=plan, sink=self.attn_sink)

    def _with_loss(
        self,
        out: torch.Tensor,
        lse: torch.Tensor,
        index: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        query: torch.Tensor,
        keys: torch.Tensor,
        chosen: Any,
        plans: HybridPlans,
    ) -> torch.Tensor:
        """Compute the indexer's loss over the selected keys, and attach it to `out`."""
        grads, burst = torch.is_grad_enabled(), self.config.burst  # pyright: ignore[reportAttributeAccessIssue]
        # A checkpoint first runs this without gradients; the attention store then keeps the loss.
        if not grads and (current_store() is None or not burst.store):
            return out
        tp_group = self.tp_group if self.tp_group.size() > 1 else None
        losses = indexer_loss(
            *index, query, keys, chosen, rule=RULE, lse=lse, tp_group=tp_group,
            plan=plans.compressed, label=self.number,
        )  # fmt: skip
        if not grads:
            return out
        weight, config = self.settings.loss_coeff, self.config
        return attached(out, losses, weight, config, self.number, self.cp_group, None)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict:
        """Return sharded tensors by name. `attn_sink` is split over tensor-parallel ranks.

        Args:
            prefix: Same as in `HybridSelfAttention`.
            sharded_offsets: Same as in `HybridSelfAttention`.
            metadata: Same as in `HybridSelfAttention`.
        """
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        return state | _split(self, "attn_sink", prefix, sharded_offsets, metadata)


class HybridSelfAttention(MegatronModule):
    """DeepSeek-V4's hybrid attention; see `mb.sparse_layer_spec`.

    Names in checkpoints: `linear_q_down_proj.weight`, `q_layernorm.weight`,
    `linear_q_up_proj.weight`, `linear_kv_proj.weight`, `kv_layernorm.weight`,
    `linear_o_group_proj` [g * r, heads of a group * d], `linear_proj.weight`, and the names
    of `core_attention`.

    Args:
        config: `MLATransformerConfig`, after `configure`. If layers have different ratios, or if
            `compress_ratio` is passed, the constructor sets `hetereogenous_dist_checkpoint` to
            True.
        submodules: Classes of the column- and row-parallel linear layers.
        layer_number: Layer number, from 1.
        rule: Arguments of `mb.sparse_layer_spec`.
        pg_collection: Process groups of Megatron; None for Megatron's global groups.
        compress_ratio: Rows per compressed key in this layer, which specs of Megatron's hybrid
            models pass. None uses the entry of `csa_compress_ratios`.
        unused: Further arguments of Megatron, which are ignored.

    Raises:
        ValueError: A setting is not supported; all ranks raise the same error.
    """

    def __init__(
        self,
        config: Any,
        submodules: Any,
        layer_number: int,
        rule: HybridRule,
        pg_collection: Any = None,
        compress_ratio: int | None = None,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        if burst_of(config) is None:
            raise ValueError(
                "layers with hybrid attention need megatron_burst: call "
                "megatron_burst.megatron.install() and configure(config, mb.BurstConfig()) before "
                "the model is built"
            )
        refuse(hybrid_problems(config, rule))
        settings = rule.settings(config)
        if compress_ratio is not None:
            ratios = (compress_ratio,) * max(config.num_layers, layer_number)
            settings = dataclasses.replace(settings, csa_compress_ratios=ratios)
        if compress_ratio is not None or len(set(settings.csa_compress_ratios)) > 1:
            # Megatron otherwise stacks the parameters of all layers in checkpoints.
            config.hetereogenous_dist_checkpoint = True
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.tp_group, self.number = pg_collection.tp, layer_number
        ranks, width = self.tp_group.size(), config.v_head_dim
        self.heads, self.groups = (
            n // ranks for n in (config.num_attention_heads, settings.o_groups)
        )
        self.linear_q_down_proj = replicated_linear(config, config.hidden_size, config.q_lora_rank)
        self.q_layernorm = RowNorm(config, config.q_lora_rank)
        # The gradient of this weight is complete on every tensor-parallel rank. Without the
        # attribute Megatron would sum it over these ranks, because of the weight's name.
        self.q_layernorm.weight.average_gradients_across_tp_domain = True  # pyright: ignore[reportAttributeAccessIssue]
        whole_rows = copy.copy(config)  # the input has all rows, also with sequence parallelism
        whole_rows.sequence_parallel = False
        shared = {"bias": False, "skip_bias_add": False, "is_expert": False}
        self.linear_q_up_proj: Any = build_module(
            submodules.column_linear, config.q_lora_rank, config.num_attention_heads * width,
            config=whole_rows, init_method=config.init_method, gather_output=False,
            tp_comm_buffer_name="q_up_proj", tp_group=self.tp_group, **shared,
        )  # fmt: skip
        self.linear_kv_proj = replicated_linear(config, config.hidden_size, width)
        self.kv_layernorm = RowNorm(config, width)
        self.core_attention = HybridCoreAttention(config, settings, layer_number, pg_collection)
        inputs, outputs = self.heads * width // self.groups, self.groups * settings.o_lora_rank
        self.linear_o_group_proj = torch.nn.Parameter(
            _initialized(config, outputs, inputs, self.tp_group)
        )
        set_tensor_model_parallel_attributes(self.linear_o_group_proj, True, 0, 1)
        self.linear_proj: Any = build_module(
            submodules.row_linear, outputs * ranks, config.hidden_size, config=config,
            init_method=config.output_layer_init_method, input_is_parallel=True,
            tp_comm_buffer_name="proj", tp_group=self.tp_group,
            **shared | {"bias": config.add_bias_linear, "skip_bias_add": True},
        )  # fmt: skip

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any = None,
        packed_seq_params: Any = None,
        **unsupported: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output [s, b, w] and the bias of the projection, or None.

        Args:
            hidden_states: Hidden states after the input norm, [s, b, w]; with sequence parallelism
                only the rows of this tensor-parallel rank.
            attention_mask: None, or a mask that does not change causal attention.
            packed_seq_params: Megatron's `PackedSeqParams`, or None.
            unsupported: Further arguments of Megatron, which must be None.

        Raises:
            ValueError: An argument is not supported; all ranks raise the same error.
        """
        config: Any = self.config
        if config.sequence_parallel and self.tp_group.size() > 1:
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False, group=self.tp_group
            )
        latents = self.q_layernorm(self.linear_q_down_proj(hidden_states))
        query = self.linear_q_up_proj(latents)[0].unflatten(-1, (self.heads, config.v_head_dim))
        query = F.rms_norm(query, query.shape[-1:], eps=config.layernorm_epsilon)
        kv = self.kv_layernorm(self.linear_kv_proj(hidden_states)).unsqueeze(2)
        unsupported = {"attention_mask": attention_mask, **unsupported}
        plans = self.core_attention.plans(query, packed_seq_params, unsupported)

        tensors = query, kv, hidden_states, latents
        if config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules:
            attend = functools.partial(self.core_attention, plans)
            out: Any = tensor_parallel.checkpoint(attend, False, *tensors)
        else:
            out = self.core_attention(plans, *tensors)
        out = out.flatten(2).unflatten(-1, (self.groups, -1))
        weight = self.linear_o_group_proj.unflatten(0, (self.groups, -1))
        return self.linear_proj(torch.einsum("sbgd,grd->sbgr", out, weight).flatten(2))

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict:
        """Return sharded tensors by name. `linear_o_group_proj` is split by rows.

        Args:
            prefix: Prefix of the names in the checkpoint.
            sharded_offsets: Offsets of this module in sharded dimensions, as Megatron passes them.
            metadata: Megatron's metadata; `dp_cp_group` is read.
        """
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        return state | _split(self, "linear_o_group_proj", prefix, sharded_offsets, metadata)


def _initialized(config: Any, rows: int, columns: int, tp_group: Any) -> torch.Tensor:
    """Return the weight [rows, columns] of a tensor-parallel rank, initialized as in Megatron."""
    dtype = config.params_dtype
    weight = torch.empty(rows, columns, device=device_of(config), dtype=dtype)
    if not config.perform_initialization:
        return weight
    if config.use_cpu_initialization:  # every rank draws the whole weight
        whole = torch.empty(rows * tp_group.size(), columns, dtype=torch.float32)
        config.init_method(whole)
        return weight.copy_(whole.chunk(tp_group.size())[tp_group.rank()])
    tracker: Any = tensor_parallel.get_cuda_rng_tracker()
    with tracker.fork():
        config.init_method(weight)
    return weight


def _split(
    module: Any, name: str, prefix: str, sharded_offsets: tuple, metadata: dict | None
) -> dict:
    """Return the sharded tensor of a parameter that tensor-parallel ranks split by rows."""
    return make_sharded_tensors_for_checkpoint(
        {name: getattr(module, name)},
        prefix,
        {name: 0},
        sharded_offsets,
        tp_group=module.tp_group,
        dp_cp_group=(metadata or {}).get("dp_cp_group"),
    )
