# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core on a machine without a GPU, with gloo, for tests and debugging.

Megatron-Core uses CUDA devices, streams, events and generators directly. `enable()` maps them to
the CPU for the whole process: device "cuda" means "cpu", streams and events do nothing, and the
CPU's random generator replaces the CUDA generator. Speed and memory differ from a GPU. `enable()`
raises an error if CUDA is available.

Megatron is imported inside the functions, so that the import of this module is fast.

    import megatron_burst.plugins.testing.cpu as cpu
    cpu.enable()                                    # before building a model
    torch.distributed.init_process_group("gloo")

Models require `use_cpu_initialization=True` and the local layer spec. Transformer Engine may be
installed, but it is not used.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import importlib.util
import sys
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.autograd import graph
from torch.overrides import TorchFunctionMode

from ...megatron import patching
from . import delta_net, mamba

_NAME = "cpu"


def enable() -> None:
    """Map Megatron-Core's CUDA calls in this process to the CPU. A second call has no effect.

    Raises:
        RuntimeError: CUDA is available.
    """
    if patching.installed(_NAME) is not None:
        return
    if torch.cuda.is_available():
        raise RuntimeError(
            "megatron_burst.plugins.testing.cpu.enable() maps CUDA to the CPU, and this machine "
            "has CUDA; remove the call, or hide the GPUs with CUDA_VISIBLE_DEVICES= to debug on "
            "the CPU"
        )
    # Before torch.cuda is patched: Megatron-Core imports torch's compiler, which reads torch.cuda.
    importlib.import_module("megatron_burst.megatron.attention.core_attention")
    with patching.patch_set(_NAME) as patches:
        _patch_torch_cuda(patches)
        _enter_everywhere(_CudaMeansCpu(), patches)
        # Megatron decorates small functions with torch.compile, which needs a C++ compiler.
        torch.compiler.set_stance("force_eager")
        patches.on_undo(lambda: torch.compiler.set_stance("default"))
        _patch_megatron(patches)
        delta_net.patch(patches)
        mamba.patch(patches)
        if patching.training_available():
            _patch_training(patches)
        _patch_optimizers(patches)  # last, because it patches only modules that are loaded


def disable() -> None:
    """Undo `enable()`. Has no effect if `enable()` was not called."""
    patching.remove(_NAME)


_REPLACED = frozenset(
    (torch.Tensor.cuda, torch.Tensor.pin_memory, torch.Tensor.type, torch.Tensor.to)
)


class _CudaMeansCpu(TorchFunctionMode):
    """Torch function mode that maps devices to the CPU and replaces CUDA-only tensor methods."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not kwargs and func not in _REPLACED:  # a fast path for most calls
            return func(*args)
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda or func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # The optimizer accepts only names like torch.cuda.FloatTensor.
            return func(args[0]).replace("torch.", "torch.cuda.", 1)
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is torch.Tensor.to:
            args = tuple(_on_cpu(a) if isinstance(a, (str, torch.device)) else a for a in args)
        return func(*args, **kwargs)


def _enter_everywhere(mode: TorchFunctionMode, patches: patching.PatchSet) -> None:
    """Enter `mode` until `patches` are undone, and also during backward.

    torch disables all modes during `torch.autograd.backward`, in which Megatron runs forward passes
    to recompute activations. So the engine's entry point enters the mode again.
    """
    mode.__enter__()
    patches.on_undo(lambda: mode.__exit__(None, None, None))
    run_backward = graph._engine_run_backward

    def run_backward_in_mode(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return run_backward(*args, **kwargs)

    patches.replace_function(graph, "_engine_run_backward", run_backward_in_mode)


def _on_cpu(device: Any) -> Any:
    is_cuda = isinstance(device, (str, torch.device)) and str(device).startswith("cuda")
    return "cpu" if is_cuda else device


class _Idle:
    """Replacement for a CUDA stream or event; its methods do nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, *args: Any) -> None:
        pass

    wait = wait_event = wait_stream = synchronize = record

    def query(self) -> bool:
        return True

    def record_event(self, event: _Idle | None = None) -> _Idle:
        return event or _Idle()


class _NoTransformerEngine:
    """Class without instances. It replaces None in Megatron's `isinstance(x, TELinear)`."""


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _patch_torch_cuda(patches: patching.PatchSet) -> None:
    idle = _Idle()
    get_state, set_state = torch.random.get_rng_state, torch.random.set_rng_state
    stand_ins = {
        "current_device": lambda: "cpu",
        "device_count": lambda: 1,  # without a device Megatron-LM creates no process groups
        "set_device": _nothing,
        "synchronize": _nothing,
        "empty_cache": _nothing,
        "Stream": _Idle,
        "Event": _Idle,
        "current_stream": lambda *a, **k: idle,
        "default_stream": lambda *a, **k: idle,
        "stream": lambda *a, **k: contextlib.nullcontext(),
        "manual_seed": torch.random.default_generator.manual_seed,
        "manual_seed_all": _nothing,
        "get_rng_state": lambda *a, **k: get_state(),
        "set_rng_state": lambda state, *a, **k: set_state(state),
        # Hopper's capability: for older ones Megatron-LM checks CUDA_DEVICE_MAX_CONNECTIONS.
        "get_device_capability": lambda *a, **k: (9, 0),
        "get_device_properties": lambda *a, **k: SimpleNamespace(major=9, minor=0, name="CPU"),
        "get_device_name": lambda *a, **k: "CPU",
        "max_memory_allocated": lambda *a, **k: 0,
        "max_memory_reserved": lambda *a, **k: 0,
        "memory_allocated": lambda *a, **k: 0,
        "memory_reserved": lambda *a, **k: 0,
        "memory_stats": lambda *a, **k: defaultdict(int),  # --log-memory-to-tensorboard
        "mem_get_info": lambda *a, **k: (0, 0),  # verl's log: free and total
        "reset_peak_memory_stats": _nothing,
    }
    for name, value in stand_ins.items():
        # torch's compiler raises an error if two names refer to the same function.
        distinct = functools.partial(value) if value is _nothing else value
        patches.replace(torch.cuda, name, distinct)


def _patch_megatron(patches: patching.PatchSet) -> None:
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils, token_dispatcher  # noqa: F401
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    get_state, set_state = torch.random.get_rng_state, torch.random.set_rng_state
    patches.replace(megatron_random, "_get_cuda_rng_state", lambda *a, **k: get_state())
    patches.replace(megatron_random, "_set_cuda_rng_state", lambda state, *a, **k: set_state(state))

    if not isinstance(multi_latent_attention.TELinear, type):  # 0.16: isinstance(x, TELinear)
        patches.replace(multi_latent_attention, "TELinear", _NoTransformerEngine)

    home = "megatron.core.tensor_parallel.inference_layers"  # main calls isinstance(x, None)
    if importlib.util.find_spec(home) is not None:
        layers, name = importlib.import_module(home), "is_inference_column_parallel_linear"
        if hasattr(layers, name):
            patches.replace_function(layers, name, lambda module: False)

    def counts(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        """Convert token counts per expert to numpy; Megatron converts only CUDA tensors."""
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    patches.replace_function(moe_utils, "maybe_move_tensor_to_cpu", counts)

    if getattr(moe_utils, "te_general_gemm", None) is not None:  # the router's matrix product
        patches.replace(moe_utils, "te_general_gemm", None)

    original = WrappedTorchNorm.__new__

    def norm_with_sequence_parallel(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        """Create Megatron's local norm, which otherwise refuses sequence parallelism."""
        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm = original(cls, plain, *args, **kwargs)
        for parameter in norm.parameters():
            setattr(parameter, "sequence_parallel", config.sequence_parallel)  # noqa: B010
        return norm

    patches.replace(WrappedTorchNorm, "__new__", staticmethod(norm_with_sequence_parallel))


# Modules with names from Transformer Engine or Apex, whose kernels need CUDA.
_OPTIMIZER_MODULES = (
    "megatron.core.optimizer",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.optimizer.optimizer",
    "megatron.core.optimizer.distrib_optimizer",
    "megatron.training.utils",  # up to 0.18
    "megatron.training.utils.common_utils",
)


def _patch_optimizers(patches: patching.PatchSet) -> None:
    """Replace functions of Transformer Engine and Apex in optimizers by Megatron's fallbacks."""
    from megatron.core import optimizer, utils

    if optimizer.USING_PYTORCH_OPTIMIZER:
        return
    fallbacks = {
        "Adam": torch.optim.AdamW,
        "SGD": torch.optim.SGD,
        "USING_PYTORCH_OPTIMIZER": True,
        "HAVE_APEX_OR_TE": False,
        "multi_tensor_applier": utils.local_multi_tensor_applier,
        "multi_tensor_l2norm": utils.local_multi_tensor_l2_norm,
        "l2_norm_impl": utils.local_multi_tensor_l2_norm,
        "multi_tensor_scale_impl": utils.local_multi_tensor_scale,
        "multi_tensor_scale_tensor_impl": None,
    }
    for module in filter(None, map(sys.modules.get, _OPTIMIZER_MODULES)):
        for name in fallbacks.keys() & vars(module).keys():
            patches.replace(module, name, fallbacks[name])


def _patch_training(patches: patching.PatchSet) -> None:
    from megatron.core.datasets import utils

    patch_start(patches, importlib.import_module("megatron.training.initialize"))
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None:
        # A wheel contains compiled helpers, but no makefile.
        patches.replace_function(utils, "compile_helpers", _nothing)


def patch_start(patches: patching.PatchSet, initialize: Any) -> None:
    """Patch the initialization module of Megatron-LM or Megatron-Bridge to run without a GPU."""

    def without_cuda(original: Callable, *args: Any, **named: Any) -> Any:
        return original(*args, **named | {"allow_no_cuda": True})

    patches.wrap(initialize, "initialize_megatron", [], without_cuda)
    # The warm-up draws random inputs whose shapes depend on the context-parallel size. The CPU has
    # only one generator, so the initial weights would depend on that size too.
    patches.replace_function(initialize, "_warmup_jit_function", _nothing)
