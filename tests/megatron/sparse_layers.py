"""What ranks of `test_sparse_layers` run: a small GPT in fp64 whose layers have a selection rule."""

import math
import zlib
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
SIZES = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")


def build(changes, layers, burst):
    """This rank's part of a model, which does not depend on parallel sizes, in Megatron's data
    parallelism. layers: arguments of `mb.sparse_layer_spec`, None for Megatron's own attention."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    import megatron_burst as mb

    config = settings({"num_layers": 2, "num_query_groups": 2, "normalization": "RMSNorm", **changes})
    config.finalize_model_grads_func = finalize_model_grads
    mb.megatron.configure(config, mb.BurstConfig(**burst))
    spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
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
    """Their bounds in a packed batch."""
    return [0, 16, 24, 64]


def batch(step, packed):
    """Tokens, labels and positions of this rank, and its documents."""
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
    given = {} if params is None else {"packed_seq_params": params}
    return [mb.megatron.shard_sequence(x, dim=1, **given) for x in whole], params


def forward_step(packed, steps, data, model):
    (tokens, labels, positions), params = batch(next(data), packed)
    losses = model(tokens, positions, None, labels=labels, packed_seq_params=params)

    def loss(losses):
        total, count = losses.sum(), torch.tensor(losses.numel())
        steps.append(total.detach().double())  # Megatron divides it in place
        return total, count.int(), {"loss": total.detach()}

    return losses, loss


def train(changes, layers, burst=None, steps=3, rate=0.05, packed=False, micro=2):
    """[(loss, indexer's loss, {name: gradient})] of steps of plain gradient descent, over all ranks.

    Gradients are of whole parameters.
    """
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.experimental_attention_variant import dsa

    sizes = {name: changes[name] for name in SIZES if name in changes}
    found, helper = [], dsa.DSAIndexerLossLoggingHelper
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
            gradients = {p.whole: whole(p, p.main_grad) for p in model.parameters()}
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= rate * parameter.main_grad
            found.append((total.item() / (LENGTH * micro), index, gradients))
    return found


def whole(parameter, x):
    from megatron.core import parallel_state

    if not getattr(parameter, "tensor_model_parallel", False):
        return x.clone()
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, parameter.partition_dim)
