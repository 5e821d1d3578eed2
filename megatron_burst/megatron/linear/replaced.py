"""Constructor and forward of a Megatron layer whose state goes from rank to rank, wrapped.

Decides that such a layer is built as on one context-parallel rank, and in place of which layers a
forward of ours may run.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from megatron_burst.config import OFF
from megatron_burst.megatron.attention.micro_batch import ONE_RANK
from megatron_burst.megatron.linear.state_layer import StateLayer

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


def constructor(original: Callable, kind: Kind) -> Callable:
    """Wrap the constructor: where states are passed, the layer sees one context-parallel rank."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
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

    return __init__


def forward_of(original: Callable, kind: Kind) -> Callable:
    """Wrap the forward: ours runs in layers that pass states."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        states = getattr(self, _STATES, None)
        given = signature.bind(self, *args, **kwargs).arguments
        if states is None:
            return original(self, *args, **kwargs)
        _refuse_inference(given)
        return kind.forward(self, states, given["hidden_states"], given.get("packed_seq_params"))

    return forward


def refusing(original: Callable, name: str) -> Callable:
    """Wrap the constructor of a layer that cannot pass states."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs).arguments
        if states_passed(bound["config"], bound.get("pg_collection")):
            raise ValueError(
                f"{name}: only MambaMixer and GatedDeltaNet pass their state from rank to rank; "
                f"{_INSTEAD}"
            )
        original(self, *args, **kwargs)

    return __init__


def _refuse_other(layer: Any, kind: Kind) -> None:
    """Raise ``ValueError`` unless the layer is of the kind, and has those of its methods whose
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
    """Raise ``ValueError`` if the arguments of a forward ask for inference."""
    for name in ("inference_context", "inference_params"):
        if given.get(name) is not None:
            raise ValueError(
                f"{name}: this layer passes its state over context-parallel ranks, for training; "
                "decode with --context-parallel-size 1"
            )
