"""Functions that ranks of the row-chunk tests run: one layer, whole and in row chunks."""

import contextlib
import functools
from collections import Counter
from unittest import mock

import session
import torch
from packed_ranks import params as packed_params

HIDDEN, HEADS, LENGTH, BATCH = 16, 4, 48, 2
LATENT = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_head_dim": 6, "qk_pos_emb_head_dim": 2,
    "v_head_dim": 4, "rope_type": "rope",
}  # fmt: skip


@contextlib.contextmanager
def parallel(layout, tp, cp):
    """Initialize tensor- and context-parallel groups over four ranks; collective."""
    from megatron.core.tensor_parallel import random

    sizes = {"tensor_model_parallel_size": tp, "context_parallel_size": cp}
    with session.parallel(layout, **sizes):
        random.model_parallel_cuda_manual_seed(7, force_reset_rng=True)
        yield


def build(burst_options, latent=False, spec=None, **changes):
    """Return one layer in fp64 with the same weights in every call, and its configuration."""
    import torch.nn.functional as F
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    import megatron_burst as mb
    import megatron_burst.megatron as burst

    kind = MLATransformerConfig if latent else TransformerConfig
    config = kind(**{
        "num_layers": 2, "hidden_size": HIDDEN, "ffn_hidden_size": 24, "num_attention_heads": HEADS,
        "normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": F.silu,
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "calculate_per_token_loss": True,
        "use_cpu_initialization": True, "gradient_accumulation_fusion": False,
        "persist_layer_norm": False, "bias_activation_fusion": False, "bias_dropout_fusion": False,
        "masked_softmax_fusion": False, "apply_rope_fusion": False, "init_method_std": 0.3,
        **(LATENT if latent else {}), **changes,
    })  # fmt: skip
    burst.configure(config, mb.BurstConfig(**burst_options))
    random.model_parallel_cuda_manual_seed(7, force_reset_rng=True)
    torch.manual_seed(7)
    spec = spec or get_gpt_layer_local_spec(
        normalization="RMSNorm", multi_latent_attention=latent,
        qk_layernorm=changes.get("qk_layernorm", False),
    )  # fmt: skip
    layer = build_module(spec, config=config, layer_number=1).double()
    for index, parameter in enumerate(layer.parameters()):  # of norms and sinks too
        draw = torch.Generator().manual_seed(index)
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=draw, dtype=parameter.dtype)
    return layer, config


def run(layer, config, packed=False, recompute=False, times=1, around=None):
    """Return (output, input gradient, {name: gradient}); backwards run in reverse order."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    import megatron_burst.megatron as burst

    params = packed_params() if packed else None
    if packed == "alone":  # every rank has all of it
        params.local_cp_size = 1
    length = 240 if packed else LENGTH
    group = parallel_state.get_context_parallel_group()
    draw = torch.Generator().manual_seed(3)
    shape = times, length, 1 if packed else BATCH, HIDDEN
    x, seed = (torch.randn(*shape, generator=draw, dtype=torch.float64) for _ in range(2))
    if packed != "alone":
        x, seed = (burst.shard_sequence(t, params, dim=1) for t in (x, seed))
    if config.sequence_parallel:
        tp = parallel_state.get_tensor_model_parallel_group()
        x, seed = (t.chunk(tp.size(), 1)[tp.rank()].contiguous() for t in (x, seed))
    angles = None
    if not config.multi_latent_attention:
        rotary = RotaryEmbedding(HIDDEN // HEADS, 1.0, use_cpu_initialization=True, cp_group=group)
        angles = rotary(params.max_seqlen_q if packed else length, packed_seq=packed)

    def forward(hidden):
        return layer(hidden, attention_mask=None, rotary_pos_emb=angles, packed_seq_params=params)[
            0
        ]

    x.requires_grad_()
    if recompute:
        around = functools.partial(tensor_parallel.checkpoint, forward, False)
    outs = [around(t) if recompute else (around or _plain)(forward, t) for t in x]
    for out, dout in reversed(list(zip(outs, seed, strict=True))):
        out.backward(dout)
    out = torch.stack(outs)
    grads = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    largest = layer.self_attention.core_attention.current_max_attn_logits
    if largest is not None:
        grads["largest logits"] = largest
    layer.zero_grad()
    return out.detach(), x.grad, grads


def _plain(forward, hidden):
    return forward(hidden)


def on_the_host(forward, hidden):
    """Move saved tensors to host memory, in which data that were not waited for are NaN."""
    import megatron_burst as mb

    host = mb.HostMemory(limit=1 << 22, strict=True)
    with host.saved(1.0, min_bytes=0):
        out = forward(hidden)
    assert host.bytes_out > hidden.nbytes
    return out


def in_our_checkpoint(forward, hidden):
    import megatron_burst as mb

    return mb.checkpoint(forward, hidden, keep=0.5)


def worst_errors(
    chunks, layout="zigzag", tp=1, cp=2, keep=None, options=None, freeze=(), latent=False,
    change=None, times=1, packed=False, around=None, **changes,
):  # fmt: skip
    """Return the largest error of row chunks against the whole layer, by name.

    Errors are relative to the largest entry. change: function that changes a built layer. times:
    micro-batches whose forwards run before the backward of the last one.
    """
    options = dict(options or {}, layout=layout)
    changes |= {"tensor_model_parallel_size": tp, "context_parallel_size": cp}
    if keep is not None:
        changes |= {"recompute_granularity": "full", "recompute_method": "uniform",
                    "recompute_num_layers": 1}  # fmt: skip
    found = []
    with parallel(layout, tp, cp):
        for count in (1, chunks):
            stored = {"store": keep} if keep else {}
            layer, config = build(
                options | stored | {"sequence_chunks": count}, latent=latent, **changes
            )
            for name, parameter in layer.named_parameters():
                parameter.requires_grad_(not any(part in name for part in freeze))
            if change is not None:
                change(layer)
            with counting() as calls:
                out, dx, grads = run(layer, config, packed, keep is not None, times, around)
            assert set(calls) == ({chunks} if count > 1 else set())
            found.append({"out": out, "dx": dx, **grads})
    whole, cut = found
    assert list(whole) == list(cut), (list(whole), list(cut))
    return {name: _error(whole[name], cut[name]) for name in whole}


def _error(x, y):
    return float((x - y).abs().max() / x.abs().max().clamp(min=1e-3))


@contextlib.contextmanager
def counting():
    """Record the number of row chunks of every call of an attention half."""
    from megatron_burst.plugins.longseq.layer.attention_chunks import RowChunkedHalf

    calls, forward = [], RowChunkedHalf.forward

    def noting(self, *given):
        calls.append(len(self.call.plan.row_chunks))
        return forward(self, *given)

    with mock.patch.object(RowChunkedHalf, "forward", noting):
        yield calls


def with_adapters(layer):
    """Add low-rank parameters beside the projections."""

    class Adapted(torch.nn.Module):
        def __init__(self, inner, index):
            super().__init__()
            self.inner = inner
            draw = torch.Generator().manual_seed(index)
            rows, columns = inner.weight.shape
            self.down, self.up = (
                torch.nn.Parameter(torch.randn(*shape, generator=draw, dtype=torch.float64))
                for shape in ((columns, 2), (2, rows))
            )

        def forward(self, x):
            out, bias = self.inner(x)
            return out + x @ self.down @ self.up, bias

    attention = layer.self_attention
    attention.linear_qkv = Adapted(attention.linear_qkv, 1)
    attention.linear_proj = Adapted(attention.linear_proj, 2)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_("down" in name or "up" in name.split("."))


def in_case(case):
    return worst_errors(**case)


def automatic():
    """Return the numbers of row chunks that "auto" selects for 24 rows in two forwards, and log."""
    from megatron_burst.megatron import patching
    from megatron_burst.plugins.longseq.layer import forward_attention

    lines = []
    few = mock.patch.object(forward_attention, "MIN_CHUNK_ROWS", 4)
    noted = mock.patch.object(patching, "log", lines.append)
    with parallel("zigzag", 1, 2), few, noted, counting() as calls:
        layer, config = build({"sequence_chunks": "auto"}, context_parallel_size=2)
        run(layer, config, times=2)
    return calls, lines


def whole_tensors(chunks, rows=128):
    """Return peak bytes and {operator: count} of long live tensors for each number of chunks.

    The count is of tensors as long as the queries of all rows at the peak of a forward and a
    backward.
    """
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    from benchmarks.memory.live import LiveTensors

    with parallel("zigzag", 1, 2):
        layer, _ = build({"layout": "zigzag", "sequence_chunks": chunks}, num_query_groups=1,
                         context_parallel_size=2)  # fmt: skip
        group = parallel_state.get_context_parallel_group()
        rotary = RotaryEmbedding(HIDDEN // HEADS, 1.0, use_cpu_initialization=True, cp_group=group)
        angles = rotary(2 * rows)
        x = torch.randn(rows, 1, HIDDEN, dtype=torch.float64, requires_grad=True)
        for parameter in layer.parameters():
            parameter.grad = torch.zeros_like(parameter)
        states = [t for p in layer.parameters() for t in (p, p.grad)]
        with LiveTensors(states=states) as live:
            with live.phase("forward"):
                out, _ = layer._forward_attention(x, attention_mask=None, rotary_pos_emb=angles)
            seed = torch.ones_like(out)
            live.begin("backward")
            out.backward(seed)
        return {phase: _long(live.peaks[phase], x.nbytes) for phase in ("forward", "backward")}


def _long(peak, size):
    """Count long tensors except message buffers (uint8), whose number depends on timing."""
    blocks = [b for b in peak.blocks if b.kind == "device" and b.dtype != torch.uint8]
    long = dict(Counter(block.operator for block in blocks if block.bytes >= size))
    return sum(block.bytes for block in blocks), long


def keys_on_the_host(case):
    """Return `worst_errors` of a layer with saved tensors and keys of other ranks on the host.

    Also return for each chunked call (bytes sent, bytes of a plan with host memory, bytes of a plan
    without), and at its end the bytes of keys that were moved and that are left on the host.
    """
    from megatron_burst.plugins.longseq.layer.attention_chunks import RowChunkedHalf
    from megatron_burst.plugins.longseq.offload import tier

    tiers, sent, forward = [], [], RowChunkedHalf.forward
    host = functools.partial(tier.HostMemory, strict=True)

    class Watched(tier.Tier):
        def __init__(self, *given):
            super().__init__(*given)
            tiers.append(self)

    def noting(self, *given):
        counters, plan = self.call.plan.groups.counters, self.call.plan
        before = counters.intra + counters.inter
        result = forward(self, *given)
        kept, ring = (plan.traffic(host=host)[0] for host in (True, False))
        sent.append((counters.intra + counters.inter - before, kept.intra + kept.inter,
                     ring.intra + ring.inter))  # fmt: skip
        return result

    with (
        mock.patch.object(tier, "MIN_BYTES", 1),
        mock.patch.object(tier, "HostMemory", host),
        mock.patch.object(tier, "Tier", Watched),
        mock.patch.object(RowChunkedHalf, "forward", noting),
    ):
        options = {"offload": 0.5} | case.pop("options", {})
        errors = worst_errors(options=options, **case)
    moved = sum(each._key_bytes for each in tiers)
    return errors, sent, moved, sum(each.host.used for each in tiers)
