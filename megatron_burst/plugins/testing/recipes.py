# SPDX-License-Identifier: Apache-2.0
"""Recipes of Megatron-Bridge on a machine without a GPU, with gloo, for tests and debugging.

The module `cpu` patches Megatron-Core. This module patches Megatron-Bridge, and replaces the
settings of a recipe that need a GPU.

Bridge 0.3 imports Transformer Engine for adapters (PEFT) that are not used here, and Transformer
Engine does not exist for CPUs. An empty module replaces Transformer Engine during this import.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from ...megatron import patching
from ...recipes.diffusion_models import is_diffusion
from ...recipes.layers import is_ours
from . import cpu

_NAME = "recipes on the cpu"
_ENGINE = ("transformer_engine", "transformer_engine.pytorch")
_ADAPTERS = "megatron.bridge.peft.lora"
# These modules try to import Transformer Engine, so they are imported before the empty module.
_TRY_ENGINE = (
    "megatron.core.models.gpt", "megatron.core.transformer.transformer_block",
    "megatron.core.optimizer", "megatron.core.transformer.moe.router",
)  # fmt: skip


def enable() -> None:
    """Map CUDA to the CPU in this process, import Megatron-Bridge and patch its training loop.

    A second call has no effect.

    Raises:
        RuntimeError: CUDA is available.
    """
    if patching.installed(_NAME) is not None:
        return
    import_bridge()
    importlib.import_module("megatron.bridge.training.setup")
    initialize = importlib.import_module("megatron.bridge.training.initialize")
    with patching.patch_set(_NAME) as patches:
        cpu.patch_start(patches, initialize)
        # A wheel of megatron-core contains compiled helpers, but no makefile.
        patches.replace_function(initialize, "compile_helpers", _nothing)


def import_bridge() -> None:
    """Map CUDA to the CPU in this process and import the models of Megatron-Bridge.

    The training loop is not imported, because frameworks such as verl have their own loop.
    """
    cpu.enable()
    for name in _TRY_ENGINE:
        importlib.import_module(name)
    try:
        importlib.import_module(_ADAPTERS)
    except ModuleNotFoundError as error:
        if error.name not in _ENGINE:
            raise
        with _empty_engine():
            importlib.import_module(_ADAPTERS)


def disable() -> None:
    """Undo `enable()`. Has no effect if `enable()` was not called."""
    patching.remove(_NAME)
    cpu.disable()


def adapt(recipe: Any) -> None:
    """Change a recipe of Bridge so that it trains on a CPU: fp32, gloo, no fused kernels.

    Raises:
        ValueError: The recipe has a diffusion model.
    """
    if is_diffusion(recipe.model):
        raise ValueError(
            f"--cpu with {type(recipe.model).__name__}: layers of diffusion models require "
            "Transformer Engine, which requires a GPU; remove --cpu"
        )
    provider = importlib.import_module("megatron.bridge.models.gpt_provider")
    recipe.mixed_precision = None
    recipe.dist.distributed_backend = "gloo"
    recipe.dataset.num_workers = 0
    spec, local = recipe.model.transformer_layer_spec, provider.local_layer_spec
    recipe.model.transformer_layer_spec = (
        functools.partial(spec, base=local) if is_ours(spec) else local
    )
    for name, value in {
        "use_cpu_initialization": True,
        "bf16": False,
        "params_dtype": torch.float32,
        "pipeline_dtype": torch.float32,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "cross_entropy_loss_fusion": False,
    }.items():
        setattr(recipe.model, name, value)
    recipe.optimizer.bf16 = False


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


class _EmptyClasses:
    """Object whose every attribute is a new class without methods."""

    def __getattr__(self, name: str) -> type:
        return type(name, (), {})


@contextmanager
def _empty_engine() -> Iterator[None]:
    """Return a context in which empty modules replace `transformer_engine.pytorch`."""
    package, module = (ModuleType(name) for name in _ENGINE)
    module.Linear = type("Linear", (torch.nn.Module,), {})  # pyright: ignore[reportAttributeAccessIssue]
    module.ops = _EmptyClasses()  # pyright: ignore[reportAttributeAccessIssue]
    package.pytorch = module  # pyright: ignore[reportAttributeAccessIssue]
    sys.modules |= dict(zip(_ENGINE, (package, module), strict=True))
    try:
        yield
    finally:
        for name in _ENGINE:
            del sys.modules[name]
