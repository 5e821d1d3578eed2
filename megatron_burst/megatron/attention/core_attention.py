# SPDX-License-Identifier: Apache-2.0
"""BurstAttention as Megatron's core attention: the module between the projections of a layer.

The module translates Megatron's call to a call of `mb.attention` and refuses arguments that are not
supported. `plan_book` shares plans between layers, `groups` makes the process groups, and
`data.packed` describes the documents of a packed batch.

Shape letters: s local sequence, b micro-batch, h query heads, g key/value heads of this
tensor-parallel rank, d key width, w value width; t local tokens of a packed batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch.utils.weak import WeakIdKeyDictionary

from ... import registry
from ...attention import attention
from ...config import Auto, BurstConfig
from ...layout import DocumentZigzag, Layout
from ...planning.plan import Plan
from ...recompute.checkpoint import in_backward
from ..checks.config import check_layer, dropout_problem, records_max_logits
from ..checks.cuda_graphs import contain_attention, graphs_asked
from ..checks.problem import refuse
from ..data.cut import (
    BatchCut,
    attention_cut,
    cut_of_run,
    group_of,
    ranks_of,
    unpacked,
)
from ..data.datasets import documents_expected
from ..data.entries import MASK, NO_MASK, placeholder
from ..data.other_cuts import check_cut, cuts_batches
from ..data.packed import Pack, version_of
from ..data.rope import mrope_of_packs
from ..model_shape import layer_window
from ..patching import run_state
from .groups import book_of, micro_batch_groups
from .plan_book import ALL_ROWS, LayerKind, PlanBook, RowChunkSizes, nothing_seen
from .relayout import RowExchange

_CAUSAL = {AttnMaskType.causal: True, AttnMaskType.no_mask: False}
# For packed documents, Megatron calls the same masks padding_causal and padding.
CAUSAL_PACKED = _CAUSAL | {AttnMaskType.padding_causal: True, AttnMaskType.padding: False}


class AttentionCall(NamedTuple):
    """Arguments of one call of a layer's attention, except q, k and v.

    Attributes:
        plan: The plan.
        sink: The sink logits [h], or None.
        max_logits: The tensor [h] that receives the largest logit of each head, or None.
        label: The number of the layer, for messages.
        exchange: The exchange of rows before and after attention; None if attention uses the layout
            of the tokens.
        value_scale: The factor by which v is multiplied.
    """

    plan: Plan
    sink: torch.Tensor | None
    max_logits: torch.Tensor | None
    label: int
    exchange: RowExchange | None = None
    value_scale: float = 1.0

    def attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Compute attention of q [s, b, h, d], k [s, b, g, d], v [s, b, g, w]: [s, b, h, w]."""
        if self.value_scale != 1.0:
            v = v * self.value_scale
        if self.exchange is not None:
            q, k, v = self.exchange.to_attention((q, k, v), self.label)
        out = attention(
            q, k, v, plan=self.plan, sink=self.sink, max_logits=self.max_logits, label=self.label
        )
        return out if self.exchange is None else self.exchange.to_stream(out, self.label)


class BurstCoreAttention(MegatronModule):
    """Replacement of Megatron's core attention, in models for which `uses_burst` is true.

    It replaces `DotProductAttention` and `TEDotProductAttention`. After `install` and `configure`,
    Megatron's attention layers build it with the keywords of Megatron's own core attention. The
    first module on a context-parallel group creates the grid of the group (`Groups`), and the first
    forward creates the communicators of the rings. Both steps are collectives of that group.

    The module supports `window_size`, `window_attn_skip_freq` and `softmax_type`. The parameter
    `softmax_offset` has the same name as in checkpoints of Megatron's own modules.

    With `log_max_attention_logit` or `qk_clip`, `current_max_attn_logits` [h] is the largest logit
    of each head. The value covers the calls of this rank since Megatron's optimizer step last reset
    `current_max_attn_logits` to None. Megatron computes the maximum over data- and context-parallel
    ranks.

    Args:
        config: a `TransformerConfig`, after `configure`.
        layer_number: layer number, from 1.
        attn_mask_type: causal or no mask.
        attention_type: must be "self".
        attention_dropout: must be 0 or None.
        softmax_scale: the factor of the logits; None for 1/sqrt(d).
        cp_comm_type: ignored.
        pg_collection: Megatron's process groups; None for Megatron's global groups.
        k_channels: key width, for latent attention.
        v_channels: value width, for latent attention.
        unknown: further keywords of Megatron; all values must be None.

    Raises:
        ValueError: Settings are not supported; all ranks raise the same error.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **unknown: Any,
    ) -> None:
        super().__init__(config=config)
        burst: BurstConfig = config.burst
        self.cut = cut_of_run(burst.layout)
        check_layer(self.whole_config(config), burst)
        if attention_dropout:
            refuse([dropout_problem(attention_dropout)])
        if attention_type != "self":
            raise ValueError(
                f"attention_type is {attention_type!r}; only 'self' (self-attention) is supported"
            )
        for name, value in unknown.items():
            if value is not None:
                raise ValueError(
                    f"core attention got the unknown argument {name}={value!r}; omit it"
                )
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        sizes = config.hierarchical_context_parallel_sizes
        self.book = book_of(config, pg_collection)
        self.tp_group, self.cp_group = pg_collection.tp, pg_collection.cp
        self._per_node = sizes[0] if sizes else burst.intra_size
        self._cuts = cuts_batches(config, pg_collection)
        self.attn_mask_type = attn_mask_type
        self.softmax_scale = softmax_scale
        self._head_sizes = (
            config.num_attention_heads, config.num_query_groups, k_channels, v_channels,
        )  # fmt: skip
        self._layer = max(1, layer_number)
        self._window = layer_window(config, self._layer)
        self._burst = burst
        row_chunks = registry.optional("row_chunks")
        self._sequence_chunks = 1 if row_chunks is None else row_chunks(burst)
        self.current_max_attn_logits: torch.Tensor | None = None
        self._add_sink(config.num_attention_heads // pg_collection.tp.size())
        self.register_load_state_dict_pre_hook(_drop_extra_state)
        self.leads = self.book.join(self._layer_kind(attn_mask_type), self._layer)
        self._graphs = graphs_asked(config)[0] if contain_attention(config) else None
        if self._graphs is not None and self.leads:
            self.book.log(
                f"{self._graphs}: CUDA graphs that contain attention were tested on one GPU with "
                "all ranks in one process, but not with NCCL; compare losses with a run without "
                "CUDA graphs"
            )

    def whole_config(self, config: Any) -> Any:
        """Return the configuration of the whole model.

        Subclasses override this method if `config` describes only this layer.
        """
        return config

    def _add_sink(self, heads: int) -> None:
        """Set `softmax_offset`: a parameter [h], zeros [h] ("off-by-one" softmax), or None."""
        config: Any = self.config
        self.softmax_offset = None
        kind = getattr(config, "softmax_type", "vanilla")
        if kind == "vanilla":
            return
        sink = torch.zeros(heads, device=torch.cuda.current_device(), dtype=config.params_dtype)
        if kind == "off-by-one":
            self.softmax_offset = sink
            return
        del self.softmax_offset
        self.softmax_offset = torch.nn.Parameter(sink)
        if config.perform_initialization:
            config.init_method(self.softmax_offset)

    @property
    def sequence_chunks(self) -> int | Auto:
        """Number of row chunks of the layer's attention; "auto" if the layer chooses the number."""
        return self._sequence_chunks

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        **unknown: Any,
    ) -> torch.Tensor:
        """Compute attention over this rank's rows of the sequence.

        Args:
            query: [s, b, h, d]; with packed_seq_params [t, h, d].
            key: [s, b, g, d]; with packed_seq_params [t, g, d]. Same dtype as `query`.
            value: [s, b, g, w]; with packed_seq_params [t, g, w]. Same dtype as `query`.
            attention_mask: None, or a tensor that does not change the result (see `check_call`).
            attn_mask_type: causal or no mask; None for the mask type of the layer.
            attention_bias: must be None.
            packed_seq_params: documents in format thd, at micro-batch size 1. If it has a cp_group,
                the ranks of that group hold the micro-batch, and all of them make this call. The
                first such call creates the communicators of the group.
            unknown: further keywords of Megatron; all values must be None.

        Returns:
            [s, b, h*w], or [t, h*w] for a packed batch.

        Raises:
            ValueError: Arguments are not supported; all ranks raise the same error.
        """
        if self._sequence_chunks not in (1, "auto"):
            raise ValueError(
                f"--burst-sequence-chunks {self._sequence_chunks}: core attention of layer "
                f"{self._layer} was called outside TransformerLayer._forward_attention, which "
                "makes row chunks; remove the flag"
            )
        if packed_seq_params is not None:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        other_arguments = {
            "attention_mask": attention_mask,
            "attention_bias": attention_bias,
            **unknown,
        }
        call = self.prepare_call(
            query, key, value, attn_mask_type, other_arguments, packed_seq_params
        )
        out = call.attention(query, key, value).flatten(2)
        return out if packed_seq_params is None else out.squeeze(1)

    def prepare_call(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask_type: AttnMaskType | None,
        other_arguments: dict[str, Any],
        packed_seq_params: Any,
        rows: RowChunkSizes = ALL_ROWS,
    ) -> AttentionCall:
        """Return the arguments of attention over one micro-batch, except q, k and v.

        The leader of a kind (the first layer on this rank with the same properties) makes the plan,
        which is a collective. Other layers look the plan up. Only shapes, dtypes and device of
        `query`, `key` and `value` are read.

        Args:
            query: [s, b, h, d] of this rank's whole shard.
            key: [s, b, g, d].
            value: [s, b, g, w].
            attn_mask_type: same as in `forward`.
            other_arguments: Megatron's further arguments by name, same as in `check_call`.
            packed_seq_params: same as in `forward`.
            rows: the number of row chunks of the call, and how its rows are cut into them.

        Raises:
            ValueError: Arguments are not supported; all ranks raise the same error.
        """
        mask_type = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        kind, book, pack = self._layer_kind(mask_type), self._book(packed_seq_params), None
        with book.shared_errors(self.leads):
            self._check_graphs(other_arguments, packed_seq_params)
            check_call(mask_type, other_arguments, packed_seq_params, self.cut)
            if packed_seq_params is not None:
                if getattr(self.config, "mrope_section", None):
                    raise mrope_of_packs()
                pack = self._pack(book, packed_seq_params, query)
        tensors = {"q": query, "k": key, "v": value}
        return AttentionCall(
            plan=book.plan(kind, self.leads, tensors, pack, rows),
            sink=self.softmax_offset,
            max_logits=self._largest(query) if kind.max_logits else None,
            label=self._layer,
            exchange=book.row_exchange(kind, query, key, value, pack),
        )

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict:
        """Return `softmax_offset` for a checkpoint; tensor-parallel ranks split it like the heads.

        Name and shape are the same as in Megatron's own modules, so checkpoints are
        interchangeable.

        Args:
            prefix: Prefix of the names in the checkpoint.
            sharded_offsets: Offsets of this module in sharded dimensions, as Megatron passes them.
            metadata: Megatron's metadata; `dp_cp_group` is read.

        Returns:
            Sharded tensors by name; empty if `softmax_offset` is not a parameter.
        """
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )

    def _book(self, params: Any) -> PlanBook:
        """Return the plan book (shared plans and groups) of the ranks that hold a micro-batch.

        The first micro-batch on a set of ranks creates their book, which is a collective.
        """
        group = group_of(params, self.cp_group)
        if group is self.cp_group:
            return self.book
        ranks = ranks_of(group)
        if ranks == ranks_of(self.cp_group):
            return self.book
        if getattr(self.config, "mtp_num_layers", None):
            raise ValueError(
                "packed_seq_params sets a cp_group for this micro-batch (or local_cp_size 1), but "
                "MTP heads use the group with which the model was built; remove --mtp-num-layers"
            )
        return self.book.book_of_ranks(
            ranks, lambda: micro_batch_groups(group, self._per_node, self._burst)
        )

    def _check_graphs(self, other_arguments: dict[str, Any], params: Any) -> None:
        """Raise `ValueError` for arguments that a CUDA graph of attention cannot replay."""
        if self._graphs is None:
            return
        if params is not None:
            raise ValueError(
                f"packed_seq_params with {self._graphs}: CUDA graphs that contain attention replay "
                "one plan, and every pack has its own plan; exclude attention from the graphs, or "
                "call without packed_seq_params"
            )
        mask = other_arguments.get(MASK)
        if mask is not None and not placeholder(mask):
            raise ValueError(
                f"{MASK} with {self._graphs}: a capture of attention cannot read the values of a "
                f"mask; exclude attention from the graphs, or {NO_MASK}"
            )

    def _pack(self, book: PlanBook, params: Any, query: torch.Tensor) -> Pack:
        size = book.groups.size
        pack = book.pack(query.shape[0] * size, params)
        check_cut(params, pack, self.cut, size, self._cuts)
        check_pack(self.config, pack.layout(self.cut, size), size)
        return pack

    def _largest(self, query: torch.Tensor) -> torch.Tensor:
        """Return `current_max_attn_logits`. Create it if Megatron has reset it to None."""
        if self.current_max_attn_logits is None:
            self.current_max_attn_logits = nothing_seen(query)
        return self.current_max_attn_logits

    def _layer_kind(self, mask_type: AttnMaskType) -> LayerKind:
        separate = attention_cut(self._burst)
        return LayerKind(
            burst=self._burst,
            causal=CAUSAL_PACKED.get(mask_type, True),
            window=self._window,
            softmax_scale=self.softmax_scale,
            head_sizes=self._head_sizes,
            max_logits=records_max_logits(self.config),
            number=0 if self._burst.mask is None else self._layer,
            attention_cut=self.cut if separate is None else separate,
            run_cut=None if separate is None else self.cut,
        )


def _drop_extra_state(module: Any, state_dict: dict[str, Any], prefix: str, *unused: Any) -> None:
    """Drop the fp8 state that Transformer Engine's attention saves with its parameters."""
    state_dict.pop(f"{prefix}_extra_state", None)


def check_call(
    mask_type: AttnMaskType, other_arguments: dict[str, Any], packed: Any, cut: BatchCut
) -> None:
    """Raise an error unless a call with these arguments is supported.

    An `attention_mask` of one element is accepted as a placeholder. A causal call also accepts a
    mask that does not change the result (`is_redundant`).

    Args:
        mask_type: the mask of the call.
        other_arguments: Megatron's arguments that must be None, by name.
        packed: a `PackedSeqParams` or None.
        cut: how the run cuts batches.

    Raises:
        ValueError: An argument is not supported.
    """
    supported = _CAUSAL if packed is None else CAUSAL_PACKED
    flag = documents_expected()
    if packed is None and flag is not None:
        raise ValueError(
            f"{flag} is set, but the script passed no packed_seq_params to the model; pass "
            f"the batch's cu_seqlens in them, as pretrain_gpt.py does, or remove {flag}"
        )
    if packed is None and cut.name == "balanced":
        raise unpacked()
    if mask_type not in supported:
        raise ValueError(f"attention mask type {mask_type} is not supported; use causal or no_mask")
    fixes = {
        "attention_mask": (
            "a causal layer accepts only a mask of equal values, or one that hides exactly the "
            "later keys; call the model with attention_mask=None, which is causal, and with "
            f"packed_seq_params for documents. Or {NO_MASK}"
        ),
        "attention_bias": "remove the relative position bias",
    }
    causal = packed is None and mask_type == AttnMaskType.causal
    for name, value in other_arguments.items():
        if value is None or (name == MASK and placeholder(value)):
            continue
        # In backward the call runs again with a new mask tensor; forward has checked its values.
        if not (name == MASK and causal and (in_backward() or is_redundant(value))):
            raise ValueError(f"{name} is not supported; {fixes.get(name, 'omit it')}")
    if packed is None:
        return
    if any(cls.__name__ == "TreePackedSeqParams" for cls in type(packed).__mro__):
        raise ValueError(
            "packed_seq_params is a TreePackedSeqParams (Megatron-LM pull request 7387, open), "
            "whose trees are not supported: pass trajectories to mb.rl.logprobs, or use ordinary "
            "PackedSeqParams"
        )
    form = getattr(packed, "qkv_format", None)
    if form != "thd":
        raise ValueError(f"packed_seq_params: qkv_format is {form!r}; it must be 'thd'")


def is_redundant(mask: Any) -> bool:
    """Return whether a causal layer may ignore a mask tensor.

    In causal attention, Transformer Engine 2.20 reads a mask tensor only in unfused attention,
    which does not support context parallelism. Unfused attention hides a key if the causal mask or
    the tensor hides it (`get_full_mask`). Here a tensor that would change the result of unfused
    attention is refused, because the script may rely on it.

    Args:
        mask: bool, True for hidden. The values are read once per tensor, which waits for the
            device.

    Returns:
        True if all values of the mask are equal (a placeholder), or if it hides exactly the later
            keys, [..., s, s]. False for any other mask, such as a mask of documents.
    """
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool or not mask.numel():
        return False
    state = run_state()
    if state.redundant_masks is None:
        state.redundant_masks = WeakIdKeyDictionary()
    cache: Any = state.redundant_masks
    version, redundant = cache.get(mask, (None, False))
    if version is None or version != version_of(mask):
        redundant = bool(mask.all()) or not bool(mask.any()) or _hides_later_keys(mask)
        cache[mask] = version_of(mask), redundant
    return redundant


def _hides_later_keys(mask: torch.Tensor) -> bool:
    if mask.dim() < 2 or mask.shape[-1] != mask.shape[-2]:
        return False
    positions = torch.arange(mask.shape[-1], device=mask.device)
    return bool((mask == (positions > positions[:, None])).all())


def check_pack(config: Any, layout: Layout, size: int) -> None:
    """Raise an error if the model does not support the layout of a pack.

    Args:
        config: a `TransformerConfig`.
        layout: the layout of the pack over `size` ranks.
        size: number of ranks that hold the pack.

    Raises:
        ValueError: The model requires that each document is cut separately, and `layout` cuts the
            pack as a whole.
    """
    documents_apart = size == 1 or isinstance(layout, DocumentZigzag)
    if getattr(config, "language_model_type", None) is not None and not documents_apart:
        raise ValueError(
            "packed_seq_params: LLaVAModel cuts every document in zigzag order, but the layout "
            "cuts the pack as a whole; use --burst-layout zigzag and pad documents to multiples of "
            f"2 x --context-parallel-size ({2 * size}) tokens"
        )
    if getattr(config, "apply_rope_fusion", False) and not documents_apart:
        raise ValueError(
            "fused rope of packed sequences requires --burst-layout zigzag and "
            f"documents of multiples of 2 x --context-parallel-size ({2 * size}) tokens: add "
            "--no-rope-fusion"
        )
