"""Kimi K3 of Megatron-Bridge on one rank or several: its real layers, of Transformer Engine's
modules, tiny and random.

    run as a script by each rank: kimi.py FUNCTION JSON    # as on_ranks.py

What stands for flash-linear-attention, which needs a GPU, is the recurrence written out: it runs on
one rank only. Of Bridge only the files of the layers are imported, not the package around them.
"""

import dataclasses
import importlib
import itertools
import sys
import types
from pathlib import Path

import answer
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import MLATransformerConfig

LENGTH, VOCABULARY = 64, 64
DOCUMENTS = (0, 5, 24, 31, LENGTH)
UNTUNED = "chunk_kda_bwd_kernel_wy_dqkg_fused"  # imported, not used
HOME = "megatron.bridge.models.kimi"


class ShortConvolution(torch.nn.Conv1d):
    """Causal, depthwise, of [b, s, channels]."""

    def __init__(self, hidden_size, kernel_size, activation, device=None, dtype=None):
        assert activation == "silu"
        super().__init__(
            hidden_size, hidden_size, kernel_size, groups=hidden_size, bias=False, dtype=dtype
        )

    def forward(self, x, output_final_state, cu_seqlens):
        assert cu_seqlens is None
        rows = F.pad(x.transpose(1, 2), (self.kernel_size[0] - 1, 0))
        out = F.conv1d(rows, self.weight, groups=self.groups).transpose(1, 2)
        return F.silu(out), None


class GatedNorm(torch.nn.Module):
    """RMS norm times the sigmoid of a gate."""

    def __init__(self, hidden_size, eps, activation, device=None, dtype=None):
        super().__init__()
        assert activation == "sigmoid"
        self.weight, self.eps = torch.nn.Parameter(torch.ones(hidden_size, dtype=dtype)), eps

    def forward(self, x, gate):
        scale = (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return x * scale * self.weight * torch.sigmoid(gate)


def chunk_kda(
    q, k, v, g, beta, A_log, dt_bias, lower_bound, cu_seqlens, use_qk_l2norm_in_kernel,
    use_gate_in_kernel, safe_gate, **unread,
):  # fmt: skip
    """Row by row: q, k, v, g [b, s, h, d], beta [b, s, h] -> ([b, s, h, d], None)."""
    assert cu_seqlens is None
    assert use_qk_l2norm_in_kernel
    assert use_gate_in_kernel
    assert safe_gate
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    (batch, rows, heads, width) = q.shape
    steps = (g + dt_bias.view(heads, width)) * A_log.exp().view(heads, 1)
    decay = (lower_bound * torch.sigmoid(steps)).exp()
    state, outs = q.new_zeros(batch, heads, width, width), []
    for t in range(rows):
        state = decay[:, t, :, :, None] * state
        known = torch.einsum("bhd,bhdw->bhw", k[:, t], state)
        change = beta[:, t, :, None] * (v[:, t] - known)
        state = state + k[:, t, :, :, None] * change[:, :, None]
        outs.append(torch.einsum("bhd,bhdw->bhw", q[:, t], state) * width**-0.5)
    return torch.stack(outs, 1), None


def bridge(checkout):
    """Bridge's module of the layer spec."""
    stand_ins = {
        "fla": {}, "fla.ops": {}, "fla.ops.kda.chunk_bwd": dict.fromkeys([UNTUNED]),
        "fla.modules": {"FusedRMSNormGated": GatedNorm, "ShortConvolution": ShortConvolution},
        "fla.ops.kda": {"chunk_kda": chunk_kda}, "fla.utils": {"IS_NVIDIA_HOPPER": False},
    }  # fmt: skip
    for name, content in stand_ins.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(content)
    # Packages without what their __init__ imports.
    parts = HOME.split(".")
    for count in range(2, len(parts) + 1):
        package = types.ModuleType(".".join(parts[:count]))
        package.__path__ = [str(Path(checkout, "src", *parts[:count]))]
        sys.modules[package.__name__] = package
    return importlib.import_module(f"{HOME}.kimi_k3_spec")


@dataclasses.dataclass
class KimiConfig(MLATransformerConfig):
    """With what Bridge's provider adds."""

    kimi_kda_layers: tuple = (1, 2, 4)
    kimi_linear_num_heads: int = 4
    kimi_linear_head_dim: int = 8
    kimi_linear_conv_kernel_size: int = 4
    kimi_kda_gate_lower_bound: float = -5.0
    kimi_attn_res_block_size: int = 2


def model(checkout, ranks, choices, settings):
    spec = bridge(checkout)
    config = KimiConfig(
        num_layers=4, hidden_size=32, ffn_hidden_size=48, num_attention_heads=4,
        q_lora_rank=16, kv_lora_rank=16, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=12,
        multi_latent_attention=True, qk_layernorm=True, normalization="RMSNorm",
        gated_linear_unit=True, activation_func=F.silu, add_bias_linear=False, hidden_dropout=0.0,
        attention_dropout=0.0, context_parallel_size=ranks, use_cpu_initialization=True,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        sequence_parallel=parallel_state.get_tensor_model_parallel_world_size() > 1,
        gradient_accumulation_fusion=False, persist_layer_norm=False, apply_rope_fusion=False,
        bias_dropout_fusion=False, bias_activation_fusion=False, use_te_activation_func=True,
        num_moe_experts=4, moe_router_topk=2, moe_layer_freq=[0, 1, 1, 1], moe_latent_size=16,
        moe_ffn_hidden_size=24, moe_grouped_gemm=True, moe_token_dispatcher_type="alltoall",
        moe_shared_expert_intermediate_size=24, moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0, moe_router_score_function="sigmoid", moe_router_dtype="fp32",
        **settings,
    )  # fmt: skip
    layers = spec.build_kimi_k3_spec
    if choices is not None:
        from megatron_burst.megatron import install
        from megatron_burst.recipes.layers import burst_layer_spec

        install(choices.get("layout", "zigzag"))
        made = burst_layer_spec(config, base=layers, **choices)
    else:
        made = layers(config)
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)
    return GPTModel(
        config, made, vocab_size=VOCABULARY, max_sequence_length=LENGTH,
        position_embedding_type="none",
    )  # fmt: skip


def losses(checkout, choices=None, packed=False, tensor=1, settings=None):
    """[loss, {name: norm of the gradient}] of the whole sequence; packed: of documents, each
    alone on one rank. choices: of BurstAttention, None without it."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_burst.megatron import shard_sequence

    ranks = dist.get_world_size() // tensor
    parallel_state.initialize_model_parallel(tensor, context_parallel_size=ranks)
    gpt = model(checkout, ranks, choices, settings or {})
    for index, (name, weight) in enumerate(sorted(gpt.named_parameters())):
        noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(index))
        weight.data.copy_(noise * (0.1 if "norm" in name else 0.3) + ("norm" in name))
    draw = torch.Generator().manual_seed(3)
    tokens, labels = torch.randint(0, VOCABULARY, (2, 1, LENGTH), generator=draw)
    ends = torch.tensor(DOCUMENTS if packed else (0, LENGTH), dtype=torch.int32)
    if ranks > 1:
        params = None
        if packed:
            longest = int(ends.diff().max())
            params = PackedSeqParams(
                qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest,
                max_seqlen_kv=longest,
            )  # fmt: skip
        tokens, labels = shard_sequence(tokens), shard_sequence(labels)
        loss = gpt(tokens, None, None, labels=labels, packed_seq_params=params).sum()
    else:
        parts = [slice(a, b) for a, b in itertools.pairwise(ends)]
        loss = sum(gpt(tokens[:, x], None, None, labels=labels[:, x]).sum() for x in parts)
    loss.backward()
    group, total = parallel_state.get_context_parallel_group(), loss.detach().clone()
    dist.all_reduce(total, group=group)
    norms = {}
    for name, weight in gpt.named_parameters():
        if weight.grad is not None:
            dist.all_reduce(weight.grad, group=group)
            norms[name] = weight.grad.norm().item()
    return [total.item(), norms]


if __name__ == "__main__":
    answer.main(globals())
