# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of Megatron: which captures leave attention out, and which may contain it.

A graph replays kernels and no Python. Attention over ranks whose plan is the same for every
micro-batch does all its work in kernels, in one order, and may be captured with its layer. What
Python decides anew in every call may not: plans of packed documents, what a store keeps, logits
that the optimizer step takes away.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...config import BurstConfig
from .problem import Problem, Rule, broken, excluded

# Modules of a layer that a capture can be limited to, without its attention. Megatron's own graphs
# ("local") of a dense MLP, or of experts as a whole, are those of the whole layer.
APART = {
    "local": ("moe_router", "moe_preprocess", "mamba"),
    "transformer_engine": ("mlp", "moe", "moe_router", "moe_preprocess", "mamba"),
}
# Names of the same setting: newest, as parsed by newer Megatron-LM, and until 0.18.
_MODULES = ("cuda_graph_modules", "cuda_graph_scope_deprecated", "cuda_graph_scope")
_DOCUMENTS = "every micro-batch has documents, and a plan, of its own"
# What a graph that contains attention excludes.
_INSIDE = (
    Rule(lambda c, b: b.pack != "off",
         "{flag} captures attention, and with --burst-pack {b.pack} " + _DOCUMENTS,
         remove=("{flag}",)),
    Rule(lambda c, b: b.mask,
         "{flag} captures attention, and --burst-mask {b.mask} is asked for every batch",
         remove=("{flag}",)),
    Rule(lambda c, b: b.attention_layout not in (None, b.layout),
         "{flag} captures attention, and rows that travel around it (--burst-attention-layout "
         "{b.attention_layout}) were never checked in graphs", remove=("{flag}",)),
    *excluded(
        "{flag} captures attention, and with {other} {why}",
        ("{flag}",),
        sft=_DOCUMENTS,
        reset_attention_mask=_DOCUMENTS,
        dataloader_inter_document_masking=_DOCUMENTS,
        hybrid_context_parallel="groups change with the micro-batch",
        dynamic_context_parallel="groups change with the micro-batch",
        log_max_attention_logit="the optimizer step takes away what a graph would write to",
        qk_clip="the optimizer step takes away what a graph would write to",
        experimental_attention_variant="layers are of a kind that was never checked in graphs",
        is_hybrid_model="layers are of kinds that were never checked in graphs",
    ),
)  # fmt: skip


def graph_problems(config: Any, burst: BurstConfig, states: bool = False) -> Iterator[Problem]:
    """Unless the CUDA graphs that a `TransformerConfig` asks for contain only what may be replayed.

    config: as `config_problems` takes it; states: whether linear layers pass states from rank to
    rank: `linear_problems` refuses graphs of Mamba layers alone.
    """
    flag, impl = graphs_asked(config)
    if impl == "none":
        return
    if burst.store:
        yield Problem(
            f"--burst-attention-store {burst.store}: CUDA graphs replay without Python; turn them "
            "off",
            remove=(flag,),
        )
        return
    if not contain_attention(config):
        return
    apart, modules = APART.get(impl), captured(config)
    if apart is None or "full_iteration" in modules:
        yield Problem(
            f"{flag} captures whole iterations, in which Python cuts batches, compares plans "
            "between ranks and reads flags of the loss; --cuda-graph-impl local captures layers",
            remove=(flag,),
        )
    elif states:
        rest = ", ".join(name for name in apart if name != "mamba")
        scope = _MODULES[0] if hasattr(config, _MODULES[0]) else _MODULES[2]
        what = ", ".join(sorted(modules)) or "whole layers"
        yield Problem(
            f"{flag} captures CUDA graphs of {what} of a model whose linear layers pass states "
            f"between ranks, never checked in graphs; it may capture {rest} "
            f"(--{scope.replace('_', '-')})",
            remove=(flag,),
        )
    else:
        yield from broken(_INSIDE, config, burst, flag)


def contain_attention(config: Any) -> bool:
    """Whether the CUDA graphs that settings ask for, if any, contain attention."""
    _, impl = graphs_asked(config)
    modules = captured(config)
    return impl != "none" and not (modules and modules <= {*APART.get(impl, ())})


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
