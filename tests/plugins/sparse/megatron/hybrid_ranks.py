"""What the ranks of `test_hybrid_layers` run: layers beside those of transformers in float32.

There are 16 index heads: with few heads, ReLU makes many scores exactly 0, and transformers selects
any of the keys with equal scores.
"""

import itertools

import torch
import torch.distributed as dist
from session import parallel
from sparse_layers import SIZES
from trajectories import settings

LENGTH, WIDTH, WINDOW = 96, 32, 6
RATIOS = [0, 4, 8, 4]
NAMES = {  # ours -> transformers'
    "linear_q_down_proj.weight": "q_a_proj.weight",
    "q_layernorm.weight": "q_a_norm.weight",
    "linear_q_up_proj.weight": "q_b_proj.weight",
    "linear_kv_proj.weight": "kv_proj.weight",
    "kv_layernorm.weight": "kv_norm.weight",
    "linear_o_group_proj": "o_a_proj.weight",
    "linear_proj.weight": "o_b_proj.weight",
    "core_attention.attn_sink": "sinks",
    "core_attention.indexer.linear_wq_b.weight": "compressor.indexer.q_b_proj.weight",
    "core_attention.indexer.linear_weights_proj.weight":
        "compressor.indexer.scorer.weights_proj.weight",
}  # fmt: skip
COMPRESSORS = {
    "core_attention.compressor.": "compressor.",
    "core_attention.indexer.compressor.": "compressor.indexer.",
}
OF_COMPRESSOR = {
    "linear_wkv.weight": "kv_proj.weight", "linear_wgate.weight": "gate_proj.weight",
    "ape": "position_bias", "norm.weight": "kv_norm.weight",
}  # fmt: skip
NAMES |= {
    ours + name: theirs + other
    for ours, theirs in COMPRESSORS.items()
    for name, other in OF_COMPRESSOR.items()
}


def reference():
    """Four attention layers of transformers, and their rotary embedding."""
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

    kinds = {
        0: "sliding_attention", 4: "compressed_sparse_attention", 8: "heavily_compressed_attention",
    }  # fmt: skip
    config = DeepseekV4Config(
        num_hidden_layers=4, layer_types=[kinds[ratio] for ratio in RATIOS],
        mlp_layer_types=["moe"] * 4, hidden_size=WIDTH, num_attention_heads=4, head_dim=16,
        q_lora_rank=24, sliding_window=WINDOW, o_groups=2, o_lora_rank=12, index_n_heads=16,
        index_head_dim=12, index_topk=3, partial_rotary_factor=0.5, rms_norm_eps=1e-5,
        max_position_embeddings=LENGTH, n_routed_experts=4, moe_intermediate_size=8, vocab_size=64,
        compress_rates={kinds[4]: 4, kinds[8]: 8}, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(5)
    layers = torch.nn.ModuleList(v4.DeepseekV4Attention(config, number) for number in range(4))
    for parameter in layers.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return layers, v4.DeepseekV4RotaryEmbedding(config)


def through(layers, rotary, hidden):
    """The states after all layers for one document [s, w]; each layer adds to its input."""
    rows = torch.arange(len(hidden))[None]
    gap = rows[0][:, None] - rows[0]
    mask = torch.zeros(1, 1, len(hidden), len(hidden))
    mask = mask.masked_fill((gap < 0) | (gap >= WINDOW), -torch.inf)
    hidden = hidden[None]
    embeddings = {
        kind: rotary(hidden, position_ids=rows, layer_type=kind) for kind in ("main", "compress")
    }
    for layer in layers:
        hidden = hidden + layer(hidden, embeddings, rows, mask)[0]
    return hidden[0]


def expected(bounds):
    """Weights, input, output and gradients of transformers' layers over documents.

    `bounds` are those of the documents, or None for one document.
    """
    layers, rotary = reference()
    draw = torch.Generator().manual_seed(9)
    whole, gradient = torch.randn(2, LENGTH, WIDTH, generator=draw)
    leaf = whole.requires_grad_()
    wanted = torch.cat([
        through(layers, rotary, leaf[first:last])
        for first, last in itertools.pairwise(bounds or [0, LENGTH]) if first < last
    ])  # fmt: skip
    wanted.backward(gradient)
    parameters = [dict(layer.named_parameters()) for layer in layers]
    return {
        "weights": [{n: p.detach() for n, p in named.items()} for named in parameters],
        "gradients": [{n: p.grad for n, p in named.items()} for named in parameters],
        "input": leaf.detach(), "input gradient": leaf.grad, "states": wanted.detach(),
        "output gradient": gradient,
    }  # fmt: skip


def with_lists(*arguments):
    """`against_transformers` with the kernels for keys that are wider than dense kernels."""
    from megatron_burst.plugins.sparse.megatron import hybrid_layers, hybrid_plans

    places = hybrid_layers, hybrid_plans
    kept = hybrid_plans.needs_lists
    try:
        for place in places:
            place.needs_lists = lambda query: True
        return against_transformers(*arguments)
    finally:
        for place in places:
            place.needs_lists = kept


def built(changes, burst, **arguments):
    """The four layers in Megatron; `arguments` of the spec replace those of transformers."""
    from megatron.core.tensor_parallel import random

    import megatron_burst as mb
    from megatron_burst.plugins.sparse.megatron.hybrid_layers import HybridSelfAttention

    random.model_parallel_cuda_manual_seed(7, force_reset_rng=True)
    config = settings({
        "multi_latent_attention": True, "num_layers": 4, "q_lora_rank": 24, "v_head_dim": 16,
        "qk_pos_emb_head_dim": 8, "qk_head_dim": 8, "kv_lora_rank": 8, "rope_type": "rope",
        "params_dtype": torch.float32, "add_bias_linear": False, "normalization": "RMSNorm",
        "pipeline_dtype": torch.float32, **changes,
    })  # fmt: skip
    mb.megatron.configure(config, mb.BurstConfig(**burst))
    spec = mb.sparse_layer_spec(**{
        "rule": "csa", "csa_compress_ratios": RATIOS, "csa_window_size": WINDOW, "top_k": 3,
        "index_heads": 16, "index_width": 12, "loss_coeff": 0, "o_groups": 2, "o_lora_rank": 12,
        "base": local(), **arguments,
    }).submodules.self_attention  # fmt: skip
    return [
        HybridSelfAttention(config, spec.submodules, number + 1, **spec.params)
        for number in range(4)
    ]


def documents(bounds, padded=None):
    """Megatron's parameters of a pack with these bounds of documents."""
    from megatron.core.packed_seq_params import PackedSeqParams

    bounds, padded = (
        None if x is None else torch.tensor(x, dtype=torch.int32) for x in (bounds, padded)
    )
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded, max_seqlen_q=LENGTH, max_seqlen_kv=LENGTH,
    )  # fmt: skip


def with_padding(changes, factor):
    """States and gradients of an indexer; states in padding are multiplied by `factor`."""
    import megatron_burst as mb

    sizes = {name: changes[name] for name in SIZES if name in changes}
    with parallel(**sizes):
        layers = built(changes, {}, loss_coeff=0.5)
        params = documents([0, 20, 50], [0, 24, LENGTH])
        hidden = torch.randn(LENGTH, 1, WIDTH, generator=torch.Generator().manual_seed(4))
        padding = torch.zeros(LENGTH, dtype=torch.bool)
        padding[20:24] = padding[54:] = True
        hidden[padding] = hidden[padding] * factor
        hidden, padding = (
            mb.megatron.shard_sequence(x, dim=0, packed_seq_params=params)
            for x in (hidden, padding)
        )
        for layer in layers:
            hidden = hidden + layer(hidden, None, packed_seq_params=params)[0]
        hidden[~padding].sum().backward()
        indexer = layers[-1].core_attention.indexer
        return hidden[~padding].detach(), {n: p.grad for n, p in indexer.named_parameters()}


def with_other_settings(arguments):
    """The error of four ranks, where the last rank has other arguments of the spec."""
    changes = {"context_parallel_size": 4}
    with parallel(**changes):
        layers = built(changes, {}, **arguments if dist.get_rank() == 3 else {})
        hidden = torch.zeros(LENGTH // 4, 1, WIDTH)
        try:
            for layer in layers:
                layer(hidden, None)
        except ValueError as error:
            return str(error)


def against_transformers(changes, burst, bounds, right):
    """The largest errors of states and gradients, relative to the largest value of each.

    `right` is the result of `expected(bounds)`.
    """
    import megatron_burst as mb

    sizes = {name: changes[name] for name in SIZES if name in changes}
    with parallel(burst.get("layout", "zigzag"), **sizes):
        ours = built(changes, burst)
        for mine, weights in zip(ours, right["weights"], strict=True):
            for name, parameter in mine.named_parameters():
                parameter.data.copy_(weights.pop(NAMES[name]))
            assert not weights
        params = None if bounds is None else documents(bounds)
        cut = {"dim": 0} | ({} if params is None else {"packed_seq_params": params})
        own = {
            name: mb.megatron.shard_sequence(right[name][:, None], **cut)
            for name in ("input", "input gradient", "states", "output gradient")
        }
        leaf = hidden = own["input"].clone().requires_grad_()
        for layer in ours:
            hidden = hidden + layer(hidden, None, packed_seq_params=params)[0]
        hidden.backward(own["output gradient"])
        pairs = {"states": (hidden, own["states"]), "input": (leaf.grad, own["input gradient"])}
        from megatron.core import parallel_state

        group = parallel_state.get_context_parallel_group()
        for number, (mine, gradients) in enumerate(zip(ours, right["gradients"], strict=True)):
            for name, parameter in mine.named_parameters():
                if "indexer" in name:
                    assert parameter.grad is None
                    continue
                dist.all_reduce(parameter.grad, group=group)
                pairs[f"{number} {name}"] = parameter.grad, gradients[NAMES[name]]
    return {
        name: float((found - wanted).abs().max() / max(1.0, wanted.abs().max()))
        for name, (found, wanted) in pairs.items()
    }


def local():
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return get_gpt_layer_local_spec(
        qk_layernorm=True, normalization="RMSNorm", multi_latent_attention=True
    )
