"""Transformer Engine's modules on the CPU: built as they are, computed by torch.

`transformer_engine_torch` holds no CPU code. `enable()` gives TE's linear and norm modules forwards
made of torch's own operators, with the communication of tensor parallelism that theirs have, lets
modules be built without CUDA, and takes of TE's attention the form that TE has in Python.
Parameters, names, initialisation, checkpoints and fp8 state stay TE's. Tests only: this replaces
what a GPU would compute, and says nothing about it. In fp8 it computes nothing: a forward there is
an error.
"""

import functools
from unittest import mock

import torch
import torch.nn.functional as F


def enable():
    """For the whole process, after `megatron_burst.plugins.testing.cpu.enable`."""
    import transformer_engine.pytorch as te
    from megatron.core.extensions.transformer_engine import TENorm
    from megatron.core.models.hybrid import hybrid_block
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule as Base

    Base.__init__ = _with_cuda(Base.__init__)
    te.Linear.forward = _linear
    te.LayerNormLinear.forward = _norm_linear
    te.GroupedLinear.forward = _grouped_linear
    te.RMSNorm.forward = te.LayerNorm.forward = _norm
    te.DotProductAttention.forward = _attention
    # For which `cpu.enable` takes torch's, with a parameter under the same name.
    hybrid_block.TENorm = TENorm


def _with_cuda(build):
    """TE asks for CUDA when a module is built, and only then."""

    @functools.wraps(build)
    def __init__(*args, **named):
        with mock.patch.object(torch.cuda, "is_available", return_value=True):
            build(*args, **named)

    return __init__


def _linear(self, x, is_first_microbatch=None, **named):
    return _column_or_row(self, x)


def _norm_linear(self, x, is_first_microbatch=None, **named):
    normal = _normalised(
        x, self.normalization, self.layer_norm_weight, self.layer_norm_bias, self.eps,
        self.zero_centered_gamma,
    )  # fmt: skip
    return _column_or_row(self, normal)


def _norm(self, x, **named):
    kind, bias = type(self).__name__, getattr(self, "bias", None)
    return _normalised(x, kind, self.weight, bias, self.eps, self.zero_centered_gamma)


def _normalised(x, kind, weight, bias, eps, zero_centered):
    if zero_centered:
        weight = weight + 1
    if kind == "RMSNorm":
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def _column_or_row(self, x):
    from megatron.core.tensor_parallel import mappings

    _computes(self)
    parallel, scattered = self.parallel_mode, self.sequence_parallel
    split = self.tp_size > 1 and parallel is not None
    if split and parallel == "column":
        enter = (
            mappings.gather_from_sequence_parallel_region
            if scattered
            else mappings.copy_to_tensor_model_parallel_region
        )
        x = enter(x, group=self.tp_group)
    out = F.linear(x, self.weight)
    if split and parallel == "row":
        leave = (
            mappings.reduce_scatter_to_sequence_parallel_region
            if scattered
            else mappings.reduce_from_tensor_model_parallel_region
        )
        out = leave(out, group=self.tp_group)
    return _with_bias(self, out, self.bias if self.use_bias else None)


def _grouped_linear(self, x, m_splits, is_first_microbatch=None, **named):
    _computes(self)
    rows = [int(n) for n in m_splits]
    parts = [
        F.linear(part, getattr(self, f"weight{i}")) for i, part in enumerate(x.split(rows, dim=0))
    ]
    assert not self.use_bias, "experts with biases: not needed so far"
    return torch.cat(parts)


def _with_bias(self, out, bias):
    if self.return_bias:
        return out, bias
    return out if bias is None else out + bias


def _attention(self, q, k, v, attention_mask=None, attn_mask_type="causal", **named):
    """TE's own arithmetic; what is left out is its choice between kernels."""
    assert attn_mask_type == "causal", attn_mask_type
    sink = self.softmax_offset
    sink = None if sink is None else sink.view(1, -1, 1, 1)
    return self.unfused_attention(
        {}, q, k, v, qkv_layout="sbhd_sbhd_sbhd", attn_mask_type=attn_mask_type,
        window_size=self.window_size, softmax_offset=sink,
    )  # fmt: skip


@functools.lru_cache
def _said(name):
    print(f"a module of Transformer Engine computes with torch: {name}", flush=True)


def _computes(self):
    """Once per class and process, for tests that want to know what a run consisted of."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    assert not FP8GlobalStateManager.is_fp8_enabled(), "the CPU has no fp8 products"
    _said(type(self).__name__)
