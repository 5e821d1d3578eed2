"""Linear attention on a device by the kernels of a package, beside the recurrence in float64."""

import oracle
import pytest
import recurrences
import torch
from problems import BOUND, on

import megatron_burst as mb
from megatron_burst.linear_attention import forms
from megatron_burst.linear_attention.kernels import registry
from megatron_burst.linear_attention.kernels.base import LinearInputs
from megatron_burst.plugins.testing import in_process

ROWS = {"cuda": 512, "cpu": 32}
WIDTHS = {"cuda": (64, 64), "cpu": (8, 8)}
CASES = [
    on(device, name, form) for device, name in (("cuda", "fla"), ("cpu", "torch"))
    for form in recurrences.SHAPES
]  # fmt: skip


@pytest.mark.parametrize(("device", "name", "form"), CASES)
def test_errs_no_more_than_the_recurrence_in_bf16(device, name, form):
    """Two ranks in one process, a document that ends within the first; out and all gradients."""
    d, w = WIDTHS[device]
    given = recurrences.case(form, ROWS[device], b=1, g=2, h=2, d=d, w=w, dtype=torch.bfloat16)
    kept = torch.float32  # of decays, which packages want so
    given = given._replace(decay=None if given.decay is None else given.decay.to(kept))
    tensors = (None if x is None else x.to(device) for x in given)
    refusal = registry.KERNELS[name]().refusal(forms.FORMS[form], LinearInputs(*tensors, d**-0.5))
    if refusal:
        pytest.skip(refusal)
    dout = torch.randn(given.v.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    cut = ROWS[device] // 3
    double = (None if x is None else x.double() for x in given)
    exact = recurrences.leaves(recurrences.Case(*double))
    outs = []
    for piece in (slice(None, cut), slice(cut, None)):
        part = recurrences.Case(*(None if x is None else x[piece] for x in exact))
        zero = torch.zeros(1, 2, d, w, dtype=torch.float64)
        outs.append(recurrences.tokens(part, zero, d**-0.5)[0])
    right = [torch.cat(outs)]
    right += torch.autograd.grad(right[0], [x for x in exact if x is not None], dout.double())
    mine, theirs = (ours(given, dout, device, who, form, cut) for who in (name, "reference"))
    for part, other, truth in zip(mine, theirs, right, strict=True):
        error = oracle.worst(part.cpu(), truth)
        assert error <= BOUND * oracle.worst(other.cpu(), truth) + 1e-6


def ours(given, dout, device, kernel, form, cut):
    """out and the gradients of all inputs."""
    layout, groups = mb.layout.make("contiguous", cp_size=2), in_process.groups(intra=2)
    shards = [
        None if x is None else [mb.shard(x, layout, r).to(device).requires_grad_() for r in (0, 1)]
        for x in given
    ]
    q, k, v, decay, beta = shards
    outs = in_process.linear_attention(
        q, k, v, decay=decay, beta=beta, form=form, cu_seqlens=[0, cut, len(dout)],
        layout="contiguous", kernel=kernel, groups=groups,
    )  # fmt: skip
    torch.autograd.backward(outs, [mb.shard(dout, layout, r).to(device) for r in (0, 1)])
    found = [[x.detach() for x in outs]]
    found += [[x.grad for x in both] for both in shards if both is not None]
    return [mb.unshard(x, layout) for x in found]
