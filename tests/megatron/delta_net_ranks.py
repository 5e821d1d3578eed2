"""Ranks of the tests of gated delta nets.

They train a small GPT with three such layers and one layer of softmax attention for a few steps,
and return all numbers.
"""

import contextlib
from itertools import pairwise
from unittest import mock

import torch
import torch.distributed as dist
from session import log_lines, parallel

LENGTH, VOCABULARY, BATCH = 64, 61, 2
# Documents of a pack without their padding, and with it.
LENGTHS, ROOM = (21, 1, 17, 0, 9, 11), (21, 3, 17, 2, 9, 12)


@contextlib.contextmanager
def installed(layout, cp, sizes):
    """Install BurstAttention over ``cp`` of the four ranks; the others repeat them."""
    from megatron.core.tensor_parallel import random

    sizes = {"context_parallel_size": cp, "hierarchical_context_parallel_sizes": sizes}
    with parallel(layout, **sizes):
        random.model_parallel_cuda_manual_seed(7, force_reset_rng=True)
        yield


def build(cp, sizes, choices, **changes):
    """Return the model in fp64, with the same weights in every run."""
    import torch.nn.functional as F
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    import megatron_burst as mb
    import megatron_burst.megatron as burst
    from megatron_burst.plugins.testing.local_specs import local_block_spec

    config = TransformerConfig(**{
        "num_layers": 4, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4,
        "experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 4,
        "linear_key_head_dim": 8, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "context_parallel_size": cp,
        "hierarchical_context_parallel_sizes": sizes, "normalization": "RMSNorm",
        "gated_linear_unit": True, "activation_func": F.silu, "hidden_dropout": 0.0,
        "attention_dropout": 0.0, "calculate_per_token_loss": True, "add_bias_linear": False,
        "use_cpu_initialization": True, "gradient_accumulation_fusion": False,
        "persist_layer_norm": False, "bias_activation_fusion": False, "bias_dropout_fusion": False,
        "masked_softmax_fusion": False, "apply_rope_fusion": False, "deterministic_mode": True,
        **changes,
    })  # fmt: skip
    burst.configure(config, mb.BurstConfig(**choices))
    torch.manual_seed(7)
    spec = local_block_spec(config)
    model = GPTModel(config, spec, VOCABULARY + 3, LENGTH, position_embedding_type="rope")
    for index, (name, parameter) in enumerate(model.named_parameters()):
        draw = torch.Generator().manual_seed(index)
        noise = torch.randn(parameter.shape, generator=draw)
        parameter.data += (0.3 if name.endswith(("A_log", "dt_bias")) else 0.05) * noise
    for module in model.modules():
        if hasattr(module, "gated_delta_rule"):  # Megatron's own is in fp32
            module.gated_delta_rule = recurrence
    return model.double()


def recurrence(query, key, value, g, beta, **unused):
    """Compute the gated delta rule token by token: q, k, v [b, s, h, d], g and beta [b, s, h]."""
    state, out = torch.zeros_like(key[:, 0, :, :, None] * value[:, 0, :, None]), []
    rows = zip(*(x.unbind(1) for x in (query, key, value, g, beta)), strict=True)
    for q, k, v, decay, rate in rows:
        state = state * decay.exp()[..., None, None]
        seen = torch.einsum("bhd,bhdw->bhw", k, state)
        state = state + torch.einsum("bhd,bhw->bhdw", k, (v - seen) * rate[..., None])
        out.append(torch.einsum("bhd,bhdw->bhw", q, state) * q.shape[-1] ** -0.5)
    return torch.stack(out, 1), None


def batch(packed):
    """Return (tokens, labels, positions, parameters of the pack) of whole sequences."""
    from megatron.core.packed_seq_params import PackedSeqParams

    draw = torch.Generator().manual_seed(1)
    rows = torch.randint(VOCABULARY, (1 if packed else BATCH, LENGTH + 1), generator=draw)
    places = torch.arange(LENGTH)[None].expand(len(rows), -1)
    params = None
    if packed:
        ends, padded = (
            torch.tensor([0, *sizes]).cumsum(0).to(torch.int32) for sizes in (LENGTHS, ROOM)
        )
        params = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, cu_seqlens_q_padded=padded,
            cu_seqlens_kv_padded=padded, max_seqlen_q=max(LENGTHS), max_seqlen_kv=max(LENGTHS),
        )  # fmt: skip
    return rows[:, :-1], rows[:, 1:], places, params


def real_rows():
    """Return the parts of a pack that are not padding."""
    starts = torch.tensor([0, *ROOM]).cumsum(0).tolist()
    return [(a, a + n) for (a, _), n in zip(pairwise(starts), LENGTHS, strict=True) if n]


def losses(model, packed, alone):
    """Return the losses of this rank's tokens that count."""
    import megatron_burst.megatron as burst

    tokens, labels, places, params = batch(packed)
    if alone:
        token_losses = [
            model(tokens[:, a:b], places[:, : b - a], None, labels=labels[:, a:b])
            for a, b in real_rows()
        ]
        return torch.cat(token_losses, 1).flatten()
    counts = torch.ones_like(tokens, dtype=torch.bool)
    if packed:
        counts[:] = False
        for a, b in real_rows():
            counts[:, a:b] = True
    local = [burst.shard_sequence(x.contiguous(), params, dim=1)
            for x in (tokens, labels, places, counts)]  # fmt: skip
    tokens, labels, places, counts = local
    token_losses = model(tokens, places, None, labels=labels, packed_seq_params=params)
    return token_losses[counts]


def train(
    layout, cp, choices=None, sizes=None, packed=False, alone=False, steps=2, flight=1, **changes
):
    """Return ([(loss, gradient norm)] of each step, the log of this rank).

    ``flight`` micro-batches run forward before any of them runs backward.
    """
    from megatron.core import parallel_state

    choices = {"layout": layout, "kernel": "reference", **(choices or {})}
    with log_lines() as log, installed(layout, cp, sizes):
        model = build(cp, sizes, choices, **changes)
        replicas = dist.get_world_size() // parallel_state.get_context_parallel_world_size()
        optimizer, history = torch.optim.SGD(model.parameters(), lr=0.1), []
        for _ in range(steps):
            *earlier, token_losses = (losses(model, packed, alone) for _ in range(flight))
            total = torch.tensor(
                [float(token_losses.detach().double().sum()), token_losses.numel()]
            ).double()
            dist.all_reduce(total)
            for micro_losses in (token_losses, *earlier[::-1]):
                (micro_losses.sum() * replicas / total[1] / flight).backward()
            for parameter in model.parameters():
                parameter.grad /= replicas
                dist.all_reduce(parameter.grad)
            norm = sum(float(p.grad.double().square().sum()) for p in model.parameters()) ** 0.5
            history.append((float(total[0] / total[1]), norm))
            optimizer.step()
            optimizer.zero_grad()
        return history, log


RECOMPUTE = {
    "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1,
}  # fmt: skip


def recomputed():
    """Run `train` with recomputed layers and two micro-batches in flight."""
    return train("zigzag", 2, {"store": 1.0}, flight=2, **RECOMPUTE)


def refused(layout, cp, options, odd=None):
    """Return the error of building and running the model on this rank, or None.

    ``odd``: further options of rank 1.
    """
    try:
        train(layout, cp, steps=1, **options | (odd or {} if dist.get_rank() == 1 else {}))
    except Exception as caught:
        return f"{type(caught).__name__}: {caught}"
    return None


def plans_made(options):
    """Return how many plans of linear attention two ranks make per step, and how many calls."""
    from megatron_burst.linear_attention.plan import LinearAttentionOperation
    from megatron_burst.megatron.attention import plan_book
    from megatron_burst.megatron.linear import delta_net

    count = {"prepared": 0, "linear_attention": 0}

    def counting(home, name):
        original = getattr(home, name)

        def call(*args, **named):
            count[name] += name != "prepared" or isinstance(args[0], LinearAttentionOperation)
            return original(*args, **named)

        return mock.patch.object(home, name, call)

    with counting(plan_book, "prepared"), counting(delta_net, "linear_attention"):
        train("zigzag", 2, steps=1, **options)
    return tuple(count.values())


def described(cp, linear):
    """Return the first layer's sharded state, and the shapes of its own parameters.

    The state is name -> (global shape, offset, local shape).
    """
    choices = {"linear": linear, "kernel": "reference"}
    with installed("zigzag", cp, None):
        layer = build(cp, None, choices).decoder.layers[0]
        sharded = layer.sharded_state_dict()
        flat = {}
        for name, one in sharded.items():
            parts = one.build() if hasattr(one, "build") else one
            for part in _leaves(parts):
                shape = getattr(part, "local_shape", ())  # none of objects
                where = tuple(part.global_shape), tuple(part.global_offset), tuple(shape)
                flat.setdefault((name, part.key), []).append(where)
        return flat, {name: tuple(p.shape) for name, p in layer.named_parameters()}


def _leaves(parts):
    if isinstance(parts, dict):
        parts = list(parts.values())
    if isinstance(parts, (list, tuple)):
        return [leaf for part in parts for leaf in _leaves(part)]
    return [parts]


def called_differently(field, odd):
    """Return the error of one layer's call that its plan does not allow on rank ``odd``.

    If ``odd`` is None, no rank's call is allowed.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_burst.megatron.data.packed import packs

    with installed("contiguous", 4, None):
        choices = {"kernel": "reference", "layout": "contiguous"}
        layers = build(4, None, choices).decoder.layers
        hidden = torch.zeros(LENGTH // 4, 1, 32, dtype=torch.float64)
        ends = torch.tensor([0, LENGTH], dtype=torch.int32)
        params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)
        packs().note_cut(packs().of(LENGTH, ends))  # as the data path does
        wrong = odd in (None, dist.get_rank())
        if wrong and field == "local_cp_size":
            params.local_cp_size = 1
        layer = layers[1 if wrong and field == "follower" else 0].self_attention
        try:
            layer(hidden, None, packed_seq_params=params)
        except ValueError as caught:
            return str(caught)
    return None


def over_a_tree():
    """Run `mb.rl.logprobs` over prefix trees and over separate trajectories.

    Return the largest differences of log-probabilities and of gradients, the largest gradient, and
    the message about Megatron's own exchange of heads.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from trajectories import TRAJECTORIES, the_loss

    import megatron_burst as mb

    results, message = {}, None
    for linear in ("auto", "megatron"):
        with installed("zigzag", 2, None):
            model = build(2, None, {"kernel": "reference", "linear": linear})
            chunk = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
            if linear == "megatron":
                try:
                    mb.rl.logprobs([chunk], TRAJECTORIES)
                except ValueError as error:
                    message = str(error)
                continue
            for tree in (True, False):
                chunk.zero_grad_buffer()
                step = mb.rl.logprobs([chunk], TRAJECTORIES, loss=the_loss, tree=tree)
                own = dict(zip(step.index, step.logprobs, strict=True))
                grads = [p.main_grad.clone() for p in chunk.parameters()]
                results[tree] = own, grads, step.rows
    (logs, grads, rows), (tree_logs, tree_grads, all_rows) = results[True], results[False]
    common_keys = logs.keys() & tree_logs.keys()
    differences = [(logs[i] - tree_logs[i]).abs().max() for i in common_keys if len(logs[i])]
    gaps = [(a - b).abs().max() for a, b in zip(grads, tree_grads, strict=True)]
    largest = max(float(x.abs().max()) for x in tree_grads)
    return (
        max(map(float, differences), default=0.0),
        max(map(float, gaps)),
        largest,
        (rows, all_rows),
        message,
    )


def errors_with_gates_of_channels(layout, packed):
    """Return the largest errors, over all ranks, of the rule with gates per channel.

    Outputs and gradients of every input are compared with `erased_and_written`.
    """
    import megatron_burst as mb
    from megatron_burst.megatron.linear.delta_net import _one_gate

    rank, draw = dist.get_rank(), torch.Generator().manual_seed(5)
    widths = {"q": 6, "k": 6, "v": 4, "decay": 6, "erase": 6, "write": 4, "seed": 4}
    whole = {
        name: torch.randn(LENGTH, 1, 2, width, generator=draw, dtype=torch.float64)
        for name, width in widths.items()
    }
    whole["k"] /= whole["k"].norm(dim=-1, keepdim=True)
    whole["decay"] = -whole["decay"].abs() / 4
    for name in ("erase", "write"):
        whole[name] = (4 * whole[name]).sigmoid()
    ends = torch.tensor([0, *(LENGTHS if packed else [LENGTH])]).cumsum(0)
    ends[-1] = LENGTH
    bounds = ends.tolist() if packed else None
    more = {"cu_seqlens": bounds, "per_node": 2} if layout == "balanced" else {}
    placed = mb.layout.make(layout, cp_size=dist.get_world_size(), **more)
    groups = mb.Groups.flat(dist.group.WORLD)
    mine = {name: mb.shard(x, placed, rank, dim=0) for name, x in whole.items()}
    seed = mine.pop("seed")
    for x in mine.values():
        x.requires_grad_()
    like = {"decay": mine["decay"], "beta": mine["erase"][..., 0].detach()}
    plan = mb.prepare_linear(
        mine["q"], mine["k"], mine["v"], **like, groups=groups, layout=placed, cu_seqlens=bounds
    )
    call = {"plan": plan, "label": 1}
    out = mb.linear_attention(**_one_gate(**mine, call=call), **call)
    out.backward(seed)
    found = {"out": out.detach()} | {name: x.grad for name, x in mine.items()}
    given = {name: x.clone().requires_grad_() for name, x in whole.items() if name != "seed"}
    expected = erased_and_written(**given, starts=set(ends.tolist()))
    expected.backward(whole["seed"])
    wanted = {"out": expected.detach()} | {name: x.grad for name, x in given.items()}
    return {
        name: (x - mb.shard(wanted[name], placed, rank, dim=0)).abs().max().item()
        for name, x in found.items()
    }


def erased_and_written(q, k, v, decay, erase, write, starts):
    """Compute the rule of Megatron's second gated delta net token by token.

    All arguments are [s, b, h, channels]; documents begin at `starts`.
    """
    out = []
    for t in range(len(q)):
        if t in starts:
            state = torch.zeros_like(k[0, ..., :, None] * v[0, ..., None, :])
        state = state * decay[t].exp()[..., None]
        seen = torch.einsum("bhd,bhdw->bhw", erase[t] * k[t], state)
        state = state + torch.einsum("bhd,bhw->bhdw", k[t], write[t] * v[t] - seen)
        out.append(torch.einsum("bhd,bhdw->bhw", q[t], state) * q.shape[-1] ** -0.5)
    return torch.stack(out)
