# SPDX-License-Identifier: Apache-2.0
"""GPT layers that attend to what a selection rule selects: the spec, and the attention it names.

Megatron's own self attention makes queries, keys and values; `RuleSelfAttention` adds the index
tensors, and hands them to `RuleCoreAttention` as the attention bias, the one argument that Megatron
passes through unread, also where it recomputes core attention.

Shape letters: s local rows, b batch, h query heads, g key/value heads of this tensor-parallel rank,
d width.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator
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
from megatron.core.transformer.spec_utils import ModuleSpec

from ....config import OFF
from ....megatron.attention.core_attention import BurstCoreAttention
from ....megatron.attention.plan_book import LayerKind
from ....megatron.checks.config import model_problems, records_max_logits, ulysses_size
from ....megatron.checks.problem import Problem, Rule, broken, refuse
from ....megatron.data.cut import group_of
from ....megatron.model_shape import layer_window
from ....planning.plan import Plan
from ....recompute.checkpoint import current_store
from ..attention import sparse_attention
from ..indexer import select
from ..loss import indexer_loss
from ..options import SparseOptions
from ..rules import Dsa, Msa, Qsa, SelectionRule, rule_of
from .checks import FLAG, SELECTING, sparse_algorithm
from .index_branch import IndexBranch, IndexTensors, LayerRule, of_this_rank
from .index_loss import attached
from .selecting_layers import SelectingKind

# Index heads (None: one for each key/value head) and their width, where a rule has an indexer.
_INDEXERS = {Dsa: (64, 128), Qsa: (4, 128), Msa: (None, 128)}
LOSS = 0.01  # the weight of an indexer's loss, where neither spec nor configuration has one


def sparse_layer_spec(
    *,
    rule: str | SelectionRule,
    top_k: int,
    block: int | None = None,
    index_heads: int | None = None,
    index_width: int | None = None,
    loss_coeff: float | None = None,
    base: Any = None,
) -> Any:
    """GPT layers of Megatron whose self attention sees what a rule selects; a `ModuleSpec`.

    rule, top_k: as of `mb.select`. block: positions of a block, where not the rule's own.
    index_heads, index_width: of the indexer, 0 heads for none: then queries and keys of attention
    are the index tensors. Default: dsa 64 x 128, qsa 4 x 128, msa 128 wide with one head for each
    key/value head, moba and rules of your own none. loss_coeff: the weight of the indexer's loss;
    default Megatron's `dsa_indexer_loss_coeff`, or 0.01; 0 freezes the indexer. base: the layers as
    Megatron makes them, the spec of a layer or of a block (whose other layers stay); default
    Transformer Engine's where it is installed, else local ones.

    Needs `mb.megatron.install()` and `configure`, at any context-parallel size. Raises ValueError
    for other arguments; building the model raises it for settings that cannot be honoured.
    """
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
        if not _attends(base):
            raise _no_base(base)
        return _with_rule(base, choice)
    if not any(_attends(one) for one in layers):
        raise _no_base(base)
    layers = [_with_rule(one, choice) if _attends(one) else one for one in layers]
    return dataclasses.replace(base, layer_specs=layers)


def _choice(
    rule: Any, top_k: Any, block: Any, index_heads: Any, index_width: Any, loss_coeff: Any
) -> LayerRule:
    found, default = rule_of(rule), None
    for kind, sizes in _INDEXERS.items():
        if type(found) is kind:
            default = sizes
    heads, width = default or (0, 0)
    if block is not None:
        _check_count("block", block, 1)
        if not dataclasses.is_dataclass(found):
            raise ValueError(f"block: give it to your own rule, {found!r:.100}")
        changed: Any = dataclasses.replace(found, block=block)
        found = changed
    _check_count("top_k", top_k, 1)
    if index_heads is not None:
        _check_count("index_heads", index_heads, 0)
        heads = index_heads
    if index_width is not None:
        _check_count("index_width", index_width, 1)
        width = index_width
    if heads == 0 and default is not None:
        raise ValueError(f"index_heads: rule {type(found).__name__} needs an indexer, got 0")
    if heads == 0 and (index_width is not None or loss_coeff is not None or found.weighted):
        raise ValueError(
            f"index_heads: rule {type(found).__name__} has no indexer, so index_width, loss_coeff "
            "and weights of index heads mean nothing; give index_heads from 1 on"
        )
    if heads != 0 and width == 0:
        raise ValueError(f"index_width: rule {type(found).__name__} needs one for its indexer")
    number = isinstance(loss_coeff, (int, float)) and 0 <= loss_coeff < float("inf")
    if loss_coeff is not None and (not number or type(loss_coeff) is bool):
        raise ValueError(f"loss_coeff must be a number from 0 on, got {loss_coeff!r:.60}")
    return LayerRule(found, top_k, heads, width, loss_coeff)


def _check_count(name: str, value: Any, least: int) -> None:
    if type(value) is not int or value < least:
        raise ValueError(f"{name} must be an integer from {least} on, got {value!r:.60}")


def _attends(layer: Any) -> bool:
    attention = getattr(getattr(layer, "submodules", None), "self_attention", None)
    return getattr(attention, "module", None) is SelfAttention


def _no_base(base: Any) -> ValueError:
    return ValueError(
        "base: must be the spec of a transformer layer or block with Megatron's SelfAttention (of "
        f"latent attention Megatron has sparse layers itself, dsa), got {base!r:.200}"
    )


def _with_rule(layer: ModuleSpec, choice: LayerRule) -> ModuleSpec:
    parts: Any = layer.submodules
    own, attention = parts.self_attention, parts.self_attention.submodules
    changed: dict[str, Any] = {"core_attention": RuleCoreAttention}
    more: dict[str, Any] = {}
    if choice.index_heads != 0 and parts.input_layernorm in (None, IdentityOp):
        # The indexer reads normed rows, and a linear layer with a norm inside does not give them.
        linear, norm = _norm_apart(attention.linear_qkv)
        changed["linear_qkv"], more["input_layernorm"] = linear, norm
        names = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
        more["sharded_state_dict_keys_map"] = parts.sharded_state_dict_keys_map | names
    more["self_attention"] = dataclasses.replace(
        own,
        module=RuleSelfAttention,
        params=own.params | {"choice": choice},
        submodules=dataclasses.replace(attention, **changed),
    )
    return dataclasses.replace(layer, submodules=dataclasses.replace(parts, **more))


def _norm_apart(fused: Any) -> tuple[Any, Any]:
    """Transformer Engine's linear layer and norm, in place of the one module that is both."""
    engine: Any = importlib.import_module("megatron.core.extensions.transformer_engine")
    if fused is not getattr(engine, "TELayerNormColumnParallelLinear", None):
        raise ValueError(
            "base: the layer has no input_layernorm, whose result an indexer reads, and its "
            f"linear_qkv is {fused!r:.100}, not Transformer Engine's"
        )
    return engine.TEColumnParallelLinear, engine.TENorm


# What these layers exclude, beside what BurstAttention does.
_RULES = (
    *SELECTING,
    Rule(lambda c, b: b.algorithm == OFF,
         "{flag} need BurstAttention at any --context-parallel-size, got --context-parallel-algo "
         f"{OFF}", add=("--context-parallel-algo burst",)),
    Rule(lambda c, b: b.sparse == OFF, f"{{flag}} with {FLAG} {OFF}: Megatron has none of them",
         remove=(FLAG,)),
    Rule(lambda c, b: b.sequence_chunks not in (None, 1, "auto"),
         "{flag} do not run in chunks of rows", remove=("--burst-sequence-chunks",)),
    Rule(lambda c, b: records_max_logits(c), "{flag} do not record the largest attention logits",
         remove=("--log-max-attention-logit", "--qk-clip")),
    Rule("multi_latent_attention", "{flag} have no latent attention, for which Megatron's own dsa "
         "is", remove=("--multi-latent-attention",)),
)  # fmt: skip


def _problems(config: Any, choice: LayerRule, layer: int) -> Iterator[Problem]:
    burst, rule = config.burst, choice.rule
    what = f"layers with rule {type(rule).__name__}"
    yield from broken(_RULES, config, burst, what)
    yield from model_problems(config)
    if OFF in (burst.algorithm, burst.sparse):
        return
    if ulysses_size(burst, config.context_parallel_size) > 1:
        yield Problem(
            f"{what}: ranks do not share their heads",
            add=("--context-parallel-algo burst",),
            remove=("--burst-ulysses-size",),
        )
    if rule.block > 1 and layer_window(config, layer) is not None:
        yield Problem(f"{what} of {rule.block} positions have no window", remove=("--window-size",))
    if choice.index_heads == 0:
        return
    apart = burst.attention_layout not in (None, burst.layout)
    if choice.pooled and apart and burst.layout != "contiguous":
        yield Problem(
            f"{what} average keys of a block where the layer has them, and --burst-layout "
            f"{burst.layout} cuts blocks that --burst-attention-layout leaves whole",
            add=("--burst-layout contiguous",),
            remove=("--burst-attention-layout",),
        )
    if _coefficient(config, choice) and getattr(config, "softmax_type", "vanilla") != "vanilla":
        yield Problem(
            f"{what}: the indexer's loss is not that of attention with a sink",
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
            f"{what} select for each of {heads} index heads: there must be one for each of "
            f"--num-query-groups {groups}, which --tensor-model-parallel-size {tp} must divide"
        )


def _index_heads(config: Any, choice: LayerRule) -> int:
    return config.num_query_groups if choice.index_heads is None else choice.index_heads


def _coefficient(config: Any, choice: LayerRule) -> float:
    if choice.loss_coeff is not None:
        return choice.loss_coeff
    given = getattr(config, "dsa_indexer_loss_coeff", None)
    return LOSS if given is None else given  # 0 stands for no loss


class RuleSelfAttention(SelfAttention):
    """Megatron's self attention with a selection rule; what `mb.sparse_layer_spec` names.

    Parameters of the indexer are in `indexer`, those of `IndexBranch`; there are none where the
    rule selects by queries and keys themselves.
    """

    def __init__(self, config: Any, *args: Any, choice: LayerRule, **kwargs: Any) -> None:
        layer = kwargs.get("layer_number", args[1] if len(args) > 1 else 1)
        if getattr(config, "burst", None) is None:
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
        **others: Any,
    ) -> Any:
        """As Megatron's; attention_bias and what belongs to inference or cross attention must be
        None, else ValueError.
        """
        for name, value in {"attention_bias": attention_bias, **others}.items():
            if value is not None:
                raise ValueError(
                    f"{name} is not supported by layers with rule "
                    f"{type(self.choice.rule).__name__}; they have no inference: leave it out"
                )
        index: Any = None
        if self.indexer is not None:
            index = self.index_tensors(hidden_states, rotary_pos_emb, packed_seq_params)
        return super().forward(
            hidden_states, attention_mask, rotary_pos_emb=rotary_pos_emb, attention_bias=index,
            packed_seq_params=packed_seq_params,
        )  # fmt: skip

    def index_tensors(self, hidden: torch.Tensor, angles: Any, packed: Any) -> IndexTensors:
        """Those of this rank's selections, of the layer's normed input, without its gradient."""
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
        tensors: Any = self.indexer(hidden, partial(self._turned, angles, packed))
        heads = self.indexer.heads
        selections = self.choice.rule.selections(heads, 1)
        apart = selections > 1 and tp.size() > 1
        if apart:
            tensors = [of_this_rank(x, heads, tp) for x in tensors]
        attach = None
        if self.training and self.coefficient:
            weight = self.coefficient / selections
            attach = partial(self._attached, weight, tp if apart else None)
        heads_of = tp if tp.size() > 1 and not apart else None
        return IndexTensors(tuple(x for x in tensors if x is not None), heads_of, attach)

    def _turned(self, angles: Any, packed: Any, x: torch.Tensor) -> torch.Tensor:
        """X [s, b, heads, d] with the layer's rotary embedding on its first columns."""
        config: Any = self.config
        skips = config.no_rope_freq and config.no_rope_freq[self.layer_number - 1]
        if angles is None or skips:
            return x
        angles = angles[0] if isinstance(angles, tuple) else angles
        if angles.shape[-1] > x.shape[-1]:
            raise ValueError(
                f"index_width {x.shape[-1]} is narrower than the {angles.shape[-1]} columns that "
                "rotary embedding turns: widen it, or lower --rotary-percent"
            )
        lengths = None
        if packed is not None:
            x, padded = x.squeeze(1), packed.cu_seqlens_q_padded
            lengths = packed.cu_seqlens_q if padded is None else padded
        # By its home, where its patch for layouts is.
        turned = megatrons.apply_rotary_pos_emb(
            x, angles, config=config, cu_seqlens=lengths,
            mscale=_yarn_get_concentration_factor_from_config(config),
            cp_group=group_of(packed, self.pg_collection.cp),
        )  # fmt: skip
        return turned if packed is None else turned.unsqueeze(1)

    def _attached(
        self, weight: float, sum_over: Any, out: torch.Tensor, losses: torch.Tensor
    ) -> torch.Tensor:
        cp = self.pg_collection.cp
        return attached(out, losses, weight, self.config, self.layer_number, cp, sum_over)


class RuleCoreAttention(BurstCoreAttention):
    """`BurstCoreAttention` over what a rule selects, at any context-parallel size.

    choice: set by the `RuleSelfAttention` that it belongs to.
    """

    choice: LayerRule

    def _layer_kind(self, mask_type: Any) -> LayerKind:
        """Layers whose plan is of an algorithm in which keys travel."""
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
        """Query [s, b, h, d], key [s, b, g, d], value [s, b, g, w] -> [s, b, h*w]; packed as
        `BurstCoreAttention` takes them. attention_bias: the index tensors, None for a rule that
        selects by queries and keys.
        """
        if packed_seq_params is not None:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        others = {"attention_mask": attention_mask, **unknown}
        call = self.call(query, key, value, attn_mask_type, others, packed_seq_params)
        index = attention_bias or IndexTensors((), None, None)
        tensors = query, key, value, *index.tensors
        self._announce(call.plan, tensors)
        if call.around is not None:
            tensors = call.around.to_attention(tensors, call.label)
        query, key, value, *found = tensors
        iq, ik, weights = [*(found or (query, key)), None][:3]
        rule, at = self.choice.rule, {"plan": call.plan, "label": call.label}
        chosen = select(iq, ik, weights, rule=rule, top_k=self.choice.top_k, **at)
        scale = self.softmax_scale
        out, lse = sparse_attention(
            query, key, value, chosen, scale=scale, sink=call.sink, return_lse=True, **at
        )
        if call.around is not None:
            out = call.around.to_stream(out, call.label)
        out = out.flatten(2)
        grads = torch.is_grad_enabled()
        # Also where a checkpoint runs without gradients and keeps what it will want.
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
        """Log, once for each kind of layer, what travels."""
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
