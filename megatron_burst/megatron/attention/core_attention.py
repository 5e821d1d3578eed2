# SPDX-License-Identifier: Apache-2.0
"""BurstAttention as Megatron's core attention: the module between the projections of a layer.

It turns Megatron's call into one of `mb.attention` and refuses arguments that cannot be honoured.
`plan_book` shares plans between layers, `groups` makes the process groups, and `data.packed` says
where the tokens of a packed batch are.

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
from ..checks.config import check_config, dropout_problem, records_max_logits
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
from ..patching import notes
from .groups import book_of, micro_batch_groups
from .plan_book import WHOLE, LayerKind, PlanBook, RowChunking, nothing_seen
from .relayout import Around

_CAUSAL = {AttnMaskType.causal: True, AttnMaskType.no_mask: False}
# Megatron's names for the same masks when documents are packed.
CAUSAL_PACKED = _CAUSAL | {AttnMaskType.padding_causal: True, AttnMaskType.padding: False}


class AttentionCall(NamedTuple):
    """Attention over one micro-batch in one layer, but for its tensors.

    label: the layer's number, for messages. around: the exchanges of rows before and after, where
    attention has another layout than the stream of tokens. value_scale: of the values.
    """

    plan: Plan
    sink: torch.Tensor | None
    max_logits: torch.Tensor | None
    label: int
    around: Around | None = None
    value_scale: float = 1.0

    def attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """`mb.attention` of q [s, b, h, d], k [s, b, g, d], v [s, b, g, w] -> [s, b, h, w]."""
        if self.value_scale != 1.0:
            v = v * self.value_scale
        if self.around is not None:
            q, k, v = self.around.to_attention((q, k, v), self.label)
        out = attention(
            q, k, v, plan=self.plan, sink=self.sink, max_logits=self.max_logits, label=self.label
        )
        return out if self.around is None else self.around.to_stream(out, self.label)


class BurstCoreAttention(MegatronModule):
    """Drop-in for `DotProductAttention` / `TEDotProductAttention` at context-parallel size > 1.

    Megatron's attention layers build it after `install` and `configure`, with the keywords of its
    own core attention. The first module over a context-parallel group makes its grid, and the first
    forward the communicators of its rings: collectives over that group. Honours `window_size`,
    `window_attn_skip_freq` and `softmax_type`, whose parameter `softmax_offset` has the name
    that it has in checkpoints of Megatron's own modules.

    With `log_max_attention_logit` or `qk_clip` the largest logit of each head is in
    `current_max_attn_logits` [h], as Megatron's optimizer step wants it: of what this rank
    computed since that step took it away. Megatron takes the maximum over data- and
    context-parallel ranks.

    Of Megatron's keywords these count: config (after `configure`), layer_number, attn_mask_type,
    softmax_scale, pg_collection, and for MLA k_channels and v_channels. attention_type must be
    "self" and attention_dropout 0 or None; cp_comm_type is not read, and what is unknown must be
    None.

    Raises the same `ValueError` on all ranks for settings that it cannot honour.
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
        check_config(self.whole_config(config), burst)
        if attention_dropout:
            refuse([dropout_problem(attention_dropout)])
        if attention_type != "self":
            raise ValueError(f"attention_type is {attention_type!r}: only self-attention is split")
        for name, value in unknown.items():
            if value is not None:
                raise ValueError(f"core attention got the unknown argument {name}={value!r}")
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
                f"{self._graphs}: CUDA graphs contain attention, which was captured on a GPU with "
                "all ranks in one process, and never with NCCL; compare losses with a run without "
                "them"
            )

    def whole_config(self, config: Any) -> Any:
        """The configuration of all layers, where a layer's own, `config`, says less."""
        return config

    def _add_sink(self, heads: int) -> None:
        """`softmax_offset` [h]: learnable, zeros ("off-by-one" softmax), or None."""
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
        """Into how many chunks of rows the layer cuts its attention half; "auto" as it sees fit."""
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
        """Query [s, b, h, d], key [s, b, g, d], value [s, b, g, w] of one dtype -> [s, b, h*w].

        s is this rank's share of the sequence, in the installed layout. With packed_seq_params
        (format thd, micro-batch size 1) [t, h, d], [t, g, d], [t, g, w] -> [t, h*w]; the ranks of
        their cp_group, if they name one, hold this micro-batch, and all of these call: the first
        time they make its communicators, for which no other rank waits.
        attn_mask_type: causal or no mask, in place of the layer's. attention_mask: None, or a
        tensor that adds nothing (`check_call`). attention_bias and what is unknown must be None.
        Raises `ValueError` on all ranks alike.
        """
        if self._sequence_chunks not in (1, "auto"):
            raise ValueError(
                f"--burst-sequence-chunks {self._sequence_chunks}: core attention of layer "
                f"{self._layer} was called outside TransformerLayer._forward_attention, which cuts "
                "rows into chunks; leave the flag out"
            )
        if packed_seq_params is not None:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        others = {"attention_mask": attention_mask, "attention_bias": attention_bias, **unknown}
        call = self.call(query, key, value, attn_mask_type, others, packed_seq_params)
        out = call.attention(query, key, value).flatten(2)
        return out if packed_seq_params is None else out.squeeze(1)

    def call(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask_type: AttnMaskType | None,
        others: dict[str, Any],
        packed_seq_params: Any,
        rows: RowChunking = WHOLE,
    ) -> AttentionCall:
        """All that attention over one micro-batch needs besides its tensors; collective if this
        layer leads.

        query [s, b, h, d], key [s, b, g, d], value [s, b, g, w]: of this rank's whole shard; only
        shapes, dtypes and device count. attn_mask_type, packed_seq_params: as `forward` takes them.
        others: Megatron's further arguments, as `check_call` takes them. rows: as `PlanBook.plan`.
        Raises `ValueError` for arguments that it cannot honour, on all ranks alike.
        """
        mask_type = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        kind, book, pack = self._layer_kind(mask_type), self._book(packed_seq_params), None
        with book.refusing(self.leads):
            self._check_graphs(others, packed_seq_params)
            check_call(mask_type, others, packed_seq_params, self.cut)
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
            around=book.around(kind, query, key, value, pack),
        )

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict:
        """`softmax_offset`, if it is learnable, split over tensor-parallel ranks like the heads.

        Name and form are those of Megatron's own modules, so that checkpoints are interchangeable.
        prefix, sharded_offsets, metadata: as Megatron gives them to every module.
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
        """The plans of the ranks that hold a micro-batch; a collective of these, at their first."""
        group = group_of(params, self.cp_group)
        if group is self.cp_group:
            return self.book
        ranks = ranks_of(group)
        if ranks == ranks_of(self.cp_group):
            return self.book
        if getattr(self.config, "mtp_num_layers", None):
            raise ValueError(
                "packed_seq_params: cp_group, or local_cp_size 1, with --mtp-num-layers: further "
                "heads take the group that the model was built with"
            )
        return self.book.over(ranks, lambda: micro_batch_groups(group, self._per_node, self._burst))

    def _check_graphs(self, others: dict[str, Any], params: Any) -> None:
        """Raise `ValueError` for arguments that a CUDA graph of attention cannot replay."""
        if self._graphs is None:
            return
        if params is not None:
            raise ValueError(
                f"packed_seq_params with {self._graphs}: its CUDA graphs contain attention and "
                "replay one plan, and every pack has its own; leave attention out of them, or call "
                "without packed_seq_params"
            )
        mask = others.get(MASK)
        if mask is not None and not placeholder(mask):
            raise ValueError(
                f"{MASK} with {self._graphs}: its CUDA graphs contain attention, and a capture "
                f"cannot read the values of a mask; leave attention out of them, or {NO_MASK}"
            )

    def _pack(self, book: PlanBook, params: Any, query: torch.Tensor) -> Pack:
        size = book.groups.size
        pack = book.pack(query.shape[0] * size, params)
        check_cut(params, pack, self.cut, size, self._cuts)
        check_pack(self.config, pack.layout(self.cut, size), size)
        return pack

    def _largest(self, query: torch.Tensor) -> torch.Tensor:
        """`current_max_attn_logits`, made anew after Megatron took it."""
        if self.current_max_attn_logits is None:
            self.current_max_attn_logits = nothing_seen(query)
        return self.current_max_attn_logits

    def _layer_kind(self, mask_type: AttnMaskType) -> LayerKind:
        apart = attention_cut(self._burst)
        return LayerKind(
            burst=self._burst,
            causal=CAUSAL_PACKED.get(mask_type, True),
            window=self._window,
            softmax_scale=self.softmax_scale,
            head_sizes=self._head_sizes,
            max_logits=records_max_logits(self.config),
            number=0 if self._burst.mask is None else self._layer,
            cut=self.cut if apart is None else apart,
            stream=None if apart is None else self.cut,
        )


def _drop_extra_state(module: Any, state_dict: dict[str, Any], prefix: str, *unused: Any) -> None:
    """Transformer Engine's attention saves its fp8 state beside its parameters: there is none."""
    state_dict.pop(f"{prefix}_extra_state", None)


def check_call(mask_type: AttnMaskType, others: dict[str, Any], packed: Any, cut: BatchCut) -> None:
    """Raise `ValueError` unless a call with this kind of mask and these arguments is honoured.

    others: Megatron's arguments that must be None, by name; packed: a `PackedSeqParams` or None. An
    `attention_mask` may have one element, or be redundant (`is_redundant`) in a causal call.
    """
    known = _CAUSAL if packed is None else CAUSAL_PACKED
    flag = documents_expected()
    if packed is None and flag is not None:
        raise ValueError(
            f"{flag}, and the script handed no documents to the model: pass packed_seq_params "
            f"made of the batch's cu_seqlens, as pretrain_gpt.py does, or remove {flag}"
        )
    if packed is None and cut.name == "balanced":
        raise unpacked()
    if mask_type not in known:
        raise ValueError(
            f"attention mask type {mask_type} is not supported: only causal and no_mask are"
        )
    fixes = {
        "attention_mask": (
            "only one that is the same everywhere, or that hides exactly the later keys, is taken "
            "with a causal layer; call the model with attention_mask=None, which is causal, and "
            f"with packed_seq_params for documents. Or {NO_MASK}"
        ),
        "attention_bias": "remove the relative position bias",
    }
    causal = packed is None and mask_type == AttnMaskType.causal
    for name, value in others.items():
        if value is None or (name == MASK and placeholder(value)):
            continue
        # In backward the call runs again, with a new tensor of the mask that forward has checked.
        if not (name == MASK and causal and (in_backward() or is_redundant(value))):
            raise ValueError(f"{name} is not supported; {fixes.get(name, 'leave it out')}")
    if packed is None:
        return
    if any(each.__name__ == "TreePackedSeqParams" for each in type(packed).__mro__):
        raise ValueError(
            "packed_seq_params is a TreePackedSeqParams (Megatron-LM pull request 7387, open), "
            "whose trees are not read: give trajectories to mb.rl.logprobs, or ordinary "
            "PackedSeqParams"
        )
    form = getattr(packed, "qkv_format", None)
    if form != "thd":
        raise ValueError(f"packed_seq_params: qkv_format must be 'thd', got {form!r}")


def is_redundant(mask: Any) -> bool:
    """Return whether a causal layer may ignore a mask tensor.

    Transformer Engine 2.20 reads no mask tensor in causal attention, whatever it holds, except in
    its unfused attention, which hides what either mask hides (`get_full_mask`) and which does not
    support context parallelism. Here a tensor that would change the result of unfused attention is
    refused, because the script that made it may rely on it.

    Args:
        mask: bool, True: hidden. Its values are read once per tensor, which waits for the device.

    Returns:
        True if the mask is the same everywhere (a placeholder), or if it hides exactly the later
        keys, [..., s, s]. False for any other mask, such as the borders of documents.
    """
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool or not mask.numel():
        return False
    read = notes().setdefault("redundant masks", WeakIdKeyDictionary())
    version, redundant = read.get(mask, (None, False))
    if version is None or version != version_of(mask):
        redundant = bool(mask.all()) or not bool(mask.any()) or _hides_later_keys(mask)
        read[mask] = version_of(mask), redundant
    return redundant


def _hides_later_keys(mask: torch.Tensor) -> bool:
    if mask.dim() < 2 or mask.shape[-1] != mask.shape[-2]:
        return False
    places = torch.arange(mask.shape[-1], device=mask.device)
    return bool((mask == (places > places[:, None])).all())


def check_pack(config: Any, layout: Layout, size: int) -> None:
    """Raise `ValueError` if a pack's layout over `size` ranks excludes settings of the model."""
    documents_apart = size == 1 or isinstance(layout, DocumentZigzag)
    if getattr(config, "language_model_type", None) is not None and not documents_apart:
        raise ValueError(
            "packed_seq_params of LLaVAModel, which cuts every document in zigzag order: take "
            "--burst-layout zigzag and documents of multiples of 2 x --context-parallel-size "
            f"({2 * size}) tokens"
        )
    if getattr(config, "apply_rope_fusion", False) and not documents_apart:
        raise ValueError(
            "fused rope of packed sequences works only with --burst-layout zigzag and "
            f"documents of multiples of 2 x --context-parallel-size ({2 * size}) tokens: add "
            "--no-rope-fusion"
        )
