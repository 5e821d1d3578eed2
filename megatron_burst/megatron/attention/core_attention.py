"""BurstAttention as Megatron's core attention: the module between the projections of a layer.

It turns Megatron's call into one of `mb.attention` and refuses arguments that cannot be honoured.
`plan_book` shares plans between layers, `groups` makes the process groups, and `data.packed` says
where the tokens of a packed batch are.

Shape letters: s local sequence, b micro-batch, h query heads, g key/value heads of this
tensor-parallel rank, d key width, w value width; t local tokens of a packed batch.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

import megatron_burst as mb
from megatron_burst.comm.consensus import agree
from megatron_burst.config import Auto
from megatron_burst.megatron.attention.books import book_of
from megatron_burst.megatron.attention.call import (
    CAUSAL_PACKED,
    Answer,
    Call,
    check_call,
    check_pack,
)
from megatron_burst.megatron.attention.groups import micro_batch_groups
from megatron_burst.megatron.attention.micro_batch import group_of, ranks_of
from megatron_burst.megatron.attention.plan_book import (
    WHOLE,
    LayerKind,
    PlanBook,
    Rows,
    nothing_seen,
)
from megatron_burst.megatron.attention.relayout import Around
from megatron_burst.megatron.checks.config import check_config
from megatron_burst.megatron.checks.model import dropout_problem, records_max_logits
from megatron_burst.megatron.checks.problem import refuse
from megatron_burst.megatron.data.cut import attention_cut, cut_of_run, layer_window
from megatron_burst.megatron.data.packed import Pack, packs


class BurstCoreAttention(MegatronModule):
    """Drop-in for ``DotProductAttention`` / ``TEDotProductAttention`` at context-parallel size > 1.

    Megatron's attention layers build it after `install` and `configure`, with the keywords of its
    own core attention. The first module over a context-parallel group makes its grid, and the first
    forward the communicators of its rings: collectives over that group. Honours ``window_size``,
    ``window_attn_skip_freq`` and ``softmax_type``, whose parameter ``softmax_offset`` has the name
    that it has in checkpoints of Megatron's own modules.

    With ``log_max_attention_logit`` or ``qk_clip`` the largest logit of each head is in
    ``current_max_attn_logits`` [h], as Megatron's optimizer step wants it: of what this rank
    computed since that step took it away. Megatron takes the maximum over data- and
    context-parallel ranks.

    Of Megatron's keywords these count: config (after `configure`), layer_number, attn_mask_type,
    softmax_scale, pg_collection, and for MLA k_channels and v_channels. attention_type must be
    "self" and attention_dropout 0 or None; cp_comm_type is not read, and what is unknown must be
    None.

    While ``answer`` is set, it is called with query, key, value and the kind of mask, and what it
    returns is the result: for code that runs a layer for some of its rows.

    Raises the same ``ValueError`` on all ranks for settings that it cannot honour.
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
        self._burst: mb.BurstConfig = config.burst
        self.cut = cut_of_run(self._burst.layout)
        burst = self._burst
        check_config(config, burst)
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
        # Other ranks of a tensor-parallel group may get what the first one has cut, and later
        # stages get activations.
        self._gets_batches = pg_collection.tp.rank() == 0 and _first_stage(config)
        self.attn_mask_type = attn_mask_type
        self.softmax_scale = softmax_scale
        self._head_sizes = (
            config.num_attention_heads, config.num_query_groups, k_channels, v_channels,
        )  # fmt: skip
        self._layer = max(1, layer_number)
        self._window = layer_window(config, self._layer)
        self.current_max_attn_logits: torch.Tensor | None = None
        self._add_sink(config.num_attention_heads // pg_collection.tp.size())
        self.register_load_state_dict_pre_hook(_drop_extra_state)
        self.leads = self.book.join(self._layer_kind(attn_mask_type), self._layer)
        self.answer: Answer | None = None

    def _add_sink(self, heads: int) -> None:
        """``softmax_offset`` [h]: learnable, zeros ("off-by-one" softmax), or None."""
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
        return self._burst.sequence_chunks

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
        """query [s, b, h, d], key [s, b, g, d], value [s, b, g, w] of one dtype -> [s, b, h*w].

        s is this rank's share of the sequence, in the installed layout. With packed_seq_params
        (format thd, micro-batch size 1) [t, h, d], [t, g, d], [t, g, w] -> [t, h*w]; the ranks of
        their cp_group, if they name one, hold this micro-batch, and all of these call: the first
        time they make its communicators, which nobody else is waited for.
        attn_mask_type: causal or no mask, in place of the layer's. attention_mask, attention_bias
        and what is unknown must be None. Raises ``ValueError`` on all ranks alike.
        """
        if self.answer is not None:
            return self.answer(query, key, value, attn_mask_type)
        if self._burst.sequence_chunks not in (1, "auto"):
            raise ValueError(
                f"--burst-sequence-chunks {self._burst.sequence_chunks}: core attention of layer "
                f"{self._layer} was called outside TransformerLayer._forward_attention, which cuts "
                "rows into chunks; leave the flag out"
            )
        if packed_seq_params is not None:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        asked = {"attention_mask": attention_mask, "attention_bias": attention_bias, **unknown}
        call = self.call(query, key, value, attn_mask_type, asked, packed_seq_params)
        around = self._around(query, key, value, packed_seq_params)
        attention = mb.attention if around is None else around.attention
        out = attention(query, key, value, **call).flatten(2)
        return out if packed_seq_params is None else out.squeeze(1)

    def call(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask_type: AttnMaskType | None,
        asked: dict[str, Any],
        packed_seq_params: Any,
        rows: Rows = WHOLE,
    ) -> Call:
        """plan, sink, max_logits and label of a call of `mb.attention`; collective if this layer
        leads.

        query [s, b, h, d], key [s, b, g, d], value [s, b, g, w]: of this rank's whole shard; only
        shapes, dtypes and device count. attn_mask_type, packed_seq_params: as `forward` takes them.
        asked: as `check_call` takes it. rows: as `PlanBook.plan`.
        """
        mask_type = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        book = self._book(packed_seq_params)
        try:
            check_call(mask_type, asked, packed_seq_params, self.cut)
            pack = None
            if packed_seq_params is not None:
                pack = self._pack(book, packed_seq_params, query)
        except ValueError as error:
            self._fail(book, error)
            raise
        kind = self._layer_kind(mask_type)
        plan = book.plan(kind, self.leads, query, key, value, pack, rows)
        largest = self._largest(query) if kind.max_logits else None
        return Call(plan=plan, sink=self.softmax_offset, max_logits=largest, label=self._layer)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict:
        """``softmax_offset``, if it is learnable, split over tensor-parallel ranks like the heads.

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

    def _pack(self, book: PlanBook, params: Any, query: torch.Tensor) -> Pack:
        size = book.groups.size
        pack = book.pack(query.shape[0] * size, params)
        layout = pack.layout(self.cut, size)
        uncut = self._gets_batches and not packs().was_cut(pack)
        check_pack(self.config, layout, pack.total, size, uncut)
        return pack

    def _around(self, query: Any, key: Any, value: Any, params: Any) -> Around | None:
        """The exchanges of rows that attention in another layout than the stream's needs."""
        book = self._book(params)
        pack = None if params is None else book.pack(query.shape[0] * book.groups.size, params)
        return book.around(self._layer_kind(self.attn_mask_type), query, key, value, pack)

    def _largest(self, query: torch.Tensor) -> torch.Tensor:
        """``current_max_attn_logits``, made anew after Megatron took it."""
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
            cut=self.cut if apart is None else apart,
            stream=None if apart is None else self.cut,
        )

    def _fail(self, book: PlanBook, error: ValueError) -> None:
        """Make ranks whose call was right raise the error too, if this layer makes the plans."""
        if self.leads:
            agree(error, book.groups.gather)


def _first_stage(config: Any) -> bool:
    """Whether this rank is in the pipeline stage that gets tokens."""
    if getattr(config, "pipeline_model_parallel_size", 1) == 1:
        return True
    return parallel_state.get_pipeline_model_parallel_rank() == 0


def _drop_extra_state(module: Any, state_dict: dict[str, Any], prefix: str, *unused: Any) -> None:
    """Transformer Engine's attention saves its fp8 state beside its parameters: there is none."""
    state_dict.pop(f"{prefix}_extra_state", None)
