"""Inductor's code for a GPU that is not here, and its Triton kernels in Triton's interpreter.

Inductor asks torch for the properties of the device; patches answer. It writes a Python file with
Triton kernels and launches. `interpreted` runs this file on CPU tensors: launches go to Triton's
interpreter (TRITON_INTERPRET=1), everything else is as Inductor wrote it.
"""

import ast
import contextlib
import importlib.util
import tempfile
import types
from pathlib import Path
from unittest import mock

import torch
import torch._inductor.config
import triton
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.graph import GraphLowering
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HOPPER = types.SimpleNamespace(
    type="cuda", index=0, name="H100", major=9, minor=0, multi_processor_count=132,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, warp_size=32,
    max_threads_per_block=1024, total_memory=80 << 30, L2_cache_size=50 << 20, gcnArchName="",
    shared_memory_per_block_optin=227 << 10, shared_memory_per_multiprocessor=228 << 10,
)  # fmt: skip


class Written(Exception):
    """Inductor has written its code, which is the argument."""


class Driver:
    def get_current_target(self):
        return GPUTarget("cuda", 10 * HOPPER.major + HOPPER.minor, HOPPER.warp_size)

    def get_current_device(self):
        return 0


def stop(graph, *args, **named):
    code = graph.codegen()[0]
    raise Written(getattr(code, "value", code))


def patches():
    """What makes Inductor compile for `HOPPER`, up to the point where it would load its file."""
    values = {
        "device_count": 1, "current_device": 0, "_lazy_init": None, "is_available": True,
        "get_device_properties": HOPPER, "get_device_capability": (HOPPER.major, HOPPER.minor),
        "get_compute_capability": 10 * HOPPER.major + HOPPER.minor, "is_bf16_supported": True,
    }  # fmt: skip
    for owner in (torch.cuda, CudaInterface, CudaInterface.Worker):
        for name, value in values.items():
            # Tensors without data would look for the device if torch.cuda were available.
            if hasattr(owner, name) and (owner, name) != (torch.cuda, "is_available"):
                yield mock.patch.object(owner, name, return_value=value)
    yield mock.patch.object(GraphLowering, "compile_to_module", stop)
    yield torch._inductor.config.patch(compile_threads=1, joint_graph_constant_folding=False)


def code_for_hopper(compile_it):
    """The Python file that Inductor writes when `compile_it` compiles for cuda:0."""
    triton.runtime.driver.set_active(Driver())
    with contextlib.ExitStack() as stack:
        for patch in patches():
            stack.enter_context(patch)
        try:
            compile_it()
        except Exception as error:
            cause = error
            while cause is not None and not isinstance(cause, Written):
                cause = cause.__cause__ or getattr(cause, "inner_exception", None)
            if cause is None:
                raise
            return cause.args[0]
    raise AssertionError("Inductor compiled nothing")


class Heuristics:
    """The decorators of Inductor's heuristics: `kind` and `options` of the latest kernel."""

    def __getattr__(self, name):
        def decorated(**options):
            self.kind, self.options = name, options
            return lambda function: function

        return lambda *args, **options: decorated(**options)


TANH = """
@triton.jit
def tanh(x):
    return 1 - 2 / (1 + tl.exp(2 * x))
"""


class Launcher:
    """A Triton kernel of Inductor's file, with the interface of its autotuner."""

    def __init__(self, name, code, device_str=None):
        code = code.replace("triton_helpers, triton_heuristics", "triton_helpers")
        code = code.replace("triton_helpers.set_driver_to_gpu()", "")
        if triton.knobs.runtime.interpret:
            code = code.replace("libdevice.tanh(", "tanh(")  # the interpreter has no libdevice
        path = Path(tempfile.mkdtemp()) / f"{name}.py"  # Triton reads the sources of functions
        path.write_text(f"import triton\nimport triton.language as tl\n{TANH}{code}")
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        self.heuristics = module.triton_heuristics = Heuristics()
        spec.loader.exec_module(module)
        self.kernel = getattr(module, name)
        functions = [x for x in ast.parse(code).body if isinstance(x, ast.FunctionDef)]
        (function,) = (x for x in functions if x.name == name)
        arguments = [argument.arg for argument in function.args.args]
        self.names = [x for x in arguments if not x.endswith("BLOCK")]
        self.blocks = dict.fromkeys((x for x in arguments if x.endswith("BLOCK")), 64)

    def run(self, *args, stream=None):
        values = dict(zip(self.names, args, strict=False))
        if len(args) > len(self.names):  # a template: the grid is last
            self.kernel[args[len(self.names) :]](**values)
            return
        grid = [
            triton.cdiv(values[f"{axis}numel"], self.blocks[f"{axis.upper()}BLOCK"])
            for axis in "xyz"
            if f"{axis.upper()}BLOCK" in self.blocks
        ]
        self.kernel[tuple([*grid, 1, 1][:3])](**values, **self.blocks)


class Launchers:
    """Stands in for Inductor's asynchronous compilation."""

    triton = Launcher

    def wait(self, scope):
        pass


def loaded(code):
    """The scope of Inductor's file, with CPU tensors instead of CUDA ones."""
    replaced = {
        "from torch._inductor.async_compile import AsyncCompile": "",
        "_empty_strided_cuda": "_empty_strided_cpu",
        "from torch._C import _cuda_getCurrentRawStream as get_raw_stream": "get_raw_stream = abs",
        "with torch.cuda._DeviceGuard(0):": "if True:",
        "torch.cuda.set_device(0)": "pass",
    }
    for old, new in replaced.items():
        code = code.replace(old, new)
    scope = {"AsyncCompile": Launchers, "__name__": "loaded"}
    exec(compile(code, "inductor", "exec"), scope)
    return scope


def interpreted(code):
    """The function of CPU tensors that Inductor's file computes, as a list of results."""
    scope = loaded(code)
    return lambda *tensors: scope["call"](list(tensors))


def templates(code):
    """(source, options) of each attention kernel of Inductor's file, for `triton.compile`."""
    for launcher in loaded(code).values():
        if isinstance(launcher, Launcher) and launcher.heuristics.kind == "template":
            options = launcher.heuristics.options
            meta = options["triton_meta"]
            (attributes,) = meta["configs"]
            source = ASTSource(launcher.kernel, meta["signature"], {}, attributes)
            yield source, {name: options[name] for name in ("num_warps", "num_stages")}
