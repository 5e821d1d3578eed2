"""The same call gives the same bits, as docs/kernels.md promises, on the CPU.

With torch.use_deterministic_algorithms torch fills new memory with NaN, so reading uninitialized
memory is detected too.
"""

import pytest
import torch

import megatron_burst as mb
from megatron_burst.kernels.aten import AtenKernel
from megatron_burst.kernels.operators_cuda import CudaCudnn
from megatron_burst.plugins.testing import in_process

MODES = [False, False, True]  # of torch.use_deterministic_algorithms, call by call


@pytest.fixture
def mode():
    """Set torch's mode, and switch it off afterwards."""
    yield torch.use_deterministic_algorithms
    torch.use_deterministic_algorithms(False)


def tensors(*shapes, dtype=torch.bfloat16):
    make = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=make).to(dtype) for shape in shapes]


def attend(kernel, algorithm, dtype, **more):
    """Return out, dq, dk, dv of four ranks with new groups, plan and buffers."""
    sharing = {"ulysses": 4, "hybrid": 2}.get(algorithm, 1)
    groups = in_process.groups(inter=2, intra=2, ulysses=sharing)
    shapes = [(64, 2, heads, 16) for heads in (4, 2, 2, 4)]
    *qkv, douts = (list(x.chunk(4)) for x in tensors(*shapes, dtype=dtype))
    leaves = [x.requires_grad_() for xs in qkv for x in xs]
    outs = in_process.attention(
        *qkv, groups=groups, mask=mb.masks.Window(40, 0), kernel=kernel, algorithm=algorithm, **more
    )
    return [*outs, *torch.autograd.grad(outs, leaves, douts)]


@pytest.mark.parametrize("side", ["kv", "query"])
@pytest.mark.parametrize(
    "algorithm", ["ring", "double_ring", "burst", "all_gather", "ulysses", "hybrid"]
)
@pytest.mark.parametrize(
    ("kernel", "dtype"), [("aten", torch.bfloat16), ("reference", torch.float32)]
)
def test_attention_gives_the_same_bits_every_time(kernel, dtype, algorithm, side, mode):
    first, *others = (
        (mode(on), attend(kernel, algorithm, dtype, side=side, head_chunks=1))[1] for on in MODES
    )
    for other in others:
        assert all(torch.equal(x, y) for x, y in zip(first, other, strict=True))


@pytest.mark.parametrize("how", ["single_pass", "recompute"])
def test_the_lm_head_gives_the_same_bits_every_time(how, mode):
    def run(on):
        mode(on)
        hidden, weight = (x.requires_grad_() for x in tensors((48, 16), (96, 16)))
        labels = torch.arange(48) * 7 % 96
        loss = mb.linear_cross_entropy(hidden, weight, labels, mode=how)
        return [loss, *torch.autograd.grad(loss.sum(), (hidden, weight))]

    first, *others = map(run, MODES)
    for other in others:
        assert all(torch.equal(x, y) for x, y in zip(first, other, strict=True))


def test_a_plan_made_before_the_mode_was_set_is_refused(mode):
    """Its kernel was chosen without the requirement."""
    x = torch.randn(4, 1, 2, 8, requires_grad=True)
    plan = mb.prepare(x, x, x, groups=mb.Groups.single())
    mode(True)
    mb.attention(x, x, x, plan=plan)
    unordered = plan.with_kernel(AtenKernel("aten_cudnn", CudaCudnn()))
    with pytest.raises(ValueError, match=r"^plan: kernel aten_cudnn is not deterministic.*prepare"):
        mb.attention(x, x, x, plan=unordered)
