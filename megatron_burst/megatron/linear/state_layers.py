# SPDX-License-Identifier: Apache-2.0
"""Common code of linear-attention layers over context-parallel ranks: plans, wrapped methods.

Megatron's layer is built as on one context-parallel rank: it has all its parameters and computes
the rows of this rank. A `StateLayer` adds the grid, the layout of the rows, the documents of a
packed batch, and the plan of the layer's calls. Plans are shared as in `attention.plan_book`: the
leader of each kind makes or compares the plan in every forward, a collective of the
context-parallel group; other layers look the plan up. This module decides which values determine a
plan, and in which layers our forward may replace Megatron's.
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
from ...linear_attention.plan import LinearAttentionOperation, LinearPlan
from ...linear_attention.request import Options
from ..attention.core_attention import check_call, check_pack
from ..attention.groups import book_of
from ..attention.plan_book import PlanBook, RowChunkSizes, Tensors
from ..checks.config import check_layer
from ..data.cut import ONE_RANK, BatchCut, cut_of_run, group_of
from ..data.other_cuts import check_cut, cuts_batches
from ..data.packed import Pack
from ..patching import bound_to, given_to
from ..selection import burst_of


@dataclass(frozen=True)
class LinearKind:
    """The properties of a linear layer that are known when the layer is built.

    They are the same on all ranks. Layers with equal properties share plans.

    Attributes:
        burst: The options of the run.
        form: The form of `mb.linear_attention`.
        sizes: Number of key heads and of value heads of this tensor-parallel rank, widths of keys
            and of values, width of the convolution.
        cut: How the run cuts batches over ranks.
        scale: The factor of queries; None for the default of `mb.linear_attention`.
    """

    burst: BurstConfig
    form: str
    sizes: tuple[int, ...]
    cut: BatchCut
    scale: float | None = None

    def own_mask(self, pack: Pack | None, seq_len: int) -> None:
        """Return None: linear layers are causal."""

    def operation(
        self, book: PlanBook, tensors: Tensors, pack: Pack | None, rows: RowChunkSizes, own: None
    ) -> LinearAttentionOperation:
        """Return the operation for the inputs of `mb.linear_attention`; see `Kind.operation`."""
        groups, burst = book.groups, self.burst
        if pack is None:
            layout = make_layout(self.cut.name, cp_size=groups.size)
        else:
            layout = pack.layout(self.cut, groups.size)
        rates = book.rates(burst) if burst.linear == "auto" else None
        documents: dict[str, Any] = {"cu_seqlens": None} | ({} if pack is None else pack.chained)
        return LinearAttentionOperation(
            groups=groups,
            options=Options.of(layout, algorithm=burst.linear, rates=rates, **documents),
            tensors={name: tensors.get(name) for name in ("q", "k", "v", "decay", "beta")},
            form=self.form,
            kernel="auto",
            scale=self.scale,
        )

    def log(
        self, book: PlanBook, plan: LinearPlan, tensors: Tensors, pack: Pack | None, own: None
    ) -> None:
        """Log the first plan of these layers; see `Kind.log`."""
        if self in book.logged:
            return
        book.logged.add(self)
        rates = book.rates(self.burst) if self.burst.linear == "auto" else None
        book.log(plan.describe() + ("" if rates is None else f"; rates of {self.burst.cluster}"))


class StateCall(TypedDict):
    """The arguments of `mb.linear_attention` and `mb.short_convolution` other than tensors."""

    plan: LinearPlan
    label: int


class StateLayer:
    """The plans, process groups and label of one layer that passes states.

    The first layer on a group creates the grid of the group, which is a collective.

    Args:
        config: a `TransformerConfig` after `configure`.
        pg_collection: Megatron's groups, with all context-parallel ranks.
        layer_number: layer number, from 1.
        form: see `LinearKind`.
        sizes: see `LinearKind`.
        scale: see `LinearKind`.

    Raises:
        ValueError: Settings are not supported.
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
        check_layer(config, burst)
        self.config, self.group = config, pg_collection.cp
        self._cuts = cuts_batches(config, pg_collection)
        self.label = max(1, layer_number or 1)
        self.kind = LinearKind(burst, form, sizes, cut_of_run(burst.layout), scale)
        self.book = book_of(config, pg_collection)
        self.leads = self.book.join(self.kind, self.label)

    def prepare_call(self, inputs: dict[str, Any], packed_seq_params: Any) -> StateCall:
        """Return the plan and label for one forward.

        A collective if the layer is a leader: the first layer of its kind on this rank.

        Args:
            inputs: q, k, v, decay and beta of `mb.linear_attention`; only shapes, dtypes and device
                are read.
            packed_seq_params: Megatron's argument of the layer, or None.

        Raises:
            ValueError: Arguments are not supported; raised on all ranks if this layer is a leader.
        """
        with self.book.shared_errors(self.leads):
            pack = self._pack(len(inputs["q"]), packed_seq_params)
        return StateCall(plan=self.book.plan(self.kind, self.leads, inputs, pack), label=self.label)

    def _pack(self, rows: int, params: Any) -> Pack | None:
        check_call(AttnMaskType.causal, {}, params, self.kind.cut)
        if group_of(params, self.group) is not self.group:
            raise ValueError(
                "packed_seq_params sets a cp_group for this micro-batch (or local_cp_size 1), but "
                "layers of linear attention use the group with which the model was built; omit "
                "cp_group and local_cp_size"
            )
        if params is None:
            return None
        size = self.book.groups.size
        pack = self.book.pack(rows * size, params)
        check_cut(params, pack, self.kind.cut, size, self._cuts)
        check_pack(self.config, pack.layout(self.kind.cut, size), size)
        return pack


def wide(x: torch.Tensor) -> torch.dtype:
    """Return the dtype of step sizes and decays: the dtype of x, but at least fp32."""
    return torch.promote_types(x.dtype, torch.float32)


_STATES = "_burst_states"  # attribute: the layer's `StateLayer`, if it passes states
_ALTERNATIVE = "use --burst-linear megatron or --context-parallel-algo megatron"


class MixerKind(NamedTuple):
    """A class of layers that pass states, and the functions that adapt it.

    Attributes:
        layer_class: The class of the layers.
        methods: The methods of `layer_class` that `forward` replaces.
        states: Makes the `StateLayer` of a layer from (layer, config, process groups).
        forward: Returns the layer's output from (layer, `StateLayer`, hidden states,
            `PackedSeqParams` or None).
        check_shared: Called with (config, tensor-parallel size, context-parallel size) if states
            are not passed. Raises if Megatron's all-to-all cannot divide the heads.
    """

    layer_class: Any
    methods: tuple[str, ...]
    states: Callable[[Any, Any, Any], StateLayer]
    forward: Callable[[Any, StateLayer, Any, Any], Any]
    check_shared: Callable[[Any, int, int], None] | None = None


def states_passed(config: Any, groups: Any) -> bool:
    """Return whether layers with this configuration pass states between ranks of `groups`."""
    burst = burst_of(config)
    split = groups is not None and groups.cp.size() > 1
    return split and burst is not None and OFF not in (burst.algorithm, burst.linear)


def construct(kind: MixerKind, original: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
    """Run the constructor of a layer.

    A layer that passes states is built with a context-parallel group of one rank, so that it has
    all heads.
    """
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
    """Run our forward if the layer passes states, otherwise Megatron's."""
    states = getattr(self, _STATES, None)
    arguments = given_to(original, (self, *args), kwargs)
    if states is None:
        return original(self, *args, **kwargs)
    _refuse_inference(arguments)
    return kind.forward(
        self, states, arguments["hidden_states"], arguments.get("packed_seq_params")
    )


def refuse_states(
    name: str, why: str, original: Callable, self: Any, *args: Any, **kwargs: Any
) -> None:
    """Run the constructor of a layer that cannot pass states, unless states must be passed.

    Args:
        name: the class of the layer.
        why: the reason, which completes the message.
        original: the constructor.
        self: the layer.
        args: positional arguments of the constructor.
        kwargs: keyword arguments of the constructor.

    Raises:
        ValueError: The configuration requires that states are passed.
    """
    arguments = given_to(original, (self, *args), kwargs)
    if states_passed(arguments["config"], arguments.get("pg_collection")):
        raise ValueError(f"{name} cannot pass its state from rank to rank ({why}): {_ALTERNATIVE}")
    original(self, *args, **kwargs)


def _refuse_other(layer: Any, kind: MixerKind) -> None:
    """Raise `ValueError` if the class of a layer overrides a method that our forward replaces."""
    supported, actual = kind.layer_class, type(layer)
    overridden = [
        name
        for name in kind.methods
        if getattr(actual, name, None) is not getattr(supported, name, None)
    ]
    if not isinstance(layer, supported) or overridden:
        raise ValueError(
            f"{actual.__name__}: BurstAttention's forward of {supported.__name__} passes its state "
            f"from rank to rank and would not run {', '.join(overridden) or 'forward'} of "
            f"{actual.__name__}; {_ALTERNATIVE}"
        )


def _refuse_inference(arguments: Mapping[str, Any]) -> None:
    """Raise `ValueError` if the arguments of a forward select inference."""
    for name in ("inference_context", "inference_params"):
        if arguments.get(name) is not None:
            raise ValueError(
                f"{name}: this layer passes its state over context-parallel ranks, which supports "
                "only training; decode with --context-parallel-size 1"
            )
