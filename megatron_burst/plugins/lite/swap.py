# SPDX-License-Identifier: Apache-2.0
"""Replacement of the attention of a built model of Megatron Lite.

This module decides which layers get BurstAttention and which models are refused. Layers are
identified by the names of Lite's classes, so that Lite is not imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ...comm.groups import Groups
from ...schedule.scans import SCANS
from .layers import DeltaNetForward, LiteCoreAttention
from .micro_batches import LiteKind, MicroBatches

NAME = "burst"
# Options of `mb.attention` that apply: Lite decides layout, mask and scale, and its recomputation
# does not support the attention store.
OPTIONS = ("algorithm", "side", "kernel", "grad_wire_dtype", "head_chunks")
LITE = "lite"  # value of `linear` that does not replace linear layers
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
    """Replace the attention of a built model of Megatron Lite, between training steps.

    All ranks of a context-parallel group must call this function. Parameters, buffers and optimizer
    state do not change. Checkpoints saved with backend "burst" do not contain Transformer Engine's
    `_extra_state` of the replaced modules.

    Args:
        model: the model or a list of its chunks, with or without wrappers (DDP).
        backend: "burst", or "te", which restores the replaced modules.
        groups: the groups that an earlier call returned, or `mb.Groups` over the ranks of the
            model's context-parallel group. None: make groups in which the ranks on one host form a
            node.
        linear: how gated delta nets pass states between ranks: "auto", "ring", "scan", "all_gather"
            or "two_level"; "lite" keeps Lite's gated delta nets.
        options: `algorithm`, `side`, `kernel`, `grad_wire_dtype`, `head_chunks`; same as in
            `mb.attention`.

    Returns:
        The groups, which can be passed to a later call; None for "te".

    Raises:
        ValueError: The backend or an option is unknown, the model has no attention of Lite or has
            Lite's sparse attention, or Lite's own recomputation or offload wraps only the module
            that would be replaced.

    Example:
        >>> from megatron_burst.plugins.lite.swap import set_attention_backend
        >>> (model,) = bundle.chunks  # of Lite's build_model
        >>> groups = set_attention_backend(model, algorithm="burst")
        >>> set_attention_backend(model, "te")
        >>> groups = set_attention_backend(model, groups=groups)
    """
    chunks = model if isinstance(model, (list, tuple)) else [model]
    layers = [layer for chunk in chunks for layer in _layers(chunk)]
    if backend == "te":
        if groups is not None or options:
            raise ValueError(
                "backend 'te' takes neither groups nor options; omit them (got "
                f"groups={groups!r:.100}, options={options})"
            )
        for layer in layers:
            _restore(layer)
            if _sort(layer) == "GQAttention":
                layer.set_attention_backend("te")  # the layer may use a third backend of Lite
        _name(chunks, "te")
        return None
    if backend != NAME:
        raise ValueError(
            f'backend is {backend!r}; it must be "{NAME}" or "te" (use Lite for other backends)'
        )
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        raise ValueError(f"unknown options {unknown}; use {', '.join(OPTIONS)}")
    if linear not in (LITE, "auto", *SCANS):
        choices = ", ".join((LITE, "auto", *SCANS))
        raise ValueError(f"linear is {linear!r}; it must be one of {choices}")
    if not layers:
        raise ValueError(
            f"model: {type(chunks[0]).__name__} contains no attention of Megatron Lite; pass a "
            "model of megatron.lite"
        )
    states = [layer.ps for layer in layers]
    for layer in layers:
        _restore(layer)
    swapped = [layer for layer in layers if linear != LITE or _sort(layer) != _DELTA_NET]
    for layer in swapped:
        _refuse_wrapped(layer)
    ranks = states[0].cp_group
    if groups is None:
        groups = Groups.by_host(ranks, reuse=[ranks])
    elif not isinstance(groups, Groups) or groups.size != states[0].cp_size:
        raise ValueError(
            f"groups: the model has {states[0].cp_size} context-parallel ranks; pass mb.Groups "
            f"over its cp_group, got {groups!r:.100}"
        )
    shared = MicroBatches(groups, options, linear)
    for number, layer in enumerate(swapped):
        _swap(layer, shared, number)
    _name(chunks, NAME)
    return groups


def _layers(model: Any) -> Iterator[Any]:
    """Yield Lite's layers of softmax or linear attention, in the order of construction."""
    for layer in model.modules():
        sort = _sort(layer)
        if sort in _REFUSED and layer.ps.cp_size > 1:
            raise ValueError(
                f"BurstAttention does not support {sort} ({_REFUSED[sort]}) in Megatron Lite; use "
                "Megatron Lite's own attention backend for this model"
            )
        if sort in _WITH_CORE or sort == _DELTA_NET:
            yield layer


def _sort(layer: Any) -> str:
    """Return the name of the module's attention class in Lite; "" for any other module."""
    for cls in type(layer).__mro__:
        is_lite = (
            cls.__name__ in _WITH_CORE or cls.__name__ in _REFUSED or cls.__name__ == _DELTA_NET
        )
        if is_lite and cls.__module__.startswith("megatron.lite."):
            return cls.__name__
    return ""


def _refuse_wrapped(layer: Any) -> None:
    """Raise `ValueError` if Lite's recomputation or offload wraps the module to be replaced.

    Lite wraps a module by replacing the module's `forward`. A replacement of the module would lose
    this wrapper.
    """
    delta = _sort(layer) == _DELTA_NET
    replaced = layer if delta else layer.core_attn
    if replaced is not None and "forward" in vars(replaced):
        name = "linear_attn" if delta else "core_attn"
        raise ValueError(
            f"{name}: Lite's recompute or offload wraps this module and would be lost, because "
            f"BurstAttention replaces the module; build the model without {name} in recompute and "
            "offload, or with recompute full"
        )


def _swap(layer: Any, shared: MicroBatches, number: int) -> None:
    """Replace the attention of a layer.

    Args:
        layer: the layer of Lite; changed.
        shared: the process groups and plans of the model.
        number: layer number, for messages.
    """
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
        layer._use_torch_core = False  # Lite's all-gather for other value widths
    layer.core_attn = LiteCoreAttention(shared, kind, shared.leads(kind), number, before)


def _restore(layer: Any) -> None:
    """Restore the attributes of a layer that `_swap` replaced, if any."""
    if _sort(layer) == _DELTA_NET:
        if isinstance(vars(layer).get("forward"), DeltaNetForward):
            del layer.forward
    elif isinstance(layer.core_attn, LiteCoreAttention):
        for name, value in layer.core_attn.before.items():
            setattr(layer, name, value)


def _name(chunks: Sequence[Any], backend: str) -> None:
    """Set the attribute `attention_backend` of all modules that have it.

    Lite reads the attribute when it prepares batches.
    """
    for chunk in chunks:
        for part in chunk.modules():
            lite = type(part).__module__.startswith("megatron.lite.model.")
            if lite and isinstance(getattr(part, "attention_backend", None), str):
                part.attention_backend = backend
