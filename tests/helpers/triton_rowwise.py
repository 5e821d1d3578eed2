"""A script: the Triton kernels of `rowwise` through Triton's interpreter, against float64.

Prints one JSON line: case -> {tensor: (error, allowed)}. To be run with TRITON_INTERPRET=1, which
Triton reads when it is imported; needs no GPU.
"""

import json
import math

import oracle
import torch
import triton  # noqa: F401  what runs on a CPU runs there because it was imported

from megatron_burst.kernels import native, rowwise
from megatron_burst.kernels.aten import stand_in
from megatron_burst.kernels.online_softmax import merge_, row_delta

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
WIDTHS = (1, 24, 64, 200)
EXACT = {torch.float64: 1e-12, torch.float32: 2e-6}
ROUNDED = {torch.bfloat16: 2**-8, torch.float16: 2**-11}  # a result in that dtype
S, B, H = 5, 2, 3


def randn(*shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def within(rows, fill=math.nan):
    """A copy of `rows` that is every other row of a tensor, whose rest must stay what it is."""
    whole = torch.full((2 * rows.shape[0], *rows.shape[1:]), fill, dtype=rows.dtype)
    whole[::2] = rows
    return whole, whole[::2]


def merged(dtype, width, case):
    """One part into what a row has seen, both of it in another order of strides."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    lse, new = (3 * randn(S, B, H, dtype=wide, seed=i) for i in range(2))
    out = randn(S, B, H, width, dtype=wide, seed=2)
    part = randn(B, H, S, width, dtype=dtype, seed=3).permute(2, 0, 1, 3)
    if case == "blind":
        lse[0] = new[0] = lse[1] = new[2] = -math.inf
        out[:2], part[0], part[2] = 0.0, 0.0, 0.0
    elif case == "far":
        lse, new = lse + 3e4, new.clone()
        lse[0] -= 6e4
    a, b = lse.double(), new.double()
    total = torch.logaddexp(a, b)
    weights = [torch.exp(x - total).nan_to_num(0.0).unsqueeze(-1) for x in (a, b)]
    truth = weights[0] * out.double() + weights[1] * part.double()
    (whole, mine), (stats, found) = within(out), within(lse)
    before = mine._version
    merge_(mine, found, part, new.permute(1, 2, 0).contiguous().permute(2, 0, 1))
    assert mine._version > before
    assert whole[1::2].isnan().all(), "writes between its rows"
    assert stats[1::2].isnan().all(), "writes between its rows"
    assert torch.equal(found == -math.inf, total == -math.inf)
    seen = total > -math.inf
    size = total[seen].abs().max().item()
    return {
        "out": (oracle.worst(mine, truth), EXACT[wide] * 4),
        "lse": (oracle.worst(found[seen], total[seen]), EXACT[wide] * (1 + size) / 4),
    }


def summed(dtype, width):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    dout, out = (randn(B, S, H, width, dtype=dtype, seed=i).transpose(0, 1) for i in range(2))
    truth = (dout.double() * out.double()).sum(-1)
    found = row_delta(dout, out, wide)
    assert (found.dtype, found.shape) == (wide, (S, B, H))
    return {"delta": (oracle.worst(found, truth), EXACT[wide] * width)}


def stood(dtype, width, size):
    """rowsum(dout * made): as near to delta as a result of that dtype can be."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    dout = (size * randn(B, S, H, width, dtype=torch.float64, seed=1)).to(dtype).transpose(0, 1)
    dout[0] = 0.0
    delta = size * randn(S, B, H, dtype=wide, seed=2)
    made = stand_in(dout, delta)
    assert made.dtype == dtype
    assert not made[0].any()
    assert made.isfinite().all()
    got = (dout.double() * made.double()).sum(-1)[1:]
    error = ((got - delta[1:].double()) / delta[1:].abs().double()).max().item()
    return {"delta": (error, max(EXACT[wide] * 4, 2 * ROUNDED.get(dtype, 0)))}


def beyond_half():
    """A delta that n (delta / m / |n|^2) could only reach beyond float16."""
    dout = torch.full((S, B, H, 64), 0.5, dtype=torch.float16)
    dout[..., 0] = 1.0
    delta = torch.full((S, B, H), 60000.0 * 32.5)
    made = stand_in(dout, delta)
    assert made.isfinite().all()
    error = ((dout.double() * made.double()).sum(-1) / delta - 1).abs().max().item()
    return {"delta": (error, 2 * ROUNDED[torch.float16])}


def none(shape):
    """Where there are no rows or no columns, nothing is launched, and it is done."""
    x = torch.zeros(shape)
    assert rowwise.merge_(x, torch.zeros(shape[:3]), x, torch.zeros(shape[:3]))
    return {"delta": (float(rowwise.delta(x, x, torch.float32).numel()), math.prod(shape[:3]))}


def cases():
    for dtype in DTYPES:
        for width in WIDTHS:
            for case in ("plain", "blind", "far"):
                yield f"merge {case} {dtype} {width}", merged(dtype, width, case)
            yield f"delta {dtype} {width}", summed(dtype, width)
            yield f"stand_in {dtype} {width}", stood(dtype, width, 1.0)
    yield "stand_in tiny", stood(torch.float32, 64, 1e-30)
    yield "stand_in far", beyond_half()
    yield "none rows", none((0, 2, 2, 8))
    yield "none width", none((2, 2, 2, 0))


def main():
    native.FILE = "no csrc"
    calls, launch = [], rowwise._launch

    def counted(kernel, *args, **constants):
        calls.append(kernel)
        return launch(kernel, *args, **constants)

    rowwise._launch = counted
    found = dict(cases())
    print(json.dumps({"found": found, "launches": len(calls)}))


if __name__ == "__main__":
    main()
