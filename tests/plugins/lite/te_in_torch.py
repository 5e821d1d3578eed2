"""Parts of Transformer Engine that Megatron Lite imports, in torch's operators, for a CPU.

`install()` puts them where Lite looks. There is one tensor-parallel rank. The attention is dense
over whole sequences, so it is the reference and is never split. Fused kernels that Lite does not
require are absent.
"""

import importlib.util
import sys
import types
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F


class Linear(nn.Module):
    def __init__(self, width, out, *, bias=False, tp_size=1, **named):
        super().__init__()
        assert not bias
        assert tp_size == 1
        self.weight = nn.Parameter(torch.zeros(out, width))

    def forward(self, x):
        return F.linear(x, self.weight)


class RMSNorm(nn.Module):
    def __init__(self, width, *, eps, zero_centered_gamma=False):
        super().__init__()
        self.eps, self.shift = eps, float(zero_centered_gamma)
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.weight + self.shift, self.eps)


class LayerNormLinear(Linear):
    def __init__(self, width, out, *, normalization, eps, zero_centered_gamma=False, **named):
        super().__init__(width, out, **named)
        assert normalization == "RMSNorm"
        self.eps, self.shift = eps, float(zero_centered_gamma)
        self.layer_norm_weight = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        weight = self.layer_norm_weight + self.shift
        return super().forward(F.rms_norm(x, x.shape[-1:], weight, self.eps))


class GroupedLinear(nn.Module):
    def __init__(self, count, width, out, **named):
        super().__init__()
        for i in range(count):
            setattr(self, f"weight{i}", nn.Parameter(torch.zeros(out, width)))

    def forward(self, x, rows):
        parts = x.split([int(n) for n in rows])
        return torch.cat([F.linear(p, getattr(self, f"weight{i}")) for i, p in enumerate(parts)])


class DotProductAttention(nn.Module):
    def __init__(
        self, num_attention_heads, kv_channels, cp_group=None, softmax_scale=None, **named
    ):
        super().__init__()
        self.split, self.scale = cp_group is not None, softmax_scale

    def get_extra_state(self):
        return torch.zeros(1)

    def set_extra_state(self, state):
        pass

    def forward(self, q, k, v, cu_seqlens_q=None, **named):
        assert not self.split, "the attention of one rank"
        if cu_seqlens_q is None:
            return dense(q, k, v, self.scale)
        ends = cu_seqlens_q.tolist()
        parts = [
            dense(*(x[a:b].unsqueeze(1) for x in (q, k, v)), self.scale).squeeze(1)
            for a, b in pairwise(ends)
        ]
        return torch.cat(parts)


def dense(q, k, v, scale):
    """Return causal attention of q [s, b, h, d] to k, v [s, b, k, ...], as [s, b, h w]."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("sbhd,tbhd->bhst", q, k) * (scale or q.shape[-1] ** -0.5)
    later = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    weights = scores.masked_fill(later, -torch.inf).softmax(-1)
    return torch.einsum("bhst,tbhw->sbhw", weights, v).flatten(2)


def absent(*args, **named):
    raise AssertionError("a fused kernel of Transformer Engine")


def install():
    """Install the modules for the whole process."""

    def module(name, **content):
        made = types.ModuleType(f"transformer_engine{name}")
        made.__dict__.update(content)
        sys.modules[made.__name__] = made
        return made

    permutation = ("moe_permute", "moe_permute_and_pad_with_probs", "moe_permute_with_probs")
    router = ("fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss",
              "fused_topk_with_score_function")  # fmt: skip
    base = module(".pytorch.module.base")
    parts = {
        "cpp_extensions": module(".pytorch.cpp_extensions", general_gemm=absent),
        "module": module(".pytorch.module", base=base),
        "permutation": module(
            ".pytorch.permutation",
            **dict.fromkeys((*permutation, "moe_unpermute"), absent),
        ),
        "router": module(".pytorch.router", **dict.fromkeys(router, absent)),
    }
    classes = (Linear, RMSNorm, LayerNormLinear, GroupedLinear, DotProductAttention)
    pytorch = module(".pytorch", **parts, **{cls.__name__: cls for cls in classes})
    module("", pytorch=pytorch, __version__="0")
    if importlib.util.find_spec("safetensors") is None:  # of checkpoints, which no test here reads
        files = types.ModuleType("safetensors")
        files.safe_open = absent
        files.torch = types.ModuleType("safetensors.torch")
        files.torch.save_file = files.torch.load_file = files.torch.safe_open = absent
        sys.modules |= {"safetensors": files, "safetensors.torch": files.torch}
