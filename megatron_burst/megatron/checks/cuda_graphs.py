# SPDX-License-Identifier: Apache-2.0
"""Checks of Megatron's CUDA graphs: which graphs may contain attention.

A CUDA graph replays kernels and does not run Python. Attention over ranks may be captured if its
plan is the same for every micro-batch. Every call then launches the same kernels in the same order.
Features with decisions in Python must not be captured: plans of packed documents, the attention
store, and the logits tensor that the optimizer step resets.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...config import BurstConfig
from .problem import Problem, Rule, broken, excluded

# Modules that can be captured without the attention of their layer. Megatron's own graphs ("local")
# cannot capture a dense MLP, or all experts, without the rest of the layer.
WITHOUT_ATTENTION = {
    "local": ("moe_router", "moe_preprocess", "mamba"),
    "transformer_engine": ("mlp", "moe", "moe_router", "moe_preprocess", "mamba"),
}
# Names of one setting: the newest, the deprecated flag of newer versions, and the name until 0.18.
_MODULES = ("cuda_graph_modules", "cuda_graph_scope_deprecated", "cuda_graph_scope")
_DOCUMENTS = "every micro-batch has its own documents and its own plan"
# Settings with which a graph must not contain attention.
_CAPTURED_ATTENTION = (
    Rule(lambda c, b: b.pack != "off",
         "{flag} captures attention, which does not work with --burst-pack {b.pack}: " + _DOCUMENTS,
         remove=("{flag}",)),
    Rule(lambda c, b: b.mask,
         "{flag} captures attention, and --burst-mask {b.mask} is called for every batch",
         remove=("{flag}",)),
    Rule(lambda c, b: b.attention_layout not in (None, b.layout),
         "{flag} captures attention, and --burst-attention-layout {b.attention_layout} exchanges "
         "rows around it: this was not tested in graphs", remove=("{flag}",)),
    *excluded(
        "{flag} captures attention, which does not work with {other}: {why}",
        ("{flag}",),
        sft=_DOCUMENTS,
        reset_attention_mask=_DOCUMENTS,
        dataloader_inter_document_masking=_DOCUMENTS,
        hybrid_context_parallel="groups change with the micro-batch",
        dynamic_context_parallel="groups change with the micro-batch",
        log_max_attention_logit="the optimizer step replaces the tensor that a graph writes to",
        qk_clip="the optimizer step replaces the tensor that a graph writes to",
        experimental_attention_variant="the model has layers that were not tested in graphs",
        is_hybrid_model="the model has layers that were not tested in graphs",
    ),
)  # fmt: skip


def graph_problems(config: Any, burst: BurstConfig, states: bool = False) -> Iterator[Problem]:
    """Yield the problems of the CUDA graphs that a `TransformerConfig` selects.

    Args:
        config: a `TransformerConfig`, or any object with attributes of the same names.
        burst: the options of the run.
        states: whether linear layers pass states from rank to rank. Graphs that capture only Mamba
            layers are left to `splitting.linear_problems`.

    Yields:
        The problems.
    """
    flag, impl = graphs_asked(config)
    if impl == "none":
        return
    if burst.store:
        yield Problem(
            f"--burst-attention-store {burst.store} needs Python in every step, and {flag} "
            "replays CUDA graphs without Python",
            remove=(flag,),
        )
        return
    if not contain_attention(config):
        return
    without_attention, modules = WITHOUT_ATTENTION.get(impl), captured(config)
    if without_attention is None or "full_iteration" in modules:
        yield Problem(
            f"{flag} captures whole iterations, in which Python cuts batches, compares plans "
            "between ranks and reads flags of the loss; --cuda-graph-impl local captures layers",
            remove=(flag,),
        )
    elif states:
        allowed = ", ".join(name for name in without_attention if name != "mamba")
        scope = _MODULES[0] if hasattr(config, _MODULES[0]) else _MODULES[2]
        captured_now = ", ".join(sorted(modules)) or "whole layers"
        yield Problem(
            f"{flag} captures {captured_now} of a model whose linear layers pass states between "
            f"ranks; this was not tested in graphs; {flag} may capture {allowed} "
            f"(--{scope.replace('_', '-')})",
            remove=(flag,),
        )
    else:
        yield from broken(_CAPTURED_ATTENTION, config, burst, flag)


def contain_attention(config: Any) -> bool:
    """Return whether the configuration selects CUDA graphs that contain attention."""
    _, impl = graphs_asked(config)
    modules = captured(config)
    return impl != "none" and not (modules and modules <= {*WITHOUT_ATTENTION.get(impl, ())})


def captured(config: Any) -> set[str]:
    """Return the modules of a layer that graphs capture; an empty set means whole layers."""
    modules: set[str] = set()
    for name in _MODULES:
        setting = getattr(config, name, None) or []
        entries = setting.split(",") if isinstance(setting, str) else setting
        entries = entries if isinstance(entries, (list, tuple, set)) else [entries]
        modules |= {str(getattr(entry, "name", entry)) for entry in entries}
    return modules - {"full"}


def graphs_asked(config: Any) -> tuple[str, str]:
    """Return the flag that selects CUDA graphs, and the name of their implementation."""
    for name, impl in (
        ("enable_cuda_graph", "local"),
        ("external_cuda_graph", "transformer_engine"),
    ):
        if getattr(config, name, None):
            return f"--{name.replace('_', '-')}", impl
    return "--cuda-graph-impl", getattr(config, "cuda_graph_impl", None) or "none"
