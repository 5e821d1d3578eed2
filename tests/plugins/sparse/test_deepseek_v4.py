"""DeepSeek-V4's attention over context-parallel ranks beside transformers' on one rank, in fp32.

The layers, weights and rotations are transformers'. Compression, selection and attention are ours:
one softmax over a window, compressed keys and a sink. Three kinds of layers: only a window,
compressed sparse attention, heavily compressed attention.
"""

import copy
from typing import NamedTuple

import oracle
import pytest
import torch
from torch.func import functional_call
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

import megatron_burst as mb
from megatron_burst.planning.plan import Plan
from megatron_burst.plugins.sparse.attention import selected_plan
from megatron_burst.plugins.testing import in_process

LENGTH, BATCH = 48, 2
KINDS = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
CONFIG = DeepseekV4Config(
    num_hidden_layers=3, layer_types=KINDS, mlp_layer_types=["moe"] * 3, hidden_size=32,
    num_attention_heads=4, head_dim=16, q_lora_rank=24, sliding_window=6, o_groups=2,
    o_lora_rank=12, index_n_heads=16, index_head_dim=12, index_topk=3, partial_rotary_factor=0.5,
    max_position_embeddings=LENGTH, n_routed_experts=4, moe_intermediate_size=8, vocab_size=64,
    compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 12},
    attn_implementation="eager",
)  # fmt: skip


class Plans(NamedTuple):
    """Plans of a rank for one kind of layer; `compressed` is None for layers with only a window."""

    window: Plan
    compressed: Plan | None
    positions: torch.Tensor  # of rows [1, s]
    windows: torch.Tensor | None  # first positions of the windows of keys [1, t]


class ParallelAttention(torch.nn.Module):
    """transformers' attention with the rows of one rank."""

    def __init__(self, inner, rotary):
        super().__init__()
        self.inner, self.rotary = inner, rotary

    def forward(self, hidden, plans):
        """hidden [b, s, c] -> output [b, s, c]."""
        m, (batch, rows, _) = self.inner, hidden.shape
        cos, sin = self.rotary(hidden, position_ids=plans.positions, layer_type=m.rope_layer_type)
        residual = m.q_a_norm(m.q_a_proj(hidden))
        q = m.q_b_norm(m.q_b_proj(residual).view(batch, rows, -1, m.head_dim).transpose(1, 2))
        q = by_rows(v4.apply_rotary_pos_emb(q, cos, sin))
        kv = m.kv_norm(m.kv_proj(hidden))[:, None]
        kv = by_rows(v4.apply_rotary_pos_emb(kv, cos, sin))
        key_sets = [(kv, None, plans.window)]  # values are the keys
        if plans.compressed is not None:
            key_sets.append(self.compressed(hidden, residual, q, plans))
        out = mb.joint_attention(q, key_sets, sink=m.sinks).permute(1, 2, 0, 3)
        out = v4.apply_rotary_pos_emb(out, cos, -sin).transpose(1, 2)
        return m.o_b_proj(m.o_a_proj(out.reshape(batch, rows, CONFIG.o_groups, -1)).flatten(2))

    def compressed(self, hidden, residual, q, plans):
        compressor, plan = self.inner.compressor, plans.compressed
        keys = by_rows(self.keys(compressor, hidden, plans)[:, None])
        indexer = getattr(compressor, "indexer", None)
        if indexer is None:
            return keys, None, plan
        cos, sin = self.rotary(hidden, position_ids=plans.positions, layer_type="compress")
        index_q = indexer.q_b_proj(residual).unflatten(-1, (-1, indexer.head_dim)).transpose(1, 2)
        index_q = by_rows(v4.apply_rotary_pos_emb(index_q, cos, sin))
        scorer = indexer.scorer
        weights = scorer.weights_proj(hidden) * scorer.weights_scaling * scorer.softmax_scale
        index_k = by_rows(self.keys(indexer, hidden, plans)[:, None])
        selection = mb.select(
            index_q, index_k, weights.transpose(0, 1), rule="dsa", top_k=CONFIG.index_topk,
            plan=plan,
        )  # fmt: skip
        made = selected_plan(q, keys, None, selection, plan=plan, sink=self.inner.sinks)
        return keys, None, made

    def keys(self, compressor, hidden, plans):
        """Compressed keys of this rank, [b, t, c], with norm and rotation."""
        rows, gates = (
            projection(hidden).transpose(0, 1)
            for projection in (compressor.kv_proj, compressor.gate_proj)
        )
        keys = mb.compress(
            rows, gates, compressor.position_bias, plan=plans.compressed,
            overlap=rows.shape[2] == 2 * compressor.head_dim,
        )  # fmt: skip
        keys = compressor.kv_norm(keys.transpose(0, 1))
        cos, sin = self.rotary(keys, position_ids=plans.windows, layer_type="compress")
        return v4.apply_rotary_pos_emb(keys[:, None], cos, sin)[:, 0]


def by_rows(x):
    """[b, heads, s, d] -> [s, b, heads, d]."""
    return x.permute(2, 0, 1, 3)


def plans_of(groups, layout, key_layout, ratio):
    size = groups.size
    q, kv = (
        [torch.empty(LENGTH // size, BATCH, heads, CONFIG.head_dim, requires_grad=True)] * size
        for heads in (CONFIG.num_attention_heads, 1)
    )
    window = in_process.prepare(
        q, kv, None, groups=groups, layout=layout,
        mask=mb.masks.Window(CONFIG.sliding_window - 1, 0),
    )  # fmt: skip
    positions = [torch.from_numpy(layout.positions(rank, LENGTH))[None] for rank in range(size)]
    if not ratio:
        return [Plans(window.ranks[rank], None, positions[rank], None) for rank in range(size)]
    count = LENGTH // ratio
    c = [torch.empty(count // size, BATCH, 1, CONFIG.head_dim, requires_grad=True)] * size
    compressed = in_process.prepare(
        q, c, None, groups=groups, layout=layout, key_layout=key_layout,
        mask=mb.masks.Compressed(ratio),
    )  # fmt: skip
    windows = [torch.from_numpy(key_layout.positions(rank, count))[None] for rank in range(size)]
    return [
        Plans(window.ranks[rank], compressed.ranks[rank], positions[rank], windows[rank] * ratio)
        for rank in range(size)
    ]


def initialized(layer):
    torch.manual_seed(layer)
    attention = v4.DeepseekV4Attention(CONFIG, layer)
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return attention


@pytest.mark.parametrize("layer", range(3), ids=KINDS)
@pytest.mark.parametrize(
    ("ranks", "layout", "key_layout"),
    [(1, "zigzag", "contiguous"), (2, "zigzag", "zigzag"), (4, "contiguous", "contiguous")],
)
def test_equals_transformers(ranks, layout, key_layout, layer):
    attention, rotary = initialized(layer), v4.DeepseekV4RotaryEmbedding(CONFIG)
    hidden = torch.randn(BATCH, LENGTH, CONFIG.hidden_size, requires_grad=True)
    gradient = torch.randn(BATCH, LENGTH, CONFIG.hidden_size)
    everything = torch.arange(LENGTH)[None].expand(BATCH, -1)
    embeddings = {
        kind: rotary(hidden, position_ids=everything, layer_type=kind)
        for kind in ("main", "compress")
    }
    gap = everything[0][:, None] - everything[0]
    hidden_pairs = (gap < 0) | (gap >= CONFIG.sliding_window)
    mask = torch.zeros(BATCH, 1, LENGTH, LENGTH).masked_fill(hidden_pairs, -torch.inf)
    wanted, _ = attention(hidden, embeddings, everything, mask)
    parameters = {name: p for name, p in attention.named_parameters() if "indexer" not in name}
    expected = torch.autograd.grad(wanted, [hidden, *parameters.values()], gradient)

    ratio = CONFIG.compress_rates.get(KINDS[layer], 0)
    if ratio and LENGTH // ratio % (2 * ranks) and key_layout == "zigzag":
        key_layout = "contiguous"
    layout, key_layout = (mb.layout.make(n, cp_size=ranks) for n in (layout, key_layout))
    groups = in_process.groups(intra=ranks)
    plans = plans_of(groups, layout, key_layout, ratio)
    shards = [mb.shard(hidden.detach(), layout, rank, dim=1).requires_grad_()
              for rank in range(ranks)]  # fmt: skip
    own = {f"inner.{name}": p.detach().clone().requires_grad_() for name, p in parameters.items()}

    attention.requires_grad_(False)
    modules = [ParallelAttention(copy.deepcopy(attention), rotary) for _ in range(ranks)]
    outs = in_process.on_ranks(
        groups, functional_call, modules, [own] * ranks,
        list(zip(shards, plans, strict=True)),
    )  # fmt: skip
    torch.autograd.backward(
        outs, [mb.shard(gradient, layout, rank, dim=1) for rank in range(ranks)]
    )
    scale = wanted.abs().max().item()
    got = mb.unshard([x.detach() for x in outs], layout, dim=1)
    assert oracle.worst(got, wanted.detach()) < 1e-5 * scale
    grads = [mb.unshard([x.grad for x in shards], layout, dim=1), *(p.grad for p in own.values())]
    for name, found, gradient_of in zip(["hidden", *own], grads, expected, strict=True):
        limit = 1e-5 * max(1.0, gradient_of.abs().max().item())
        assert oracle.worst(found, gradient_of) < limit, name
