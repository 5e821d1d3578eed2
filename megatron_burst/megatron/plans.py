"""Plans and process groups shared by the attention layers of a model.

Owns: when a plan is made, and by which layer. Making a plan is a collective of the
context-parallel group (ranks compare what they are about to do), so it must never be entered by
some ranks only. The rule: layers are grouped by what is known when they are built; in each group
the lowest layer of this rank, the leader, makes the plan on every forward, whatever it has made
before, so that ranks that were called differently all get the same ValueError. The others only
look up what a leader has made. This holds with several micro-batches in flight and with
recomputation, where layers run again in another order: plans are made as if everything needed a
gradient, so one plan serves both passes.
Must not know: Megatron configurations.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import megatron_burst as mb
from megatron_burst.megatron import registry


@dataclass(frozen=True)
class Signature:
    """What is known of an attention layer when it is built, the same on all ranks."""

    burst: mb.BurstConfig
    causal: bool
    softmax_scale: float | None
    kind: tuple[int | None, ...]  # query heads, key/value heads, key width, value width


@dataclass
class PlanBook:
    """The grid of one context-parallel group and the plans made over it."""

    groups: mb.Groups
    startup: str | None = None
    _lowest: dict[Signature, int] = field(default_factory=dict)
    _plans: dict[tuple, Any] = field(default_factory=dict)

    def join(self, signature: Signature, layer_number: int) -> bool:
        """Register a layer; True if it leads.

        A rebuilt layer with the leader's number leads too: who leads depends on the order of
        construction alone, never on when old models are garbage-collected.
        """
        lowest = min(layer_number, self._lowest.get(signature, layer_number))
        self._lowest[signature] = lowest
        return layer_number == lowest

    def plan(self, signature: Signature, leads: bool, q, k, v) -> Any:
        """The plan for these tensors; a collective if ``leads``, a look-up otherwise."""
        key = (signature, *((t.shape, t.dtype, t.device.type) for t in (q, k, v)))
        if leads:
            self._plans[key] = self._prepare(signature, q, k, v)
        elif key not in self._plans:
            raise ValueError(
                "this layer got tensors that the lowest layer of its kind on this rank never saw: "
                f"query {tuple(q.shape)} {q.dtype}, key {tuple(k.shape)}, value {tuple(v.shape)}; "
                "sequence length and micro-batch size must be the same for all layers of a forward"
            )
        return self._plans[key]

    def _prepare(self, signature: Signature, q, k, v) -> Any:
        burst = signature.burst
        plan = mb.prepare(
            q,
            k,
            v,
            groups=self.groups,
            layout=burst.layout,
            mask=mb.masks.Causal() if signature.causal else mb.masks.Full(),
            algorithm=burst.algorithm,
            side=burst.side,
            kernel=burst.kernel,
            softmax_scale=signature.softmax_scale,
            needs_grad=(True, True, True),
        )
        if self.startup is None:
            self.startup = plan.describe()
            if torch.distributed.get_rank() == 0:
                logging.getLogger("megatron_burst").info(self.startup)
        return plan


def startup_line() -> str | None:
    """The start-up line of this process's first plan: algorithm, topology, side, layout, kernel,
    bytes per layer. None before the first forward, or when no model uses BurstAttention."""
    for book in _books().values():
        if book.startup:
            return book.startup
    return None


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
