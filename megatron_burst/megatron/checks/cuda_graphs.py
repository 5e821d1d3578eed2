# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of Megatron: which captures leave attention out, and are let be.

A graph replays kernels and no Python. Attention over ranks posts transfers, checks plans and, with
a store, decides what runs again: all of that is Python, so no graph may contain it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .problem import Problem

# Modules of a layer that a capture can be limited to, without its attention. Megatron's own graphs
# ("local") of a dense MLP, or of experts as a whole, are those of the whole layer.
APART = {
    "local": ("moe_router", "moe_preprocess", "mamba"),
    "transformer_engine": ("mlp", "moe", "moe_router", "moe_preprocess", "mamba"),
}
# Names of the same setting: newest, as parsed by newer Megatron-LM, and until 0.18.
_MODULES = ("cuda_graph_modules", "cuda_graph_scope_deprecated", "cuda_graph_scope")


def graph_problems(config: Any, store: float | None, states: bool = False) -> Iterator[Problem]:
    """Unless the CUDA graphs that a `TransformerConfig` asks for contain no attention.

    config: as `config_problems` takes it; store: --burst-attention-store; states: whether Mamba
    layers pass states from rank to rank: `linear_problems` refuses graphs of these.
    """
    flag, impl = graphs_asked(config)
    if impl == "none":
        return
    if store:
        yield Problem(
            f"--burst-attention-store {store}: CUDA graphs replay without Python; turn them off",
            remove=(flag,),
        )
        return
    apart, modules = APART.get(impl, ()), captured(config)
    if modules and modules <= {*apart}:
        return
    apart = tuple(name for name in apart if not (states and name == "mamba"))
    what = ", ".join(sorted(modules)) or "whole layers"
    scope = _MODULES[0] if hasattr(config, _MODULES[0]) else _MODULES[2]
    reason = (
        f"{flag} captures CUDA graphs of {what if apart else 'whole iterations'}, in which "
        "attention is, whose transfers between ranks no graph can replay"
    )
    if apart:
        reason += f"; it may capture {', '.join(apart)} (--{scope.replace('_', '-')})"
    yield Problem(reason, remove=(flag,))


def captured(config: Any) -> set[str]:
    """The modules that graphs of layers are limited to; empty for whole layers."""
    modules: set[str] = set()
    for name in _MODULES:
        value = getattr(config, name, None) or []
        items = value.split(",") if isinstance(value, str) else value
        items = items if isinstance(items, (list, tuple, set)) else [items]
        modules |= {str(getattr(item, "name", item)) for item in items}
    return modules - {"full"}


def graphs_asked(config: Any) -> tuple[str, str]:
    """The flag that asks for graphs, and which implementation makes them."""
    for name, impl in (
        ("enable_cuda_graph", "local"),
        ("external_cuda_graph", "transformer_engine"),
    ):
        if getattr(config, name, None):
            return f"--{name.replace('_', '-')}", impl
    return "--cuda-graph-impl", getattr(config, "cuda_graph_impl", None) or "none"
