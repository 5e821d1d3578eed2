"""The plan book: plans and process groups that the attention layers of a model share.

Making a plan is a collective of the context-parallel group, because ranks compare what they are
about to do. Either all ranks make a plan or none does, by this rule:

- Layers are grouped by their `LayerKind`, which is known when they are built and the same on all
  ranks. In each group the lowest layer of this rank, the leader, makes the plan.
- The leader makes it in every forward, even if it made the same plan before, so that all ranks
  raise the same error if some were called differently. Other layers look the plan up.
- With a mask of the user's (`--burst-mask`) every layer is a kind of its own: its mask is known
  only when it is called with a batch.
- Every plan assumes that q, k and v need gradients. One plan then serves forward and recompute,
  in which layers run in another order, also with several micro-batches in flight. This costs
  little: q, k and v mostly come from one projection and need gradients together.
- Packed batches have one plan per pack. The last `PLANS_KEPT` plans are kept, in the order of use,
  which is the same on all ranks.
- A micro-batch may have a context-parallel group of its own (hybrid context parallelism). Every set
  of ranks has a book of its own, with groups and plans that its members make, and nobody else.
- What algorithm "auto" chooses for the first plan of a kind of layer and its shapes holds for all
  later ones, whatever documents they have: the process groups, and whether ranks share heads, were
  decided before any shape was known.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, cast

import torch

from ...autotune import cluster_file
from ...comm.consensus import agree
from ...comm.groups import Groups
from ...config import BurstConfig
from ...kernels.online_softmax import accumulation_dtype
from ...layout import Layout
from ...masks import Causal, Full, Mask, Window
from ...options import AttentionKeywords
from ...planning.plan import Plan
from ...planning.prepare import prepare
from .. import patching
from ..data.cut import BatchCut
from ..data.packed import Pack, Packs, packs
from ..users_mask import MaskBatch, MaskLayer, users_mask
from .relayout import Around, Moves, exchange_line

PLANS_KEPT = 256  # more than packed micro-batches in flight x kinds of layers


@dataclass(frozen=True)
class LayerKind:
    """What is known about an attention layer when it is built; the same on all ranks."""

    burst: BurstConfig
    causal: bool
    window: tuple[int | None, int | None] | None  # left and right, None for no limit
    softmax_scale: float | None
    head_sizes: tuple[int | None, ...]  # query heads, key/value heads, key width, value width
    max_logits: bool = False  # record the largest logit of each head
    number: int = 0  # of the layer, from 1 on; 0 where its mask does not depend on it
    cut: BatchCut | None = (
        None  # of packed batches; None for that of a layout which needs only a name
    )
    stream: BatchCut | None = (
        None  # of the tokens outside attention, where they have another layout
    )

    def layout(self, pack: Pack, cp_size: int) -> Layout:
        """Which positions of a pack each rank holds."""
        return pack.layout(self.attention, cp_size)

    @property
    def attention(self) -> BatchCut:
        """How attention cuts a sequence."""
        return self.cut or BatchCut(self.burst.layout)

    def mask(self, pack: Pack | None, seq_len: int) -> Mask:
        """The mask of such a layer, for one sequence of `seq_len` tokens over all ranks or for the
        documents of a pack. Raises `ValueError` for a mask of the user's that is none."""
        if self.burst.mask is not None:
            layer = MaskLayer(self.number, self.causal, self.window)
            batch = MaskBatch(seq_len, None if pack is None else pack.documents)
            mask = users_mask(self.burst.mask, layer, batch)
        else:
            mask = Causal() if self.causal else Full()
            if self.window is not None:
                mask = mask & Window(*self.window)
        return mask if pack is None else mask & pack.mask


class RowChunking(NamedTuple):
    """How rows are cut into chunks: how many chunks, and of how many equal blocks of rows, one per
    rank of sequence parallelism, each has equally many."""

    chunks: int = 1
    blocks: int = 1


WHOLE = RowChunking()


T = TypeVar("T")


class LayerPlans(OrderedDict[tuple, T]):
    """Plans by what they were made for, the last `PLANS_KEPT` that layers asked for."""

    def of(
        self, key: tuple, make: Callable[[], T] | None, layer: str, shown: Callable[[], str]
    ) -> T:
        """The plan for `key`: made anew by the leader, which says how, and looked up by others.

        layer, shown: the layer and what it was called with, for the `ValueError` where the leader
        made none.
        """
        if make is not None:
            self[key] = make()
        elif key not in self:
            raise ValueError(
                f"{layer} got tensors that the lowest layer of its kind on this rank never saw, "
                f"or not in its last {PLANS_KEPT} calls: {shown()}; sequence length, micro-batch "
                "size and documents must be the same for all layers of a forward"
            )
        self.move_to_end(key)
        if len(self) > PLANS_KEPT:
            self.popitem(last=False)
        return self[key]


@dataclass
class PlanBook:
    """The grid of one context-parallel group and the plans made over it.

    others: the books of groups that hold single micro-batches of the same layers, by their ranks.
    """

    groups: Groups
    startup: str | None = None
    others: dict[tuple[int, ...], PlanBook] = field(default_factory=dict)
    _communicators: str = ""
    _lowest: dict[Hashable, int] = field(default_factory=dict)
    _plans: LayerPlans[Plan] = field(default_factory=lambda: LayerPlans())
    _chosen: dict[tuple, AttentionKeywords] = field(default_factory=dict)
    _packs: Packs = field(default_factory=packs)
    _moves: Moves | None = None

    def join(self, kind: Hashable, layer_number: int) -> bool:
        """Register a layer; True if it is the leader of its kind (a `LayerKind`, or what other
        layers have in its place).

        A rebuilt layer with the leader's number leads too. Thus leadership depends only on the
        order of construction, never on when old models are garbage-collected.
        """
        lowest = min(layer_number, self._lowest.get(kind, layer_number))
        self._lowest[kind] = lowest
        return layer_number == lowest

    def over(self, ranks: tuple[int, ...], make_groups: Callable[[], Groups]) -> PlanBook:
        """The book of a group that holds a micro-batch; a collective of that group, if made now."""
        if ranks not in self.others:
            self.others[ranks] = PlanBook(make_groups())
        return self.others[ranks]

    def plan(
        self,
        kind: LayerKind,
        leads: bool,
        q,
        k,
        v,
        pack: Pack | None = None,
        rows: RowChunking = WHOLE,
    ) -> Plan:
        """The plan for these tensors; a collective if `leads`, a look-up otherwise."""
        key = (kind, pack, rows, *((t.shape, t.dtype, t.device.type) for t in (q, k, v)))
        make = (lambda: self._prepare(kind, q, k, v, pack, rows)) if leads else None
        return self._plans.of(key, make, "this layer", lambda: (
            f"query {tuple(q.shape)} {q.dtype}, key {tuple(k.shape)}, value {tuple(v.shape)}, "
            f"documents {pack and pack.documents}"
        ))  # fmt: skip

    def around(self, kind: LayerKind, q, k, v, pack: Pack | None = None) -> Around | None:
        """The exchanges of rows around attention over q, k, v of the stream; None if it has the
        stream's layout. A collective, the first time."""
        if kind.stream is None or self.groups.size == 1:
            return None
        if self._moves is None:
            self._moves = Moves(self.groups)
        return self._moves.around(kind.stream, kind.attention, pack, (q, k, v))

    def pack(self, total: int, params: Any) -> Pack:
        """The documents of a `PackedSeqParams`; each of its tensors is read from the device once.

        Raises `ValueError` for parameters that do not describe self-attention over one pack.
        """
        lengths, padded = params.cu_seqlens_q, params.cu_seqlens_q_padded
        if lengths is None:
            raise ValueError("packed_seq_params: cu_seqlens_q is None; it says where documents end")
        self._refuse_cross_attention(total, params)
        return self._packs.of(total, lengths, padded)

    def _refuse_cross_attention(self, total: int, params: Any) -> None:
        for name in ("cu_seqlens_kv", "cu_seqlens_kv_padded"):
            keys, queries = getattr(params, name), getattr(params, name.replace("_kv", "_q"))
            if keys is None or keys is queries:
                continue
            if queries is None or self._packs.of(total, keys) != self._packs.of(total, queries):
                raise ValueError(
                    f"packed_seq_params: {name} differs from that of the queries; cross-attention "
                    "is not split, only self-attention is"
                )

    def _prepare(self, kind: LayerKind, q, k, v, pack: Pack | None, rows: RowChunking) -> Plan:
        try:
            mask = kind.mask(pack, q.shape[0] * self.groups.size)
        except ValueError as error:
            agree(error, self.groups.gather)  # ranks whose mask was right raise it too
            raise
        known = kind, *(t.shape for t in (q, k, v))
        keywords = kind.burst.keywords()
        keywords |= self._chosen.get(known, {})
        keywords["mask"], keywords["softmax_scale"] = mask, kind.softmax_scale
        if pack is not None:
            keywords["layout"] = kind.layout(pack, self.groups.size)
        keywords["sequence_chunks"], keywords["row_blocks"] = rows
        rates = None
        if keywords.get("algorithm") == "auto" and kind.burst.cluster is not None:
            rates = cluster_file.read(kind.burst.cluster).run_rates(self.groups.topology.per_node)
        prepared = prepare(
            q,
            k,
            v,
            groups=self.groups,
            needs_grad=(True, True, True),
            max_logits=nothing_seen(q) if kind.max_logits else None,
            rates=rates,
            **keywords,
        )
        plan = cast(Plan, prepared)  # of real groups, so this rank's own
        if plan.choice is not None:
            self._chosen[known] = plan.choice.call
        more = "" if rates is None else f"; rates of {kind.burst.cluster}"
        if kind.burst.mask is not None:
            more += f"; masks of {kind.burst.mask}, called for every layer"
        if kind.stream is not None and self.startup is None:
            more += exchange_line(self.groups, kind.stream, kind.attention, pack, (q, k, v))
        self._log(plan, more)
        return plan

    def _log(self, plan: Plan, more: str) -> None:
        """The start-up line, and what communicators a later plan has added."""
        lines = []
        if self.startup is None:
            self.startup = plan.describe() + more
            lines.append(self.startup)
        elif self.groups.communicators != self._communicators:
            lines.append(self.groups.communicators)
        self._communicators = self.groups.communicators
        if lines and torch.distributed.get_rank() == 0:
            for line in lines:
                logging.getLogger("megatron_burst").info(line)


def nothing_seen(query: torch.Tensor) -> torch.Tensor:
    """Largest logits [h] of `query` [s, b, h, d] before any was computed."""
    dtype = accumulation_dtype(query.dtype)
    return torch.full(query.shape[2:3], float("-inf"), dtype=dtype, device=query.device)


def startup_line() -> str | None:
    """The start-up line of this process's first plan: algorithm, topology, side, layout, kernel,
    bytes per layer. None before the first forward, or when no model uses BurstAttention."""
    for first in _books().values():
        for book in (first, *first.others.values()):
            if book.startup:
                return book.startup
    return None


def splits_attention(group: Any) -> bool:
    """Whether a model of this process splits its attention over this context-parallel group."""
    return any(one is group for one, _ in _books())


def plan_book(group: Any, key: tuple, make_groups: Callable[[], Groups]) -> PlanBook:
    """The book of a context-parallel group and a topology; made, and kept until `uninstall`."""
    # The key holds the group itself, so no later group can have the same identity.
    books = _books()
    if (group, key) not in books:
        books[group, key] = PlanBook(make_groups())
    return books[group, key]


def _books() -> dict[tuple, PlanBook]:
    return patching.notes().setdefault("plan_books", {})
