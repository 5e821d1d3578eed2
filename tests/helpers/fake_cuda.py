"""Whole calls of attention on fake CUDA tensors: ranks in one process, and no GPU.

torch's FakeTensorMode works out shapes, strides, dtypes and devices and computes nothing. Triton's
launches, which it cannot see, are bound to the parameters of their kernel and counted. The autograd
function is called directly, because torch's engine asks for a device. Needs a torch built with
CUDA.
"""

import inspect
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import NamedTuple
from unittest import mock

import torch
from no_sync import Launches, pinning
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_burst.execution.function import Attention, RankCall
from megatron_burst.kernels import native
from megatron_burst.planning import build, pipeline
from megatron_burst.plugins.testing import in_process
from megatron_burst.plugins.testing.local import LocalEndpoint

try:
    from triton.runtime.jit import JITFunction
except ImportError:
    JITFunction = None

HOPPER = (9, 0)
READY = torch.backends.cuda.is_built()
WHY = "fake CUDA tensors need a torch built with CUDA"


@contextmanager
def device(capability=HOPPER, cudnn=91900):
    """A fake GPU: yields its mode. Tensors made in it live on it, plans are made outside."""
    with ExitStack() as stack:
        for name, value in (
            ("cuda.get_device_capability", capability),
            ("backends.cudnn.version", cudnn),
            ("cuda.device_of", nullcontext()),
        ):
            # No `return_value`: a mock would keep the tensors that it is asked about.
            stack.enter_context(mock.patch(f"torch.{name}", lambda *given, value=value: value))
        stack.enter_context(mock.patch.object(native, "FILE", "no csrc"))
        yield FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def running(mode):
    """In here operators meet fake tensors; yields the `Launches` of what runs."""
    with ExitStack() as stack:
        for context in (torch.no_grad(), pinning(), mode):
            stack.enter_context(context)
        launches = stack.enter_context(Launches())
        if JITFunction is not None:
            stack.enter_context(mock.patch.object(JITFunction, "run", _counted(launches)))
            stack.enter_context(mock.patch.object(torch.Tensor, "data_ptr", _offset))
            # Triton's own kernels do not serve fake tensors anywhere else.
            stack.enter_context(mock.patch.object(native, "plain", _yes))
        stack.enter_context(mock.patch.object(LocalEndpoint, "exchange", _watched()))
        yield launches


def _counted(launches):
    def run(self, *args, grid, warmup, **given):
        names = set(inspect.signature(self.fn).parameters)
        options = {name: given.pop(name) for name in list(given) if name not in names}
        assert set(options) <= {"num_warps", "num_stages"}, options
        bound = inspect.signature(self.fn).bind(*args, **given).arguments
        tensors = [getattr(x, "base", x) for x in bound.values()]  # a descriptor's, or itself
        devices = {x.device.type for x in tensors if isinstance(x, torch.Tensor)}
        assert devices == {"cuda"}, f"{self.fn.__name__}: {devices}"
        assert all(0 < size < 2**31 for size in grid[:1]), grid
        assert all(0 < size < 2**16 for size in grid[1:]), grid
        launches.of[f"triton {self.fn.__name__}"] += 1

    return run


def _watched():
    """`LocalEndpoint.exchange`, which also says what NCCL would of these tensors."""
    exchange = LocalEndpoint.exchange

    def watched(self, channel, sends, receives, label):
        for message in (*sends, *receives):
            for x in message.tensors:
                assert x.device.type == "cuda", f"{label}: {x.device}"
                assert x.is_contiguous(), f"{label}: strides {x.stride()} of {tuple(x.shape)}"
        return exchange(self, channel, sends, receives, label)

    return watched


class Context:
    """What torch hands the forward and the backward of an autograd function."""

    def __init__(self, needs):
        self.needs_input_grad, self.saved_tensors = needs, ()

    def save_for_backward(self, *tensors):
        self.saved_tensors = tensors


class Problem(NamedTuple):
    """Shapes of one rank's share."""

    rows: int = 64
    batch: int = 1
    heads: int = 4
    kv_heads: int = 2
    width: int = 64
    value_width: int = 64
    dtype: torch.dtype = torch.bfloat16


class Call:
    """One layer's attention of all ranks: its plan, its tensors, and how it runs."""

    def __init__(self, mode, groups, problem, sink=False, **options):
        s, b, h, k, d, w, dtype = problem
        with mode:
            make = lambda n, width: [  # noqa: E731
                torch.empty(s, b, n, width, dtype=dtype, device="cuda") for _ in range(groups.size)
            ]
            self.q, self.k, self.v, self.dout = make(h, d), make(k, d), make(k, w), make(h, w)
            self.sink = torch.empty(h, device="cuda") if sink else None
        self.groups, self.size = groups, groups.size

        def to_device(own, *args):
            with running(mode):  # numbers of rows are made on the host
                return own(*args)

        with ExitStack() as stack:
            for module in (build, pipeline):
                sent = partial(to_device, module.to_device)
                stack.enter_context(mock.patch.object(module, "to_device", sent))
            self.plan = in_process.prepare(
                self.q, self.k, self.v, groups=groups, needs_grad=(True, True, True),
                sink=self.sink, **options,
            )  # fmt: skip

    def forward(self, kept=None):
        """(contexts, outs) of all ranks; kept: where each rank keeps results, or None."""
        given = self.plan.ranks, self.q, self.k, self.v, kept or [None] * self.size
        return tuple(zip(*self.groups.run(self._forward, *given), strict=True))

    def _forward(self, plan, q, k, v, kept):
        context = Context((False, self.sink is not None, True, True, True))
        tag = plan.groups.calls.forward(plan.identity, None, self.sink is not None)
        call = RankCall("mb.attention", plan.groups, plan.rank_plan, tag, kept)
        return context, Attention.forward(context, call, self.sink, q, k, v)

    def backward(self, contexts):
        """(dsink or None, [dq, dk, dv] of every rank)."""
        found = self.groups.run(Attention.backward, contexts, self.dout)
        sinks = [dsink for _, dsink, *_ in found]
        dsink = None if self.sink is None else torch.stack(sinks).sum(0)
        return dsink, [grads for _, _, *grads in found]

    @property
    def pairs(self):
        """(forward, backward) of all ranks, with something visible."""
        jobs = [plan.rank_plan for plan in self.plan.ranks]
        return [
            sum(len(step.calls) for run in runs for step in run.steps)
            for runs in ([j.forward for j in jobs], [j.backward for j in jobs])
        ]


def _yes(*tensors):
    return True


def _offset(x):
    """What of an address matters here: allocations are aligned."""
    return x.storage_offset() * x.element_size()
