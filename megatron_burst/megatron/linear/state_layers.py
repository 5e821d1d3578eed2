# SPDX-License-Identifier: Apache-2.0
"""What layers of linear attention over context-parallel ranks share: plans, ranks, wrapped methods.

Megatron's layer keeps its parameters whole and computes its own rows, built as on one
context-parallel rank; a `StateLayer` stands beside it: the grid, the layout of the rows, the
documents of a packed batch, and the plan of its calls. Plans are made and looked up by the rule of
`attention.plan_book`: of each kind of layer the lowest of this rank makes the plan, in every
forward, as a collective of the context-parallel group; the others look it up. Decides what a plan
depends on, and in place of which layers a forward of ours may run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict

import torch
from megatron.core.transformer.enums import AttnMaskType

from ...config import OFF, BurstConfig
from ...layout import make as make_layout
from ...linear_attention.plan import LinearPlan, prepare_linear
from ..attention.core_attention import check_call, check_pack
from ..attention.groups import book_of
from ..attention.plan_book import PlanBook, RowChunkSizes, Tensors
from ..checks.config import check_config
from ..data.cut import ONE_RANK, BatchCut, cut_of_run, group_of
from ..data.other_cuts import check_cut, cuts_batches
from ..data.packed import Pack
from ..patching import bound_to, given_to


@dataclass(frozen=True)
class LinearKind:
    """What is known about such a layer when it is built; the same on all ranks.

    form: of `mb.linear_attention`; sizes: heads of keys and of values on this tensor-parallel rank,
    widths of keys and of values, width of the convolution.
    """

    burst: BurstConfig
    form: str
    sizes: tuple[int, ...]
    cut: BatchCut
    scale: float | None = None  # of queries, None for that of `mb.linear_attention`

    def own_mask(self, pack: Pack | None, seq_len: int) -> None:
        """None: such layers are causal."""

    def prepare(
        self, book: PlanBook, tensors: Tensors, pack: Pack | None, rows: RowChunkSizes, own: None
    ) -> LinearPlan:
        """The plan for q, k, v, decay and beta as `mb.linear_attention` takes them."""
        groups, burst = book.groups, self.burst
        if pack is None:
            layout = make_layout(self.cut.name, cp_size=groups.size)
        else:
            layout = pack.layout(self.cut, groups.size)
        rates = book.rates(burst) if burst.linear == "auto" else None
        plan = prepare_linear(
            **tensors,
            form=self.form,
            groups=groups,
            layout=layout,
            **({} if pack is None else pack.chained),
            algorithm=burst.linear,
            scale=self.scale,
            rates=rates,
        )
        if self not in book.logged:
            book.logged.add(self)
            book.log(plan.describe() + ("" if rates is None else f"; rates of {burst.cluster}"))
        return plan


class StateCall(TypedDict):
    """What `mb.linear_attention` and `mb.short_convolution` take besides tensors."""

    plan: LinearPlan
    label: int


class StateLayer:
    """One layer's share in the plans of its context-parallel group.

    config: a `TransformerConfig` after `configure`. pg_collection: Megatron's groups, with all
    context-parallel ranks. form, sizes, scale: as `LinearKind` has them. The first layer over a
    group makes its grid, a collective. Raises `ValueError` for settings that cannot be honoured.
    """

    def __init__(
        self,
        config: Any,
        pg_collection: Any,
        layer_number: int,
        form: str,
        sizes: tuple[int, ...],
        scale: float | None = None,
    ) -> None:
        burst: BurstConfig = config.burst
        check_config(config, burst)
        self.config, self.group = config, pg_collection.cp
        self._cuts = cuts_batches(config, pg_collection)
        self.label = max(1, layer_number or 1)
        self.kind = LinearKind(burst, form, sizes, cut_of_run(burst.layout), scale)
        self.book = book_of(config, pg_collection)
        self.leads = self.book.join(self.kind, self.label)

    def call(self, inputs: dict[str, Any], packed_seq_params: Any) -> StateCall:
        """Plan and label of the calls of one forward; a collective if this layer leads.

        inputs: q, k, v, decay and beta as `mb.linear_attention` takes them, of which only shapes,
        dtypes and device count. packed_seq_params: as Megatron gives them to the layer, or None.
        Raises `ValueError`, on all ranks if this layer leads.
        """
        with self.book.shared_errors(self.leads):
            pack = self._pack(len(inputs["q"]), packed_seq_params)
        return StateCall(plan=self.book.plan(self.kind, self.leads, inputs, pack), label=self.label)

    def _pack(self, rows: int, params: Any) -> Pack | None:
        check_call(AttnMaskType.causal, {}, params, self.kind.cut)
        if group_of(params, self.group) is not self.group:
            raise ValueError(
                "packed_seq_params: cp_group, or local_cp_size 1: layers of linear attention take "
                "the group that the model was built with"
            )
        if params is None:
            return None
        size = self.book.groups.size
        pack = self.book.pack(rows * size, params)
        check_cut(params, pack, self.kind.cut, size, self._cuts)
        check_pack(self.config, pack.layout(self.kind.cut, size), size)
        return pack


def wide(x: torch.Tensor) -> torch.dtype:
    """The dtype of steps and decays of inputs like x: fp32 at least."""
    return torch.promote_types(x.dtype, torch.float32)


_STATES = "_burst_states"  # the layer's `StateLayer`, where states are passed
_INSTEAD = "take --burst-linear megatron or --context-parallel-algo megatron"


class MixerKind(NamedTuple):
    """One kind of layers.

    known: its class. methods: of `known`, whose work `forward` does. states: (layer, config,
    process groups) -> the layer's share in plans. forward: (layer, that share, hidden states,
    parameters of a packed batch) -> what the layer returns. check_shared: (config, tensor-parallel
    size, context-parallel size), raises where heads would be shared that cannot be.
    """

    known: Any
    methods: tuple[str, ...]
    states: Callable[[Any, Any, Any], StateLayer]
    forward: Callable[[Any, StateLayer, Any, Any], Any]
    check_shared: Callable[[Any, int, int], None] | None = None


def states_passed(config: Any, groups: Any) -> bool:
    """Whether layers with this configuration pass states over these process groups."""
    burst = getattr(config, "burst", None)
    split = groups is not None and groups.cp.size() > 1
    return split and burst is not None and OFF not in (burst.algorithm, burst.linear)


def construct(kind: MixerKind, original: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
    """The constructor: where states are passed, the layer sees one context-parallel rank."""
    bound = bound_to(original, (self, *args), kwargs)
    config, groups = bound.arguments["config"], bound.arguments.get("pg_collection")
    if not states_passed(config, groups):
        if kind.check_shared is not None and groups is not None and groups.cp.size() > 1:
            kind.check_shared(config, groups.tp.size(), groups.cp.size())
        return original(*bound.args, **bound.kwargs)
    _refuse_other(self, kind)
    alone: Any = copy.copy(groups)
    alone.cp = ONE_RANK
    bound.arguments["pg_collection"] = alone
    original(*bound.args, **bound.kwargs)
    setattr(self, _STATES, kind.states(self, config, groups))


def forward(kind: MixerKind, original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward: ours runs in layers that pass states."""
    states = getattr(self, _STATES, None)
    given = given_to(original, (self, *args), kwargs)
    if states is None:
        return original(self, *args, **kwargs)
    _refuse_inference(given)
    return kind.forward(self, states, given["hidden_states"], given.get("packed_seq_params"))


def refuse_states(name: str, original: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
    """The constructor of a layer that cannot pass states."""
    given = given_to(original, (self, *args), kwargs)
    if states_passed(given["config"], given.get("pg_collection")):
        raise ValueError(
            f"{name}: only Mamba mixers, gated delta nets and Kimi K3's KDA pass their state from "
            f"rank to rank; {_INSTEAD}"
        )
    original(self, *args, **kwargs)


def _refuse_other(layer: Any, kind: MixerKind) -> None:
    """Raise `ValueError` unless the layer is of the kind, and has those of its methods whose
    work our forward does.
    """
    known, own = kind.known, type(layer)
    other = [n for n in kind.methods if getattr(own, n, None) is not getattr(known, n, None)]
    if not isinstance(layer, known) or other:
        raise ValueError(
            f"{own.__name__}: the state of {known.__name__} goes from rank to rank in a forward of "
            f"ours, in which {', '.join(other) or 'that'} of {own.__name__} would not run; "
            f"{_INSTEAD}"
        )


def _refuse_inference(given: Mapping[str, Any]) -> None:
    """Raise `ValueError` if the arguments of a forward ask for inference."""
    for name in ("inference_context", "inference_params"):
        if given.get(name) is not None:
            raise ValueError(
                f"{name}: this layer passes its state over context-parallel ranks, for training; "
                "decode with --context-parallel-size 1"
            )
