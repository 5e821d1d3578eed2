"""cuDNN's attention of many sequences, as torch documents it, in plain Python and float64.

Nothing here imports megatron_burst. `StandIn` takes the place of `torch.ops.aten`. Every call is
also bound to the schema of the operator that torch has. What cuDNN leaves unwritten is NaN, and the
lse of a row without columns is a number that must not be used.
"""

import contextlib
import math
from itertools import pairwise

import torch

UNUSED_LSE = 77.0


def bound(name, args, kwargs):
    """Arguments by name, after torch itself checked them against the schema of its operator."""
    operator = getattr(torch.ops.aten, name)
    # torch has it for CUDA only, and checks the arguments before it says so
    with contextlib.suppress(NotImplementedError):
        operator(*args, **kwargs)
    names = [argument.name for argument in operator.default._schema.arguments]
    return dict(zip(names, args, strict=False)) | kwargs


def pieces(given):
    """(rows, columns) of each sequence; everything that torch and cuDNN require is asserted."""
    q, k, v = given["query"], given["key"], given["value"]
    ends = given["cum_seq_q"], given["cum_seq_k"]
    for end in ends:
        assert (end.dtype, end.dim()) == (torch.int32, 1)
        assert end.is_contiguous()
        assert end.data_ptr() % 16 == 0 or end.device.type != "cpu"
    assert ends[0].shape == ends[1].shape
    assert q.dim() == k.dim() == v.dim() == 3
    assert k.shape[:2] == v.shape[:2]
    assert q.shape[1] % k.shape[1] == 0
    assert all(x.stride(-1) == 1 for x in (q, k, v))
    assert min(given["max_q"], given["max_k"]) > 128
    found = []
    for end, tensor, most in zip(ends, (q, k), (given["max_q"], given["max_k"]), strict=True):
        at = end.tolist()
        assert 0 <= at[0] <= at[-1] <= tensor.shape[0]
        assert all(0 <= b - a <= most for a, b in pairwise(at))
        found.append([slice(a, b) for a, b in pairwise(at)])
    return list(zip(*found, strict=True))


def scores(q, k, given):
    """[h, s, t] of one sequence; the causal mask begins at the first row and column."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    found = torch.einsum("shd,thd->hst", q, k) * given["scale"]
    if given["is_causal"]:
        hidden = torch.ones(found.shape[1:], dtype=torch.bool).triu(1)
        found = found.masked_fill(hidden, -math.inf)
    return found


class StandIn:
    """torch.ops.aten with these operators; `calls` has the arguments of each."""

    def __init__(self, computes=True):
        self.computes, self.calls = computes, []

    def __getattr__(self, name):
        return getattr(torch.ops.aten, name)

    def _cudnn_attention_forward(self, *args, **kwargs):
        given = bound("_cudnn_attention_forward", args, kwargs)
        self.calls.append(given)
        q, k, v = given["query"], given["key"], given["value"]
        assert given["compute_log_sumexp"]
        assert (given["attn_bias"], given["dropout_p"]) == (None, 0.0)
        out = q.new_full((*q.shape[:2], v.shape[2]), math.nan)
        lse = q.new_full((q.shape[1], q.shape[0]), math.nan)
        for r, c in pieces(given) if self.computes else ():
            if not k[c].shape[0]:
                out[r], lse[:, r] = 0.0, UNUSED_LSE
                continue
            found = scores(q[r], k[c], given)
            values = v[c].repeat_interleave(q.shape[1] // v.shape[1], dim=1)
            out[r] = torch.einsum("hst,thw->shw", found.softmax(-1), values)
            lse[:, r] = found.logsumexp(-1)
        return out, lse, None, None, 0, 0, None, None, None

    def _cudnn_attention_backward(self, *args, **kwargs):
        given = bound("_cudnn_attention_backward", args, kwargs)
        self.calls.append(given)
        q, k, v = given["query"], given["key"], given["value"]
        dout, out, lse = given["grad_out"], given["out"], given["logsumexp"]
        assert dout.shape == out.shape == (*q.shape[:2], v.shape[2])
        assert dout.is_contiguous()
        assert out.is_contiguous()
        assert lse.shape == (q.shape[1], q.shape[0])
        assert lse.is_contiguous()
        grads = [torch.full_like(x, math.nan) for x in (q, k, v)]
        for r, c in pieces(given) if self.computes else ():
            group = q.shape[1] // k.shape[1]
            keys, values = (x[c].repeat_interleave(group, dim=1) for x in (k, v))
            p = (scores(q[r], k[c], given) - lse[:, r, None]).exp()
            delta = (dout[r] * out[r]).sum(-1).T[:, :, None]
            ds = p * (torch.einsum("shw,thw->hst", dout[r], values) - delta) * given["scale"]
            grads[0][r] = torch.einsum("hst,thd->shd", ds, keys)
            for grad, whole in (
                (grads[1], torch.einsum("hst,shd->thd", ds, q[r])),
                (grads[2], torch.einsum("hst,shw->thw", p, dout[r])),
            ):
                grad[c] = whole.unflatten(1, (-1, group)).sum(2)
        return tuple(grads)
