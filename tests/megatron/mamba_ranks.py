"""Ranks of the tests of Mamba: one mixer in fp64, and its recurrence written out."""

import contextlib

import packed_ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from session import parallel

HIDDEN, HEADS, WIDTH, GROUPS, STATE, TAPS = 12, 6, 3, 2, 5, 4
INNER, KEYS = HEADS * WIDTH, GROUPS * STATE


@contextlib.contextmanager
def mixer(layout, linear):
    """Install BurstAttention inside the context; return a mixer that is equal on all ranks."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    import megatron_burst as mb
    import megatron_burst.megatron as burst
    from megatron_burst.plugins.testing import local_specs

    with parallel(layout, context_parallel_size=dist.get_world_size()):
        model_parallel_cuda_manual_seed(5)
        torch.manual_seed(5)
        config = TransformerConfig(
            num_layers=1, hidden_size=HIDDEN, num_attention_heads=2, mamba_num_heads=HEADS,
            mamba_head_dim=WIDTH, mamba_num_groups=GROUPS, mamba_state_dim=STATE,
            context_parallel_size=dist.get_world_size(), attention_dropout=0.0,
            params_dtype=torch.float64, calculate_per_token_loss=True, use_cpu_initialization=True,
            gradient_accumulation_fusion=False, is_hybrid_model=True,
        )  # fmt: skip
        burst.configure(config, mb.BurstConfig(layout=layout, intra_size=2, linear=linear))
        spec = local_specs.local_hybrid_stack_spec().submodules.mamba_layer.submodules.mixer
        groups = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        yield build_module(
            spec, config, d_model=HIDDEN, layer_number=1, pg_collection=groups
        ).double()


def worst_errors(layout, linear, packed):
    """Return the largest error of the output and of the gradients of input and parameters."""
    import megatron_burst.megatron as burst

    lengths = packed_ranks.ROOM if packed else (240,)
    params = packed_ranks.params(packed_ranks.ROOM, None) if packed else None
    draw = torch.Generator().manual_seed(3)
    hidden, seed = (torch.randn(240, 1, HIDDEN, generator=draw).double() for _ in range(2))
    with mixer(layout, linear) as layer:
        local = burst.shard_sequence(hidden, params, dim=0).requires_grad_()
        out, _ = layer(local, packed_seq_params=params)
        out.backward(burst.shard_sequence(seed, params, dim=0))
        results = {"out": out, "hidden": local.grad}
        results = {name: burst.gather_sequence(x, params) for name, x in results.items()}
        for name, parameter in layer.named_parameters():
            results[name] = parameter.grad.clone()
            dist.all_reduce(results[name])
        layer.zero_grad()
        all_hidden = hidden.clone().requires_grad_()
        expected = written_out(layer, all_hidden, lengths)
        expected.backward(seed)
        grads = {name: parameter.grad for name, parameter in layer.named_parameters()}
    expected = {"out": expected, "hidden": all_hidden.grad} | grads
    return {name: (results[name] - expected[name]).abs().max().item() for name in expected}


def errors_over_a_tree():
    """Return the same errors over a prefix tree, whose reference computes each trajectory."""
    import megatron_burst as mb
    from megatron_burst.plugins.rl.tree_pack import TreePack

    rank, ranks = dist.get_rank(), dist.get_world_size()
    turns = [[*range(9), *[50 + i] * 5, *[90 + j] * (3 * j + 1)] for i in range(2) for j in (0, 2)]
    tree = mb.trees.pack([*turns, turns[1], turns[0][:4]], multiple=ranks)
    draw = torch.Generator().manual_seed(3)
    hidden, seed = (torch.randn(len(tree.tokens), 1, HIDDEN, generator=draw).double() for _ in "ab")
    with mixer("zigzag", "auto") as layer:
        pack = TreePack.of(tree, layer.config)
        rows = pack.layout(None, ranks).positions(rank, pack.total)
        local = hidden[rows].requires_grad_()
        out, _ = layer(local, packed_seq_params=pack.params(local.device))
        times = torch.from_numpy(tree.multiplicity)[:, None, None]
        out.backward((times * seed)[rows])
        results = {"out": out.detach() * (times > 0)[rows], "hidden": local.grad}
        for name, parameter in layer.named_parameters():
            results[name] = parameter.grad.clone()
            dist.all_reduce(results[name])
        layer.zero_grad()
        all_hidden, expected = hidden.clone().requires_grad_(), torch.zeros_like(hidden)
        for path in tree.paths:
            path_out = written_out(layer, all_hidden[path], (len(path),))
            path_out.backward(seed[path])
            expected[path] = path_out.detach()
        grads = {name: parameter.grad for name, parameter in layer.named_parameters()}
    expected = {"out": expected[rows], "hidden": all_hidden.grad[rows]} | grads
    return {name: (results[name] - expected[name]).abs().max().item() for name in expected}


def written_out(layer, hidden, lengths):
    """Compute a mixer token by token.

    hidden [240, 1, HIDDEN]; documents have these lengths from the first token on, and the tokens
    after them are one more document.
    """
    starts = {sum(lengths[:i]) for i in range(len(lengths) + 1)}
    rows, state, out = [], None, []
    skip = torch.zeros(INNER + 2 * KEYS, dtype=torch.float64)
    for t in range(len(hidden)):
        if t in starts:
            rows, state = [skip] * (TAPS - 1), torch.zeros(HEADS, WIDTH, STATE).double()
        z, row, steps = (layer.in_proj.weight @ hidden[t, 0]).split(
            (INNER, INNER + 2 * KEYS, HEADS)
        )
        rows = [*rows[1 - TAPS :], row]
        mixed = layer.conv1d_bias + sum(
            layer.conv1d_weight[:, 0, tap] * rows[tap] for tap in range(TAPS)
        )
        x, keys, queries = (mixed * mixed.sigmoid()).split((INNER, KEYS, KEYS))
        x = x.view(HEADS, WIDTH)
        keys, queries = (
            each.view(GROUPS, 1, STATE).expand(GROUPS, HEADS // GROUPS, STATE).reshape(HEADS, STATE)
            for each in (keys, queries)
        )
        steps = F.softplus(steps + layer.dt_bias)
        factors = (-steps * layer.A_log.exp()).exp()[:, None, None]
        state = factors * state + steps[:, None, None] * x[:, :, None] * keys[:, None, :]
        y = (state * queries[:, None]).sum(-1) + layer.D[:, None] * x
        y = (y.flatten() * z * z.sigmoid()).view(GROUPS, -1)
        y = y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        out.append(layer.out_proj.weight @ (y.flatten() * layer.norm.weight))
    return torch.stack(out)[:, None]


def errors_in_bfloat16():
    """Return errors of output and input gradient, relative to the largest number.

    They are of a mixer over all ranks, and of Megatron's forward on one rank.
    """
    import megatron_burst.megatron as burst

    draw = torch.Generator().manual_seed(3)
    hidden, seed = (torch.randn(240, 1, HIDDEN, generator=draw).bfloat16() for _ in range(2))
    with mixer("zigzag", "scan") as layer:
        layer.bfloat16()
        local = burst.shard_sequence(hidden, None, dim=0).requires_grad_()
        out, _ = layer(local)
        out.backward(burst.shard_sequence(seed, None, dim=0))
        split = [burst.gather_sequence(x, None).double() for x in (out.detach(), local.grad)]
        del layer._burst_states
        all_hidden = hidden.clone().requires_grad_()
        out, _ = layer(all_hidden)
        out.backward(seed)
        single = [out.detach().double(), all_hidden.grad.double()]
        all_hidden = hidden.double().requires_grad_()
        expected = written_out(layer.double(), all_hidden, (240,))
        expected.backward(seed.double())
    exact = {"out": expected.detach(), "hidden": all_hidden.grad}
    return [
        {name: ((x - y).abs().max() / y.abs().max()).item()
         for x, (name, y) in zip(results, exact.items(), strict=True)}
        for results in (split, single)
    ]  # fmt: skip
