# SPDX-License-Identifier: Apache-2.0
"""The swap: which layers of a built model of Megatron Lite get our attention, and what is refused.

Layers are recognized by the names of Lite's classes, so that nothing of it is imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ...comm.groups import Groups
from ...schedule.scans import SCANS
from .layers import DeltaNetForward, LiteCoreAttention
from .micro_batches import LiteKind, MicroBatches

NAME = "burst"
# The choices of `mb.attention` that are left: Lite decides layout, mask and scale, and its
# recompute knows no attention store.
OPTIONS = ("algorithm", "side", "kernel", "grad_wire_dtype", "head_chunks")
LITE = "lite"  # how linear layers pass what crosses ranks where they are left alone
_WITH_CORE = ("GQAttention", "MultiLatentAttention")
_DELTA_NET = "GatedDeltaNet"
_REFUSED = {
    "DynamicSparseAttention": "sparse attention over keys that an indexer selects",
    "CompressedSparseAttention": "sparse attention over compressed keys, on contiguous shards",
}


def set_attention_backend(
    model: Any,
    backend: str = NAME,
    *,
    groups: Groups | None = None,
    linear: str = "auto",
    **options: Any,
) -> Groups | None:
    """Swap the attention of a built model of Megatron Lite, between training steps.

    model: the model or a list of its chunks, in wrappers (DDP) or not. backend: "burst", or "te",
    which puts back what was replaced. groups: those of an earlier call, or `mb.Groups` over the
    ranks of the model's context-parallel group; None makes them by host. linear: how gated
    delta nets pass states, one of "auto", "ring", "scan", "all_gather", "two_level", or "lite",
    which leaves them alone. options: `algorithm`, `side`, `kernel`, `grad_wire_dtype`,
    `head_chunks`, as `mb.attention` takes them. Returns the groups, for another call; None for
    "te".

    A collective of each context-parallel group. No parameter, buffer or state of an optimizer
    changes; Transformer Engine's `_extra_state` of the replaced modules is not in checkpoints that
    are made meanwhile. Raises ValueError for another backend or option, for a model without
    attention of Lite, for its sparse attention, and where Lite's own recompute or offload wraps
    only the module that would be replaced.
    """
    chunks = model if isinstance(model, (list, tuple)) else [model]
    found = [layer for chunk in chunks for layer in _layers(chunk)]
    if backend == "te":
        if groups is not None or options:
            raise ValueError(f"backend te takes no groups and no options, got {groups}, {options}")
        for layer in found:
            _restore(layer)
            if _sort(layer) == "GQAttention":
                layer.set_attention_backend("te")  # from whatever it has
        _name(chunks, "te")
        return None
    if backend != NAME:
        raise ValueError(f'backend must be "{NAME}" or "te", got {backend!r}; Lite sets others')
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        raise ValueError(f"options: Megatron Lite takes {', '.join(OPTIONS)}, got {unknown}")
    if linear not in (LITE, "auto", *SCANS):
        choices = ", ".join((LITE, "auto", *SCANS))
        raise ValueError(f"linear must be one of {choices}, got {linear!r}")
    if not found:
        raise ValueError(
            "model: found no attention of Megatron Lite in it; hand in a model of megatron.lite, "
            f"got {type(chunks[0]).__name__}"
        )
    states = [layer.ps for layer in found]
    for layer in found:
        _restore(layer)
    swapped = [one for one in found if linear != LITE or _sort(one) != _DELTA_NET]
    for layer in swapped:
        _refuse_wrapped(layer)
    ranks = states[0].cp_group
    if groups is None:
        groups = Groups.by_host(ranks, reuse=[ranks])
    elif not isinstance(groups, Groups) or groups.size != states[0].cp_size:
        raise ValueError(
            f"groups: the model has {states[0].cp_size} context-parallel ranks; give mb.Groups "
            f"over its cp_group, got {groups!r:.100}"
        )
    shared = MicroBatches(groups, options, linear)
    for number, layer in enumerate(swapped):
        _swap(layer, shared, number)
    _name(chunks, NAME)
    return groups


def _layers(model: Any) -> Iterator[Any]:
    """The layers of Lite that attend to other tokens, in the order of construction."""
    for layer in model.modules():
        sort = _sort(layer)
        if sort in _REFUSED and layer.ps.cp_size > 1:
            raise ValueError(
                f"{sort}: {_REFUSED[sort]}, is not served in Megatron Lite; keep its own backend"
            )
        if sort in _WITH_CORE or sort == _DELTA_NET:
            yield layer


def _sort(layer: Any) -> str:
    """The name of the class of Lite that a module is of; empty for others."""
    for cls in type(layer).__mro__:
        known = cls.__name__ in _WITH_CORE or cls.__name__ in _REFUSED or cls.__name__ == _DELTA_NET
        if known and cls.__module__.startswith("megatron.lite."):
            return cls.__name__
    return ""


def _refuse_wrapped(layer: Any) -> None:
    """Recompute and offload of one module, in Lite, replace its `forward`, and would go with it."""
    delta = _sort(layer) == _DELTA_NET
    replaced = layer if delta else layer.core_attn
    if replaced is not None and "forward" in vars(replaced):
        name = "linear_attn" if delta else "core_attn"
        raise ValueError(
            f"{name}: Lite's recompute or offload wraps this module, and would be lost with it; "
            f"build the model without {name} in recompute and offload, or with recompute full"
        )


def _swap(layer: Any, shared: MicroBatches, number: int) -> None:
    """Give a layer our attention."""
    if _sort(layer) == _DELTA_NET:
        sizes = (layer.num_k_heads_local, layer.num_v_heads_local, layer.dk, layer.dv)
        kind = LiteKind(_DELTA_NET, sizes)
        layer.forward = DeltaNetForward(layer, shared, kind, shared.leads(kind), number)
        return
    if _sort(layer) == "GQAttention":
        sizes = (layer.num_heads_local, layer.num_kv_heads_local, layer.head_dim)
        kind = LiteKind("GQAttention", sizes)
        before = {"core_attn": layer.core_attn, "attention_backend": layer.attention_backend}
        layer.attention_backend = NAME
    else:
        sizes = (layer.num_heads_local, layer.q_head_dim, layer.v_head_dim)
        kind = LiteKind("MultiLatentAttention", sizes, layer._softmax_scale)
        before = {"core_attn": layer.core_attn, "_use_torch_core": layer._use_torch_core}
        layer._use_torch_core = False  # Lite's gather of all ranks, where value widths differ
    layer.core_attn = LiteCoreAttention(shared, kind, shared.leads(kind), number, before)


def _restore(layer: Any) -> None:
    """Give back what `_swap` has replaced, if it has."""
    if _sort(layer) == _DELTA_NET:
        if isinstance(vars(layer).get("forward"), DeltaNetForward):
            del layer.forward
    elif isinstance(layer.core_attn, LiteCoreAttention):
        for name, value in layer.core_attn.before.items():
            setattr(layer, name, value)


def _name(chunks: Sequence[Any], backend: str) -> None:
    """Tell models that have a name for their backend: the protocol of a batch asks for it."""
    for chunk in chunks:
        for part in chunk.modules():
            lite = type(part).__module__.startswith("megatron.lite.model.")
            if lite and isinstance(getattr(part, "attention_backend", None), str):
                part.attention_backend = backend
