"""Plans and process groups shared by the attention layers of a model.

Owns: when a plan is made, and by which layer. Making a plan is a collective of the
context-parallel group (ranks compare what they are about to do), so it must never be entered by
some ranks only. The rule: layers are grouped by what is known when they are built; in each group
the lowest layer of this rank, the leader, makes the plan on every forward, whatever it has made
before, so that ranks that were called differently all get the same ValueError. The others only
look up what a leader has made. This holds with several micro-batches in flight and with
recomputation, where layers run again in another order: plans are made as if everything needed a
gradient, so one plan serves both passes. Little is lost by it: q, k and v mostly come from one
projection and need gradients together, and where none does there is no backward. Packed batches
have a plan for each pack; the last `PLANS_KEPT` are kept, by order of use, which is the same on all
ranks. What algorithm "auto" chose for the first plan of a kind of layer and its shapes holds for
all later ones, whatever documents they hold: the groups, and whether ranks share heads, were
settled before any shape was known.
Must not know: Megatron configurations.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

import megatron_burst as mb
from megatron_burst.megatron.data.packed import Pack, pack_of
from megatron_burst.megatron.patching import registry
from megatron_burst.options import AttentionKeywords

PLANS_KEPT = 256  # more than packed micro-batches in flight times kinds of layers


@dataclass(frozen=True)
class Signature:
    """What is known of an attention layer when it is built, the same on all ranks."""

    burst: mb.BurstConfig
    causal: bool
    window: tuple[int | None, int | None] | None  # left and right, None for no limit
    softmax_scale: float | None
    kind: tuple[int | None, ...]  # query heads, key/value heads, key width, value width

    def mask(self, pack: Pack | None) -> mb.masks.Mask:
        """What the queries of such a layer see."""
        mask = mb.masks.Causal() if self.causal else mb.masks.Full()
        if self.window is not None:
            mask = mask & mb.masks.Window(*self.window)
        return mask if pack is None else mask & pack.mask


@dataclass
class PlanBook:
    """The grid of one context-parallel group and the plans made over it."""

    groups: mb.Groups
    startup: str | None = None
    _lowest: dict[Signature, int] = field(default_factory=dict)
    _plans: OrderedDict[tuple, mb.Plan] = field(default_factory=OrderedDict)
    _chosen: dict[tuple, AttentionKeywords] = field(default_factory=dict)
    _packs: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)

    def join(self, signature: Signature, layer_number: int) -> bool:
        """Register a layer; True if it leads.

        A rebuilt layer with the leader's number leads too: who leads depends on the order of
        construction alone, never on when old models are garbage-collected.
        """
        lowest = min(layer_number, self._lowest.get(signature, layer_number))
        self._lowest[signature] = lowest
        return layer_number == lowest

    def plan(self, signature: Signature, leads: bool, q, k, v, pack: Pack | None = None) -> mb.Plan:
        """The plan for these tensors; a collective if ``leads``, a look-up otherwise."""
        key = (signature, pack, *((t.shape, t.dtype, t.device.type) for t in (q, k, v)))
        if leads:
            self._plans[key] = self._prepare(signature, q, k, v, pack)
        elif key not in self._plans:
            raise ValueError(
                "this layer got tensors that the lowest layer of its kind on this rank never saw, "
                f"or not in its last {PLANS_KEPT} calls: query {tuple(q.shape)} {q.dtype}, key "
                f"{tuple(k.shape)}, value {tuple(v.shape)}, documents {pack and pack.documents}; "
                "sequence length, micro-batch size and documents must be the same for all layers "
                "of a forward"
            )
        self._plans.move_to_end(key)
        if len(self._plans) > PLANS_KEPT:
            self._plans.popitem(last=False)
        return self._plans[key]

    def pack(self, total: int, params: Any) -> Pack:
        """The documents of a ``PackedSeqParams``; read from the device once per batch.

        Raises ``ValueError`` for what self-attention over one pack cannot mean.
        """
        lengths, padded = params.cu_seqlens_q, params.cu_seqlens_q_padded
        if lengths is None:
            raise ValueError("packed_seq_params: cu_seqlens_q is None; it says where documents end")
        versions = total, lengths._version, None if padded is None else padded._version
        known = self._packs.get(lengths)
        if known is None or known[0] is not padded or known[1] != versions:
            _refuse_cross_attention(params)
            known = padded, versions, pack_of(total, lengths, padded)
            self._packs[lengths] = known
        return known[2]

    def _prepare(self, signature: Signature, q, k, v, pack: Pack | None) -> mb.Plan:
        kind = signature, *(t.shape for t in (q, k, v))
        keywords = signature.burst.keywords()
        keywords |= self._chosen.get(kind, {})
        keywords["mask"], keywords["softmax_scale"] = signature.mask(pack), signature.softmax_scale
        if pack is not None:
            keywords["layout"] = pack.layout(signature.burst.layout, self.groups.size)
        plan = mb.prepare(
            q,
            k,
            v,
            groups=self.groups,
            needs_grad=(True, True, True),
            **keywords,
        )
        if plan.choice is not None:
            self._chosen[kind] = plan.choice.call
        if self.startup is None:
            self.startup = plan.describe()
            if torch.distributed.get_rank() == 0:
                logging.getLogger("megatron_burst").info(self.startup)
        return plan


def _refuse_cross_attention(params: Any) -> None:
    for name in ("cu_seqlens_kv", "cu_seqlens_kv_padded"):
        keys, queries = getattr(params, name), getattr(params, name.replace("_kv", "_q"))
        if keys is None or keys is queries:
            continue
        if queries is None or not torch.equal(keys, queries):
            raise ValueError(
                f"packed_seq_params: {name} differs from that of the queries; cross-attention is "
                "not split, only self-attention is"
            )


def startup_line() -> str | None:
    """The start-up line of this process's first plan: algorithm, topology, side, layout, kernel,
    bytes per layer. None before the first forward, or when no model uses BurstAttention."""
    for book in _books().values():
        if book.startup:
            return book.startup
    return None


def has_plans(group: Any) -> bool:
    """Does a model of this process split its attention over this context-parallel group?"""
    return any(one is group for one, _ in _books())


def plan_book(group: Any, key: tuple, make_groups: Callable[[], mb.Groups]) -> PlanBook:
    """The book of a context-parallel group and a topology; made, and kept until `uninstall`."""
    # The entry holds the group itself, so no later group can be mistaken for it.
    books = _books()
    if (group, key) not in books:
        books[group, key] = PlanBook(make_groups())
    return books[group, key]


def _books() -> dict[tuple, PlanBook]:
    patches = registry.installed("burst")
    return patches.notes.setdefault("plan_books", {}) if patches else {}
