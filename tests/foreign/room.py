"""Prepares a process for Megatron-LM's unit tests without a GPU, in one of three modes.

The tests expect CUDA, NCCL and Transformer Engine. `prepare` maps CUDA to the CPU, NCCL to gloo and
Transformer Engine's layer specs to Megatron's local ones, for every mode in the same way. Only
questions of the tests themselves ("is CUDA available", "is Transformer Engine new enough") get a
different answer, so that the tests run instead of being skipped.
"""

import functools
import importlib
import importlib.util
import os
import sys
import types
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

STOCK, INSTALLED, BURST = MODES = ("stock", "installed", "burst")
TIMEOUT = timedelta(seconds=60)
TESTS = "tests.unit_tests"
# Imported before the ranks are forked: all that the tests need, and all that has a constructor to
# wrap in mode `burst`.
MODULES = (
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.models.hybrid.hybrid_model",
    "megatron.core.models.hybrid.hybrid_layer_specs",
    "megatron.core.extensions.transformer_engine_spec_provider",
    "megatron.core.transformer.multi_token_prediction",
    "megatron.core.transformer.multi_latent_attention",
    "megatron.training.training",
    "megatron.training.checkpointing",
    "megatron.training.argument_utils",
)


def prepare(mode):
    """Prepare this process, before any test is imported."""
    from megatron_burst.megatron import patching
    from megatron_burst.plugins.testing import cpu

    cpu.enable()
    for name in MODULES:
        importlib.import_module(name)
    with patching.patch_set("foreign tests") as patches:
        _answer_tests(patches)
        _use_gloo(patches)
        _use_local_layers(patches)
        _change_defaults(patches)
    if mode != STOCK:
        from megatron_burst import megatron as burst

        burst.install()
    if mode == BURST:
        _choose_burst()


def _called_by_a_test():
    name = sys._getframe(2).f_globals.get("__name__", "")
    return name.startswith(("tests.", "conftest"))


def _answer_tests(patches):
    from megatron.core import utils

    available, is_new = torch.cuda.is_available, utils.is_te_min_version
    has_flash = importlib.util.find_spec("flash_attn") is not None
    is_new_flash = utils.is_fa_min_version

    @functools.wraps(available)
    def is_available():
        return _called_by_a_test() or available()

    @functools.wraps(is_new)
    def is_te_min_version(*args, **named):
        return _called_by_a_test() or is_new(*args, **named)

    @functools.wraps(is_new_flash)
    def is_fa_min_version(*args, **named):
        return has_flash and is_new_flash(*args, **named)  # it would import flash_attn

    patches.replace(torch.cuda, "is_available", is_available)
    patches.replace(utils, "is_fa_min_version", is_fa_min_version)
    # Not in modules that have imported it by name: those are Megatron's.
    patches.replace(utils, "is_te_min_version", is_te_min_version)


def _use_gloo(patches):
    init, new_group = dist.init_process_group, dist.new_group

    def init_process_group(backend=None, *args, **named):
        return init("gloo", *args, **named)

    def new_gloo_group(*args, **named):
        if named.get("backend") == "nccl":
            named["backend"] = "gloo"
        return new_group(*args, **named)

    for module in (dist, dist.distributed_c10d):
        patches.replace(module, "init_process_group", init_process_group)
        patches.replace(module, "new_group", new_gloo_group)


def _use_local_layers(patches):
    from megatron.core.extensions import transformer_engine as te
    from megatron.core.extensions import transformer_engine_spec_provider as provider
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.models.hybrid import hybrid_layer_specs as hybrid
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    from megatron_burst.megatron.patching import signature_of
    from megatron_burst.plugins.testing import local_specs

    def locally(local):
        """The local builder, which gets only the arguments that it has."""
        names = signature_of(specs.get_gpt_layer_local_submodules).parameters

        def build(*args, **named):
            with_te = signature_of(specs_with_te).bind(*args, **named).arguments
            given = {**with_te, **with_te.pop("kwargs", {})}
            return local(**{name: value for name, value in given.items() if name in names})

        return build

    specs_with_te = specs.get_gpt_layer_with_transformer_engine_submodules
    for kind in ("submodules", "spec"):
        local = getattr(specs, f"get_gpt_layer_local_{kind}")
        patches.replace_function(
            specs, f"get_gpt_layer_with_transformer_engine_{kind}", locally(local)
        )
    patches.replace_function(provider, "TESpecProvider", local_specs._WithLinear)
    patches.replace(hybrid, "hybrid_stack_spec", local_specs.local_hybrid_stack_spec())
    for name, local in {
        "TENorm": WrappedTorchNorm,
        "TELinear": local_specs.WholeLinear,
        "TEColumnParallelLinear": ColumnParallelLinear,
        "TERowParallelLinear": RowParallelLinear,
    }.items():
        patches.replace(te, name, local)


def _change_defaults(patches):
    """No dropout of attention, whose random numbers depend on the layout, and no CUDA kernels."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    def checked(original, self):
        self.attention_dropout = 0.0
        self.masked_softmax_fusion = False
        self.use_cpu_initialization = True
        original(self)

    patches.wrap(TransformerConfig, "__post_init__", ["self"], checked)


def _choose_burst():
    """Choose BurstAttention for every configuration of more than one context-parallel rank, when
    the first module is built from it: tests set the number after they have made a configuration."""
    from megatron.core.transformer.module import MegatronModule

    for kind in _subclasses(MegatronModule):
        if "__init__" in vars(kind):
            _choosing(kind)


def _subclasses(kind):
    for sub in kind.__subclasses__():
        yield sub
        yield from _subclasses(sub)


def _choosing(kind):
    original = vars(kind)["__init__"]

    @functools.wraps(original)
    def __init__(self, *args, **named):
        for value in (*args, *named.values()):
            _choose(value)
        original(self, *args, **named)

    kind.__init__ = __init__


def _choose(value):
    from megatron.core.transformer.transformer_config import TransformerConfig

    import megatron_burst as mb

    if not isinstance(value, TransformerConfig) or value.context_parallel_size <= 1:
        return
    chosen = getattr(value, "burst", None)
    if chosen is None or chosen.algorithm == "megatron":
        mb.megatron.configure(value, mb.BurstConfig())


def start_again(utils, store, name):
    """Let `Utils.initialize_distributed` of the tests meet the other ranks in `store`, which every
    rank has, under names of its own each time."""
    count = 0

    def initialize_distributed():
        nonlocal count
        if not dist.is_initialized() and utils.rank >= 0:
            count += 1
            utils.store = dist.PrefixStore(f"{name} {count}", store)
            dist.init_process_group(
                "gloo", store=utils.store, rank=utils.rank, world_size=utils.world_size,
                timeout=TIMEOUT,
            )  # fmt: skip
            dist.barrier()
        utils.inited = True

    utils.initialize_distributed = staticmethod(initialize_distributed)


def no_download():
    """Stand in for the module with which the tests' conftest downloads data."""
    name = "tests.test_utils.python_scripts.download_unit_tests_dataset"
    module = types.ModuleType(name)
    module.download_and_extract_asset = lambda assets_dir: None
    sys.modules[name] = module


@contextmanager
def importable_te():
    """Inside, `transformer_engine.pytorch.fp8` can be imported: one test module imports it at its
    head, and needs it for skipped tests only."""
    names = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.fp8")
    if "transformer_engine" in sys.modules:
        yield
        return
    modules = {name: types.ModuleType(name) for name in names}
    modules[names[-1]].check_fp8_support = lambda: (False, "no GPU")
    sys.modules |= modules
    try:
        yield
    finally:
        for name in names:
            sys.modules.pop(name, None)


def environment(rank, world, port):
    """Variables that torchrun would set."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
