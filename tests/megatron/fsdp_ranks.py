"""Ranks of the tests of fully sharded data parallelism: a small GPT over DP x CP."""

import contextlib
from unittest import mock

import session
import torch
import torch.distributed as dist

LENGTH, VOCABULARY, STEPS = 32, 64, 2


def trained(how, **options):
    """Return [(loss of all tokens, {parameter: its whole gradient})] of every step.

    how: "summed" sums the gradients of whole parameters over all ranks by hand; "torch" shards
    parameters over all ranks with torch's FSDP2. options: of BurstAttention.
    """
    with session.parallel("zigzag", context_parallel_size=2):
        model = whole = build(options)
        if how != "summed":
            with on_the_cpu():
                model = by_torch(whole)
        names = dict(whole.named_parameters())
        assert all(hasattr(x, "full_tensor") == (how == "torch") for x in names.values())
        step = torch.optim.SGD(model.parameters(), lr=0.3)
        history = []
        for number in range(STEPS):
            step.zero_grad()
            loss = model(**batch(number)).mean()
            loss.backward()
            if how == "summed":
                for parameter in names.values():
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= dist.get_world_size()
            total = loss.detach().clone()
            dist.all_reduce(total)
            grads = {name: gathered(parameter.grad) for name, parameter in names.items()}
            history.append((total.item() / dist.get_world_size(), grads))
            step.step()
        return history


def gathered(grad):
    grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return grad.detach().clone()


def batch(number):
    """Return this rank's rows of the sequence of its data-parallel rank."""
    from megatron.core import parallel_state

    import megatron_burst as mb

    draw = torch.Generator().manual_seed(10 * number + parallel_state.get_data_parallel_rank())
    tokens = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=draw)
    given = {
        "input_ids": tokens[:, :-1], "labels": tokens[:, 1:],
        "position_ids": torch.arange(LENGTH).expand(2, -1),
    }  # fmt: skip
    zigzag, rank = mb.layout.make("zigzag", cp_size=2), parallel_state.get_context_parallel_rank()
    mine = {name: mb.shard(x, zigzag, rank, dim=1) for name, x in given.items()}
    return mine | {"attention_mask": None}


def build(options):
    """Return a GPT of two layers in fp64, the same on every rank."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.transformer_config import TransformerConfig

    import megatron_burst as mb
    import megatron_burst.megatron as burst

    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2,
        context_parallel_size=2, normalization="RMSNorm", hidden_dropout=0.0,
        attention_dropout=0.0, use_cpu_initialization=True, gradient_accumulation_fusion=False,
        persist_layer_norm=False, bias_dropout_fusion=False, masked_softmax_fusion=False,
        apply_rope_fusion=False, transformer_impl="local",
    )  # fmt: skip
    burst.configure(config, mb.BurstConfig(**options))
    random.model_parallel_cuda_manual_seed(7, force_reset_rng=True)
    torch.manual_seed(7)
    return GPTModel(
        config, get_gpt_layer_local_spec(normalization="RMSNorm"), VOCABULARY, LENGTH,
        position_embedding_type="rope", share_embeddings_and_output_weights=False,
    ).double()  # fmt: skip


@contextlib.contextmanager
def on_the_cpu():
    """Make Megatron's device meshes on the CPU in place of CUDA devices."""
    from torch.distributed import DeviceMesh

    make = DeviceMesh.from_group

    def on_cpu(group, device_type, *given, **named):
        return make(group, "cpu", *given, **named)

    with mock.patch.object(DeviceMesh, "from_group", on_cpu):
        yield


def by_torch(model):
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed import TorchFullyShardedDataParallel as Sharded

    return Sharded(model.config, DistributedDataParallelConfig(), model)
