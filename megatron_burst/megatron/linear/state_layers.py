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
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypedDict

import torch
from megatron.core.transformer.enums import AttnMaskType

from ...autotune import cluster_file
from ...autotune.rates import Rates
from ...comm.consensus import agree
from ...config import OFF, BurstConfig
from ...layout import Layout
from ...layout import make as make_layout
from ...linear_attention.plan import LinearPlan, prepare_linear
from .. import patching
from ..attention.core_attention import check_call, check_pack
from ..attention.groups import book_of, topology_key
from ..attention.plan_book import LayerPlans, PlanBook
from ..checks.config import check_config
from ..data.cut import ONE_RANK, BatchCut, cut_of_run, group_of
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

    def layout(self, pack: Pack | None, cp_size: int) -> Layout:
        """Which positions each rank holds, of a sequence or of a pack."""
        if pack is not None:
            return pack.layout(self.cut, cp_size)
        return make_layout(self.cut.name, cp_size=cp_size)


@dataclass
class LinearBook:
    """The plans of layers that carry states, made over the grid of a `PlanBook`."""

    book: PlanBook
    startup: dict[LinearKind, str] = field(default_factory=dict)  # the line of each kind of layer
    _rates: Rates | None = None  # of the run's cluster file, once it was read
    _plans: LayerPlans[LinearPlan] = field(default_factory=lambda: LayerPlans())

    def plan(
        self, kind: LinearKind, leads: bool, inputs: dict[str, Any], pack: Pack | None
    ) -> LinearPlan:
        """The plan for tensors like `inputs` (q, k, v, decay, beta as `mb.linear_attention` takes
        them); a collective if `leads`, a look-up otherwise."""
        shapes = tuple((x.shape, x.dtype, x.device.type) for x in inputs.values())
        key = kind, pack, shapes
        make = (lambda: self._prepare(kind, inputs, pack)) if leads else None
        return self._plans.of(key, make, "this layer of linear attention", lambda: (
            f"{ {name: tuple(x.shape) for name, x in inputs.items()} }, documents "
            f"{pack and pack.bounds}"
        ))  # fmt: skip

    def _prepare(self, kind: LinearKind, inputs: dict[str, Any], pack: Pack | None) -> LinearPlan:
        groups = self.book.groups
        cluster = kind.burst.cluster if kind.burst.linear == "auto" else None
        if cluster is not None and self._rates is None:
            self._rates = cluster_file.read(cluster).run_rates(groups.topology.per_node)
        plan = prepare_linear(
            **inputs,
            form=kind.form,
            groups=groups,
            layout=kind.layout(pack, groups.size),
            cu_seqlens=None if pack is None else pack.bounds,
            algorithm=kind.burst.linear,
            scale=kind.scale,
            rates=None if cluster is None else self._rates,
        )
        if kind not in self.startup:
            self.startup[kind] = plan.describe() + (
                "" if cluster is None else f"; rates of {cluster}"
            )
            if torch.distributed.get_rank() == 0:
                logging.getLogger("megatron_burst").info(self.startup[kind])
        return plan


def linear_book(group: Any, key: tuple, book: PlanBook) -> LinearBook:
    """The plans over the grid of `book`, which is that of a context-parallel group and a
    topology; kept until `uninstall`."""
    books = patching.notes().setdefault("linear_books", {})
    if (group, key) not in books:
        books[group, key] = LinearBook(book)
    return books[group, key]


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
        self.label = max(1, layer_number or 1)
        self.kind = LinearKind(burst, form, sizes, cut_of_run(burst.layout), scale)
        self.book = book_of(config, pg_collection)
        self.plans = linear_book(pg_collection.cp, topology_key(config), self.book)
        self.leads = self.book.join(self.kind, self.label)

    def call(self, inputs: dict[str, Any], packed_seq_params: Any) -> StateCall:
        """Plan and label of the calls of one forward; a collective if this layer leads.

        inputs: q, k, v, decay and beta as `mb.linear_attention` takes them, of which only shapes,
        dtypes and device count. packed_seq_params: as Megatron gives them to the layer, or None.
        Raises `ValueError`, on all ranks if this layer leads.
        """
        try:
            pack = self._pack(len(inputs["q"]), packed_seq_params)
        except ValueError as error:
            if self.leads:  # ranks whose call was right raise it too
                agree(error, self.book.groups.gather)
            raise
        return StateCall(
            plan=self.plans.plan(self.kind, self.leads, inputs, pack), label=self.label
        )

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
        # Core attention, or the data path before it, has checked who cut the pack.
        check_pack(self.config, pack.layout(self.kind.cut, size), pack.total, size, uncut=False)
        return pack


_STATES = "_burst_states"  # the layer's `StateLayer`, where states are passed
_INSTEAD = "take --burst-linear megatron or --context-parallel-algo megatron"


class Kind(NamedTuple):
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


def construct(kind: Kind, original: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
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


def forward(kind: Kind, original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
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
            f"{name}: only MambaMixer and GatedDeltaNet pass their state from rank to rank; "
            f"{_INSTEAD}"
        )
    original(self, *args, **kwargs)


def _refuse_other(layer: Any, kind: Kind) -> None:
    """Raise `ValueError` unless the layer is of the kind, and has those of its methods whose
    work our forward does."""
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
