"""Code that the ranks of `test_sparse_layers` run.

A small GPT in fp64 has layers with a selection rule. One such layer is also written out by hand,
dense.
"""

import math
from functools import partial

import torch
import torch.distributed as dist
from session import parallel
from trajectories import own_part, settings, weights, whole_name

VOCABULARY, LENGTH = 32, 64
RULES = {
    "moba": {"rule": "moba", "top_k": 2, "block": 4},
    "qsa": {"rule": "qsa", "top_k": 3, "index_heads": 3, "index_width": 8},
    "msa": {"rule": "msa", "top_k": 2, "block": 4, "index_width": 8},
    "dsa": {"rule": "dsa", "top_k": 6, "index_heads": 3, "index_width": 8},
}  # fmt: skip
# Four layers of hybrid attention.
LATENT = {
    "multi_latent_attention": True, "num_layers": 4, "q_lora_rank": 24, "v_head_dim": 16,
    "qk_pos_emb_head_dim": 8, "qk_head_dim": 8, "kv_lora_rank": 8,
    "original_max_position_embeddings": 16, "add_bias_linear": False,
}  # fmt: skip
HYBRID = {
    "rule": "csa", "csa_compress_ratios": [0, 4, 8, 4], "csa_window_size": 6, "top_k": 3,
    "index_heads": 3, "index_width": 12, "o_groups": 2, "o_lora_rank": 12,
}  # fmt: skip
SIZES = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")


def build(changes, layers, burst):
    """Return this rank's part of a model in Megatron's data parallelism.

    The model does not depend on parallel sizes. layers has arguments of `mb.sparse_layer_spec`, or
    is None for Megatron's own attention.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    import megatron_burst as mb

    config = settings(
        {"num_layers": 2, "num_query_groups": 2, "normalization": "RMSNorm", **changes}
    )
    config.finalize_model_grads_func = finalize_model_grads
    mb.megatron.configure(config, mb.BurstConfig(**burst))
    spec = get_gpt_layer_local_spec(
        qk_layernorm=True, normalization="RMSNorm",
        multi_latent_attention=config.multi_latent_attention,
    )  # fmt: skip
    if layers is not None:
        spec = mb.sparse_layer_spec(**layers, base=spec)
    gpt = GPTModel(
        config, spec, VOCABULARY, LENGTH, position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    ).double()  # fmt: skip
    own = config.num_layers // parallel_state.get_pipeline_model_parallel_world_size()
    offset = parallel_state.get_pipeline_model_parallel_rank() * own
    for name, parameter in gpt.named_parameters():
        parameter.whole = whole_name(name, offset)
        parameter.data.copy_(own_part(parameter, weights(parameter)))
    return DistributedDataParallel(config, DistributedDataParallelConfig(), gpt)


def documents():
    """Return the bounds of documents in a packed batch."""
    return [0, 32, 64]


def batch(step, packed):
    """Return tokens, labels and positions of this rank, and its documents."""
    from megatron.core.packed_seq_params import PackedSeqParams

    import megatron_burst as mb

    draw = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (1, LENGTH + 1), generator=draw)
    tokens[:, 1::2] = (tokens[:, ::2][:, : LENGTH // 2] * 5 + 1) % VOCABULARY
    positions = torch.arange(LENGTH)
    params = None
    if packed:
        bounds = torch.tensor(documents())
        starts = bounds[torch.searchsorted(bounds, positions, right=True) - 1]
        positions = positions - starts
        bounds = bounds.int()
        params = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds,
            max_seqlen_q=64, max_seqlen_kv=64,
        )  # fmt: skip
    whole = tokens[:, :-1], tokens[:, 1:], positions[None]
    inputs = {} if params is None else {"packed_seq_params": params}
    return [mb.megatron.shard_sequence(x, dim=1, **inputs) for x in whole], params


def forward_step(packed, steps, data, model):
    (tokens, labels, positions), params = batch(next(data), packed)
    losses = model(tokens, positions, None, labels=labels, packed_seq_params=params)

    def loss(losses):
        total, count = losses.sum(), torch.tensor(losses.numel())
        steps.append(total.detach().double())  # Megatron divides it in place
        return total, count.int(), {"loss": total.detach()}

    return losses, loss


def train(changes, layers, burst=None, packed=False, steps=2, rate=0.05, micro=2):
    """Return loss, indexer loss and gradients by name of each step of gradient descent.

    They are those of all ranks and of whole parameters.
    """
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.experimental_attention_variant import dsa

    sizes = {name: changes[name] for name in SIZES if name in changes}
    actual, helper = [], dsa.DSAIndexerLossLoggingHelper
    with parallel((burst or {}).get("layout", "zigzag"), **sizes):
        random.model_parallel_cuda_manual_seed(7, force_reset_rng=True)
        helper.tracker.clear()
        model = build(changes, layers, burst or {})
        data = iter(range(1000))
        for _ in range(steps):
            model.zero_grad_buffer()
            totals = []
            schedules.get_forward_backward_func()(
                forward_step_func=partial(forward_step, packed, totals), data_iterator=data,
                model=[model], num_microbatches=micro, seq_length=LENGTH, micro_batch_size=1,
                forward_only=False,
            )  # fmt: skip
            total = torch.stack([torch.zeros((), dtype=torch.float64), *totals]).sum()
            dist.all_reduce(total, group=parallel_state.get_pipeline_model_parallel_group())
            dist.all_reduce(total, group=parallel_state.get_context_parallel_group())
            helper.reduce_loss_in_tracker()
            index = helper.tracker.get("values", torch.zeros(1)).sum().item() / micro
            helper.clean_loss_in_tracker()
            trained = [p for p in model.parameters() if p.requires_grad]
            gradients = {p.whole: whole(p, p.main_grad) for p in trained}
            with torch.no_grad():
                for parameter in trained:
                    parameter -= rate * parameter.main_grad
            actual.append((total.item() / (LENGTH * micro), index, gradients))
    return actual


def whole(parameter, x):
    from megatron.core import parallel_state

    if not getattr(parameter, "tensor_model_parallel", False):
        return x.clone()
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, parameter.partition_dim)


# --- a layer by hand ------------------------------------------------------------------------------

WIDTH, TOKENS = 8, 24


def against_dense(rule):
    """Return the largest errors of a layer's attention on one rank: output and gradients."""
    arguments = RULES[rule]
    with parallel():
        from megatron.core.tensor_parallel import random

        random.model_parallel_cuda_manual_seed(7, force_reset_rng=True)
        trained = {} if rule == "moba" else {"loss_coeff": 0.5}
        model = build({"num_layers": 1}, arguments | trained, {})
        attention = model.module.decoder.layers[0].self_attention
        draw = torch.Generator().manual_seed(3)
        x, g = torch.randn(2, TOKENS, 1, 32, generator=draw, dtype=torch.float64)
        x.requires_grad_()
        rates = 10000.0 ** (-torch.arange(0, WIDTH, 2, dtype=torch.float64) / WIDTH)
        angles = torch.arange(TOKENS, dtype=torch.float64)[:, None] * rates
        table = torch.cat([angles, angles], -1)[:, None, None]
        out, _ = attention(x, None, rotary_pos_emb=table)
        model.zero_grad_buffer()
        (out * g).sum().backward()
        ring = {n: p.main_grad.clone() for n, p in attention.named_parameters()}
        leaves = {n: p.detach().clone().requires_grad_() for n, p in attention.named_parameters()}
        y = x.detach().clone().requires_grad_()
        expected, loss = by_hand(leaves, y, angles, arguments)
        ((expected * g[:, 0]).sum() + 0.5 * loss).backward()
        errors = {"out": out[:, 0] - expected, "x": x.grad - y.grad}
        for name, leaf in leaves.items():
            reference = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            errors[name] = ring[name] - reference
        moved = [n for n, p in leaves.items() if "indexer" in n and p.grad.abs().max() > 1e-4]
        return {n: float(e.detach().abs().max()) for n, e in errors.items()}, len(moved)


def norm(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def turn(x, angles):
    """Rotate each row of x [rows, heads, WIDTH] by its angles [rows, WIDTH / 2]."""
    a, b = x[..., : WIDTH // 2], x[..., WIDTH // 2 :]
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def by_hand(p, x, angles, arguments):
    """Return out [s, hidden] without the projection's bias, and the indexer's loss.

    The layer has 4 query heads, 2 key heads and blocks of 4.
    """
    x, block = x[:, 0], 4
    mixed = (x @ p["linear_qkv.weight"].T + p["linear_qkv.bias"]).view(TOKENS, 2, 4, WIDTH)
    q = norm(mixed[:, :, :2].reshape(TOKENS, 4, WIDTH), p["q_layernorm.weight"])
    k = norm(mixed[:, :, 2], p["k_layernorm.weight"])
    q, k, v = turn(q, angles), turn(k, angles), mixed[:, :, 3]
    if arguments["rule"] == "moba":
        means = k.view(-1, block, 2, WIDTH).mean(1)
        scores = torch.stack([q[:, h] @ means[:, h // 2].T for h in range(4)], 1)
    else:
        rows, count = x.detach(), arguments["index_heads"]
        iq = (rows @ p["indexer.linear_q.weight"].T).view(TOKENS, count, WIDTH)
        iq = turn(norm(iq, p["indexer.q_norm.weight"]), angles)
        ik = (rows @ p["indexer.linear_k.weight"].T).view(-1, block, WIDTH).mean(1)
        ik = turn(norm(ik, p["indexer.k_norm.weight"])[:, None], angles[::block])[:, 0]
        scores = torch.einsum("tid,ud->tiu", iq, ik).clamp(min=0).sum(1, keepdim=True)
        scores = scores / math.sqrt(WIDTH)
    outs, loss = [], 0.0
    for t in range(TOKENS):
        own, rows, teacher, student = t // block, [], 0.0, None
        for h in range(4):
            actual = scores[t, h if scores.shape[1] == 4 else 0]
            others = sorted(range(own), key=lambda u: (-actual[u].item(), u))
            units = sorted([own, *others[: arguments["top_k"] - 1]])
            seen = [j for u in units for j in range(u * block, u * block + block) if j <= t]
            weight = (k[seen, h // 2] @ q[t, h] / math.sqrt(WIDTH)).softmax(0)
            rows.append(weight @ v[seen, h // 2])
            member = torch.tensor([[float(j // block == u) for j in seen] for u in units])
            teacher, student = teacher + member.double() @ weight.detach(), actual[units]
        outs.append(torch.cat(rows))
        if arguments["rule"] != "moba":
            target = teacher / teacher.sum()
            loss = loss + (target * (target.log() - student.log_softmax(0))).sum() / TOKENS
    return torch.stack(outs) @ p["linear_proj.weight"].T, loss


# --- checkpoints and refusals ---------------------------------------------------------------------


def names(changes, layers, prefix=None):
    """Return name and whole shape of each entry of an indexer in this rank's checkpoint.

    With a prefix, return the entries that begin with it, without the prefix and the dimension of
    layers.
    """
    sizes = {name: changes[name] for name in SIZES if name in changes}
    with parallel(**sizes):
        model = build(changes, layers, {})
        actual = model.module.sharded_state_dict()
        if prefix is not None:
            return {
                n.removeprefix(prefix): tuple(t.global_shape)[t.prepend_axis_num :]
                for n, t in actual.items()
                if n.startswith(prefix) and hasattr(t, "prepend_axis_num")
            }
        return {n: tuple(t.global_shape) for n, t in actual.items() if "indexer" in n}


def saved_and_loaded(folder, changes, others, layers):
    """Return the largest difference between parameters saved and loaded at other sizes.

    The values of the parameters do not depend on sizes.
    """
    from megatron.core import dist_checkpointing

    with parallel(**{name: changes[name] for name in SIZES if name in changes}):
        model = build(changes, layers, {})
        dist_checkpointing.save(model.module.sharded_state_dict(), folder)
    with parallel(**{name: others[name] for name in SIZES if name in others}):
        model = build(others, layers, {})
        right = {n: p.detach().clone() for n, p in model.module.named_parameters()}
        for parameter in model.module.parameters():
            parameter.data.zero_()
        loaded = dist_checkpointing.load(model.module.sharded_state_dict(), folder)
        model.module.load_state_dict(loaded)
        return max(
            float((p.detach() - right[n]).abs().max()) for n, p in model.module.named_parameters()
        )


def message(changes, layers, burst, step=False):
    """Return the ValueError of building a model or of a step of it, or None."""
    try:
        if step:
            train(changes, layers, burst, steps=1)
        else:
            with parallel(**{name: changes[name] for name in SIZES if name in changes}):
                build(changes, layers, burst)
    except ValueError as error:
        return str(error)
    return None


def documented(text):
    """Run a block of the documentation about rules of layers, with the names that it assumes."""
    from megatron.core.tensor_parallel import random

    with parallel("zigzag", context_parallel_size=2):
        random.model_parallel_cuda_manual_seed(7, force_reset_rng=True)
        config = settings({"context_parallel_size": 2, "num_layers": 2})
        space = {"config": config, "vocab_size": VOCABULARY, "seq_length": LENGTH}
        exec(text, space)
        layers = space["model"].decoder.layers
        return [type(layer.self_attention.choice.rule).__name__ for layer in layers]


def layers_tracked():
    """Return the number of layers in Megatron's tracker after a step without an indexer."""
    from megatron.core.transformer.experimental_attention_variant import dsa

    train({"dsa_indexer_loss_coeff": 0.1}, RULES["moba"], steps=1)
    return len(dsa.DSAIndexerLossLoggingHelper.tracker.get("values", ()))
