# SPDX-License-Identifier: Apache-2.0
"""GPT layers whose attention uses a selection rule: layer spec and attention classes.

Megatron's own self attention computes queries, keys and values. `RuleSelfAttention` adds the index
tensors and passes them to `RuleCoreAttention` as `attention_bias`. Megatron passes this argument on
without reading it, even if it recomputes core attention.

Shape letters: s local rows, b batch, h query heads, g key/value heads of this tensor-parallel rank,
d width.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    _yarn_get_concentration_factor_from_config,
)
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import attention as megatrons
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec

from ....config import OFF
from ....megatron.attention.core_attention import BurstCoreAttention
from ....megatron.attention.plan_book import LayerKind
from ....megatron.checks.problem import Problem, Rule, refuse
from ....megatron.data.cut import group_of
from ....megatron.model_shape import layer_window
from ....megatron.selection import burst_of
from ....planning.plan import Plan
from ....recompute.checkpoint import current_store
from ..attention import sparse_attention
from ..indexer import select
from ..loss import indexer_loss
from ..options import SparseOptions
from ..rules import Dsa, Msa, Qsa, SelectionRule, rule_of
from .checks import OF_SPECS, sparse_algorithm, spec_problems
from .hybrid_layers import HybridSelfAttention, hybrid_submodules
from .hybrid_settings import LOSS, HybridRule, hybrid_rule
from .hybrid_settings import RULES as HYBRID_RULES
from .index_branch import IndexBranch, IndexTensors, LayerRule, of_this_rank
from .index_loss import attached
from .selecting_layers import SelectingKind

# Rule with an indexer -> default (index heads, width); None is one index head per key/value head.
_INDEXERS = {Dsa: (64, 128), Qsa: (4, 128), Msa: (None, 128)}


def sparse_layer_spec(
    *,
    rule: str | SelectionRule,
    top_k: int | None = None,
    block: int | None = None,
    index_heads: int | None = None,
    index_width: int | None = None,
    loss_coeff: float | None = None,
    csa_compress_ratios: Sequence[int] | None = None,
    csa_window_size: int | None = None,
    csa_compress_rotary_base: float | None = None,
    csa_dense_mode: bool | None = None,
    o_groups: int | None = None,
    o_lora_rank: int | None = None,
    base: Any = None,
) -> Any:
    """Return a `ModuleSpec` of Megatron GPT layers with sparse attention.

    With a rule of `mb.select`, self attention uses the selection rule. With rule "csa", "hca" or
    "window", layers have DeepSeek-V4's hybrid attention: compressed sparse attention, heavily
    compressed attention, or only a window. These layers need an `MLATransformerConfig`. A setting
    of hybrid attention that is not passed is read from the configuration, if this Megatron has it.

    The layers require `mb.megatron.install()` and `configure` at any context-parallel size, even 1.
    Building the model raises ValueError for settings that are not supported.

    Args:
        rule: Same as in `mb.select`, or "csa", "hca" or "window".
        top_k: Same as in `mb.select`. With "csa", compressed keys per query; default: Megatron's
            `dsa_indexer_topk`, or 512.
        block: Number of positions per block; default: the block size of the rule.
        index_heads: Number of heads of the indexer. 0 for no indexer: the index tensors are then
            the queries and keys of attention. Default: dsa 64, qsa 4, msa one per key/value head,
            csa Megatron's `dsa_indexer_n_heads` or 64, other rules 0.
        index_width: Width of index heads, default 128; for csa Megatron's `dsa_indexer_head_dim`.
        loss_coeff: Weight of the indexer's loss. Default: Megatron's `dsa_indexer_loss_coeff`, or
            0.01. 0 freezes the indexer.
        csa_compress_ratios: With "csa", rows per compressed key of each layer of the model, such as
            [0, 0, 4, 128, 4, 128]. 0 is a layer with only a window, 4 is compressed sparse
            attention, and any other number heavily compressed attention. With "hca" all layers have
            128, and with "window" 0.
        csa_window_size: Number of positions of the window, including the query's own position.
            Default 128.
        csa_compress_rotary_base: Base of the rotary frequencies of layers with compressed keys.
            Default 160000.
        csa_dense_mode: True to attend to all compressed keys, without an indexer. Default False.
        o_groups: Number of groups of heads; each group has an output projection. Default 8.
        o_lora_rank: Width of the output of a group. Default 1024.
        base: Megatron's spec of a layer or of a block. Only layers with `SelfAttention` are
            changed, and for hybrid attention also layers with latent attention. Default: the
            Transformer Engine layer if it is installed, otherwise the local layer.

    Raises:
        ValueError: An argument is invalid.

    Example:
        >>> from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        >>> import megatron_burst as mb
        >>> base = get_gpt_layer_local_spec(qk_layernorm=True)
        >>> layers = mb.sparse_layer_spec(rule="qsa", top_k=513, base=base)
    """
    hybrid = {
        "csa_compress_ratios": csa_compress_ratios, "csa_window_size": csa_window_size,
        "csa_compress_rotary_base": csa_compress_rotary_base, "csa_dense_mode": csa_dense_mode,
        "o_groups": o_groups, "o_lora_rank": o_lora_rank,
    }  # fmt: skip
    choice: LayerRule | HybridRule
    if isinstance(rule, str) and rule in HYBRID_RULES:
        if block is not None:
            raise ValueError(f"block is not supported by rule {rule}, got {block!r:.60}; omit it")
        choice = hybrid_rule(rule, hybrid | {
            "dsa_indexer_topk": top_k, "dsa_indexer_n_heads": index_heads,
            "dsa_indexer_head_dim": index_width, "dsa_indexer_loss_coeff": loss_coeff,
        })  # fmt: skip
    else:
        hybrid_names = [name for name, value in hybrid.items() if value is not None]
        if hybrid_names:
            raise ValueError(
                f"{', '.join(hybrid_names)}: supported only by rules {', '.join(HYBRID_RULES)}, "
                f"got rule {rule!r:.60}"
            )
        choice = _choice(rule, top_k, block, index_heads, index_width, loss_coeff)
    if base is None:
        engine = gpt_layer_specs.HAVE_TE
        base = (
            gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
            if engine
            else gpt_layer_specs.get_gpt_layer_local_spec(normalization="RMSNorm")
        )
    layers = getattr(base, "layer_specs", None)
    if layers is None:
        if not _attends(base, choice):
            raise _no_base(base, choice)
        return _with_choice(base, choice)
    if not any(_attends(layer, choice) for layer in layers):
        raise _no_base(base, choice)
    layers = [_with_choice(layer, choice) if _attends(layer, choice) else layer for layer in layers]
    return dataclasses.replace(base, layer_specs=layers)


def _choice(
    rule: Any, top_k: Any, block: Any, index_heads: Any, index_width: Any, loss_coeff: Any
) -> LayerRule:
    checked_rule, default = rule_of(rule), None
    for kind, sizes in _INDEXERS.items():
        if type(checked_rule) is kind:
            default = sizes
    heads, width = default or (0, 0)
    if block is not None:
        _check_count("block", block, 1)
        if not dataclasses.is_dataclass(checked_rule):
            raise ValueError(
                f"block is supported only by rules that are dataclasses, got "
                f"{checked_rule!r:.100}; set the attribute `block` in the class of the rule"
            )
        changed: Any = dataclasses.replace(checked_rule, block=block)
        checked_rule = changed
    _check_count("top_k", top_k, 1)
    if index_heads is not None:
        _check_count("index_heads", index_heads, 0)
        heads = index_heads
    if index_width is not None:
        _check_count("index_width", index_width, 1)
        width = index_width
    if heads == 0 and default is not None:
        raise ValueError(
            f"index_heads must be at least 1 for rule {type(checked_rule).__name__}, got 0"
        )
    if heads == 0 and (index_width is not None or loss_coeff is not None or checked_rule.weighted):
        raise ValueError(
            f"index_heads is 0, so rule {type(checked_rule).__name__} runs without an indexer, and "
            "index_width, loss_coeff and weights of index heads have no effect; set index_heads to "
            "at least 1, or omit index_width and loss_coeff"
        )
    if heads != 0 and width == 0:
        raise ValueError(
            f"index_width is required for the indexer of rule {type(checked_rule).__name__}"
        )
    number = isinstance(loss_coeff, (int, float)) and 0 <= loss_coeff < float("inf")
    if loss_coeff is not None and (not number or type(loss_coeff) is bool):
        raise ValueError(f"loss_coeff must be a number >= 0, got {loss_coeff!r:.60}")
    return LayerRule(checked_rule, top_k, heads, width, loss_coeff)


def _check_count(name: str, value: Any, least: int) -> None:
    if type(value) is not int or value < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r:.60}")


def _attends(layer: Any, choice: LayerRule | HybridRule) -> bool:
    """Return whether the self attention of a layer can be replaced."""
    attention = getattr(getattr(layer, "submodules", None), "self_attention", None)
    module = getattr(attention, "module", None)
    return module is SelfAttention or (
        module is MLASelfAttention and isinstance(choice, HybridRule)
    )


def _no_base(base: Any, choice: LayerRule | HybridRule) -> ValueError:
    """Return the error for a `base` without a self attention that can be replaced."""
    attention = (
        "SelfAttention or MLASelfAttention"
        if isinstance(choice, HybridRule)
        else "SelfAttention (for latent attention use Megatron's own sparse layers, dsa)"
    )
    return ValueError(
        f"base must be the spec of a transformer layer or block with Megatron's {attention}, got "
        f"{base!r:.200}"
    )


def _with_choice(layer: ModuleSpec, choice: LayerRule | HybridRule) -> ModuleSpec:
    if isinstance(choice, HybridRule):
        return _with_hybrid_attention(layer, choice)
    return _with_rule(layer, choice)


def _with_hybrid_attention(layer: ModuleSpec, choice: HybridRule) -> ModuleSpec:
    parts: Any = layer.submodules
    attention = parts.self_attention.submodules
    replaced: dict[str, Any] = {}
    if parts.input_layernorm in (None, IdentityOp):
        _, replaced["input_layernorm"] = _norm_apart(attention.linear_qkv)
    replaced["self_attention"] = ModuleSpec(
        module=HybridSelfAttention,
        params={"rule": choice},
        submodules=hybrid_submodules(attention.linear_proj),
    )
    return dataclasses.replace(layer, submodules=dataclasses.replace(parts, **replaced))


def _with_rule(layer: ModuleSpec, choice: LayerRule) -> ModuleSpec:
    parts: Any = layer.submodules
    own, attention = parts.self_attention, parts.self_attention.submodules
    changed: dict[str, Any] = {"core_attention": RuleCoreAttention}
    replaced: dict[str, Any] = {}
    if choice.index_heads != 0 and parts.input_layernorm in (None, IdentityOp):
        # The indexer needs the output of the norm, which a fused norm and linear layer hides.
        linear, norm = _norm_apart(attention.linear_qkv)
        changed["linear_qkv"], replaced["input_layernorm"] = linear, norm
        names = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
        replaced["sharded_state_dict_keys_map"] = parts.sharded_state_dict_keys_map | names
    replaced["self_attention"] = dataclasses.replace(
        own,
        module=RuleSelfAttention,
        params=own.params | {"choice": choice},
        submodules=dataclasses.replace(attention, **changed),
    )
    return dataclasses.replace(layer, submodules=dataclasses.replace(parts, **replaced))


def _norm_apart(fused: Any) -> tuple[Any, Any]:
    """Return the classes of Transformer Engine's linear layer and norm, which replace `fused`."""
    engine: Any = importlib.import_module("megatron.core.extensions.transformer_engine")
    if fused is not getattr(engine, "TELayerNormColumnParallelLinear", None):
        raise ValueError(
            "base: the layer must have an input_layernorm, or Transformer Engine's "
            f"TELayerNormColumnParallelLinear as linear_qkv, got linear_qkv {fused!r:.100}"
        )
    return engine.TEColumnParallelLinear, engine.TENorm


# Settings that do not work with these layers, but work with BurstAttention in other layers.
_RULES = (
    *OF_SPECS,
    Rule("multi_latent_attention", "{flag} do not support latent attention; use Megatron's own dsa",
         remove=("--multi-latent-attention",)),
)  # fmt: skip


def _problems(config: Any, choice: LayerRule, layer: int) -> Iterator[Problem]:
    burst, rule = config.burst, choice.rule
    layers = f"layers with rule {type(rule).__name__}"
    yield from spec_problems(_RULES, config, burst, layers)
    if OFF in (burst.algorithm, burst.sparse):
        return
    if rule.block > 1 and layer_window(config, layer) is not None:
        yield Problem(
            f"layer {layer}: {layers} and blocks of {rule.block} positions do not support a window",
            remove=("--window-size",),
        )
    if choice.index_heads == 0:
        return
    differs = burst.attention_layout not in (None, burst.layout)
    if choice.pooled and differs and burst.layout != "contiguous":
        yield Problem(
            f"{layers} require the keys of a block on one rank, because they average these keys "
            "before rows are exchanged for --burst-attention-layout; --burst-layout "
            f"{burst.layout} splits blocks across ranks",
            add=("--burst-layout contiguous",),
            remove=("--burst-attention-layout",),
        )
    if _coefficient(config, choice) and getattr(config, "softmax_type", "vanilla") != "vanilla":
        yield Problem(
            f"{layers}: the indexer's loss does not support attention with a sink",
            add=("--softmax-type vanilla",),
        )
    heads, groups = _index_heads(config, choice), config.num_query_groups
    tp = config.tensor_model_parallel_size
    try:
        selections = rule.selections(heads, 1)
    except ValueError as error:
        yield Problem(str(error))
        return
    if selections > 1 and (heads != groups or heads % tp):
        yield Problem(
            f"{layers} have {heads} index heads. This number must equal --num-query-groups "
            f"{groups} and be a multiple of --tensor-model-parallel-size {tp}"
        )


def _index_heads(config: Any, choice: LayerRule) -> int:
    return config.num_query_groups if choice.index_heads is None else choice.index_heads


def _coefficient(config: Any, choice: LayerRule) -> float:
    if choice.loss_coeff is not None:
        return choice.loss_coeff
    configured = getattr(config, "dsa_indexer_loss_coeff", None)
    return LOSS if configured is None else configured  # a configured 0 means no loss


class RuleSelfAttention(SelfAttention):
    """Megatron's self attention with a selection rule; see `mb.sparse_layer_spec`.

    The attribute `indexer` is an `IndexBranch`, or None if the index tensors are the queries and
    keys of attention.
    """

    def __init__(self, config: Any, *args: Any, choice: LayerRule, **kwargs: Any) -> None:
        layer = kwargs.get("layer_number", args[1] if len(args) > 1 else 1)
        if burst_of(config) is None:
            raise ValueError(
                f"layers with rule {type(choice.rule).__name__} need megatron_burst: call "
                "megatron_burst.megatron.install() and configure(config, mb.BurstConfig()) before "
                "the model is built"
            )
        refuse(_problems(config, choice, layer))
        super().__init__(config, *args, **kwargs)
        self.choice, self.indexer, self.coefficient = choice, None, 0.0
        core: Any = self.core_attention
        core.choice = choice
        if choice.index_heads != 0:
            self.coefficient = _coefficient(config, choice)
            self.indexer = IndexBranch(config, choice, _index_heads(config, choice))
            self.indexer.requires_grad_(self.coefficient > 0)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any = None,
        rotary_pos_emb: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        **unsupported: Any,
    ) -> Any:
        """Run Megatron's forward, and pass the indexer's tensors to core attention.

        Megatron's forward passes `attention_bias` to core attention unchanged. Therefore this
        argument carries the index queries, keys and weights (`IndexTensors`).

        Raises:
            ValueError: `attention_bias`, or an argument that only inference or cross attention
                uses, is not None.
        """
        for name, value in {"attention_bias": attention_bias, **unsupported}.items():
            if value is not None:
                raise ValueError(
                    f"{name} is not supported by layers with rule "
                    f"{type(self.choice.rule).__name__}, which support only training: omit it"
                )
        index: Any = None
        if self.indexer is not None:
            index = self.index_tensors(hidden_states, rotary_pos_emb, packed_seq_params)
        return super().forward(
            hidden_states, attention_mask, rotary_pos_emb=rotary_pos_emb, attention_bias=index,
            packed_seq_params=packed_seq_params,
        )  # fmt: skip

    def index_tensors(self, hidden: torch.Tensor, angles: Any, packed: Any) -> IndexTensors:
        """Compute the index tensors for this tensor-parallel rank.

        Args:
            hidden: Hidden states after the input norm of the layer; they get no gradient.
            angles: Megatron's rotary embedding.
            packed: `PackedSeqParams`, or None.
        """
        config: Any = self.config
        hidden, tp = hidden.detach(), self.pg_collection.tp
        if config.sequence_parallel and tp.size() > 1:
            hidden = gather_from_sequence_parallel_region(hidden, group=tp)
        block = self.choice.rule.block
        if len(hidden) % block:
            raise ValueError(
                f"rule {type(self.choice.rule).__name__} has blocks of {block} positions, which do "
                f"not divide the {len(hidden)} rows of a rank: pad sequences to a multiple of "
                f"2 x --context-parallel-size x {block}"
            )
        assert self.indexer is not None
        tensors: Any = self.indexer(hidden, partial(self._rotated, angles, packed))
        heads = self.indexer.heads
        selections = self.choice.rule.selections(heads, 1)
        per_rank = selections > 1 and tp.size() > 1
        if per_rank:
            tensors = [of_this_rank(x, heads, tp) for x in tensors]
        attach = None
        if self.training and self.coefficient:
            weight = self.coefficient / selections
            attach = partial(self._attached, weight, tp if per_rank else None)
        heads_of = tp if tp.size() > 1 and not per_rank else None
        return IndexTensors(tuple(x for x in tensors if x is not None), heads_of, attach)

    def _rotated(self, angles: Any, packed: Any, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer's rotary embedding to the first columns of x [s, b, heads, d]."""
        config: Any = self.config
        skips = config.no_rope_freq and config.no_rope_freq[self.layer_number - 1]
        if angles is None or skips:
            return x
        angles = angles[0] if isinstance(angles, tuple) else angles
        if angles.shape[-1] > x.shape[-1]:
            raise ValueError(
                f"index_width {x.shape[-1]} is narrower than the {angles.shape[-1]} columns that "
                "rotary embedding rotates: increase index_width, or lower --rotary-percent"
            )
        lengths = None
        if packed is not None:
            x, padded = x.squeeze(1), packed.cu_seqlens_q_padded
            lengths = packed.cu_seqlens_q if padded is None else padded
        # Looked up in Megatron's module, because our patches replace functions there.
        rotated = megatrons.apply_rotary_pos_emb(
            x, angles, config=config, cu_seqlens=lengths,
            mscale=_yarn_get_concentration_factor_from_config(config),
            cp_group=group_of(packed, self.pg_collection.cp),
        )  # fmt: skip
        return rotated if packed is None else rotated.unsqueeze(1)

    def _attached(
        self, weight: float, sum_over: Any, out: torch.Tensor, losses: torch.Tensor
    ) -> torch.Tensor:
        cp = self.pg_collection.cp
        return attached(out, losses, weight, self.config, self.layer_number, cp, sum_over)


class RuleCoreAttention(BurstCoreAttention):
    """`BurstCoreAttention` with a selection rule, at any context-parallel size.

    Attributes:
        choice: Selection rule of the layer, set by its `RuleSelfAttention`.
    """

    choice: LayerRule

    def _layer_kind(self, mask_type: Any) -> LayerKind:
        """Return the properties of the layer; layers with equal properties share plans.

        The options of the result have the algorithm that sends the keys of sparse attention.
        """
        config: Any = self.config
        options: SparseOptions = config.burst
        burst: Any = dataclasses.replace(
            options, algorithm=sparse_algorithm(options), side="kv", kernel="reference"
        )
        return dataclasses.replace(super()._layer_kind(mask_type), burst=burst, selects=True)

    @property
    def sequence_chunks(self) -> int:
        return 1

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: IndexTensors | None = None,
        packed_seq_params: Any = None,
        **unknown: Any,
    ) -> torch.Tensor:
        """Select keys for each query, and compute attention to the selected keys.

        Tensors of a packed batch have no dimension b.

        Args:
            query: Queries [s, b, h, d].
            key: Keys [s, b, g, d].
            value: Values [s, b, g, w].
            attention_mask: Same as in `BurstCoreAttention`.
            attn_mask_type: Same as in `BurstCoreAttention`.
            attention_bias: Index tensors; None if the queries and keys are the index tensors.
            packed_seq_params: Same as in `BurstCoreAttention`.
            **unknown: Further arguments of Megatron, which must be None.

        Returns:
            The output [s, b, h * w], or [s, h * w] for a packed batch.
        """
        if packed_seq_params is not None:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        unsupported = {"attention_mask": attention_mask, **unknown}
        call = self.prepare_call(query, key, value, attn_mask_type, unsupported, packed_seq_params)
        index = attention_bias or IndexTensors((), None, None)
        tensors = query, key, value, *index.tensors
        self._announce(call.plan, tensors)
        if call.exchange is not None:
            tensors = call.exchange.to_attention(tensors, call.label)
        query, key, value, *index_tensors = tensors
        iq, ik, weights = [*(index_tensors or (query, key)), None][:3]
        rule, at = self.choice.rule, {"plan": call.plan, "label": call.label}
        chosen = select(iq, ik, weights, rule=rule, top_k=self.choice.top_k, **at)
        scale = self.softmax_scale
        out, lse = sparse_attention(
            query, key, value, chosen, scale=scale, sink=call.sink, return_lse=True, **at
        )
        if call.exchange is not None:
            out = call.exchange.to_stream(out, call.label)
        out = out.flatten(2)
        grads = torch.is_grad_enabled()
        # A checkpoint first runs this without gradients; the attention store then keeps the loss.
        if index.attach is not None and (
            grads or (current_store() is not None and self._burst.store)
        ):
            losses = indexer_loss(
                iq, ik, weights, query, key, chosen, rule=rule, scale=scale, lse=lse,
                tp_group=index.heads_of, **at,
            )  # fmt: skip
            out = index.attach(out, losses) if grads else out
        return out if packed_seq_params is None else out.squeeze(1)

    def _announce(self, plan: Plan, tensors: tuple[torch.Tensor, ...]) -> None:
        """Log which tensors the layer sends, and their bytes; equal layers log this once."""
        _, key, value, *index = tensors
        index = index[1] if index else key
        name = f"layers with rule {type(self.choice.rule).__name__}, top_k {self.choice.top_k}"
        config: Any = self.config
        kind = SelectingKind(
            config.burst, self.cut, name, ("index keys", index[0, 0].numel()),
            ("keys/values", key[0, 0].numel() + value[0, 0].numel()),
        )  # fmt: skip
        if kind not in self.book.logged:
            self.book.logged.add(kind)
            line = kind.describe(plan)
            self.book.startup = self.book.startup or line
            self.book.log(line)
