"""LLaDA 1.5 of Megatron-Bridge, tiny and random, on the ranks of one sequence."""

import itertools
from types import SimpleNamespace

import torch
from harness import filled, start, write
from qwen import TEXT

DOCUMENTS = [0, 8, 16, 48, 64]


def local_layers(config):
    """Return Megatron's local layers, with Bridge's core attention."""
    from megatron.bridge.diffusion.models.llada15.llada15_attention import (
        LLaDA15TEDotProductAttention,
    )
    from megatron.bridge.models.gpt_provider import local_layer_spec

    layers = local_layer_spec(config)
    layers.submodules.self_attention.submodules.core_attention = LLaDA15TEDotProductAttention
    return layers


def provider(ranks, **changes):
    import gemma
    from megatron.bridge.diffusion.models.llada15.llada15_provider import LLaDA15ModelProvider

    sizes = TEXT | {"context_parallel_size": ranks, "transformer_layer_spec": local_layers}
    return gemma.of(LLaDA15ModelProvider, sizes | {"position_embedding_type": "rope"} | changes)


def run(work):
    """Run one rank; rank 0 writes [loss, {name: norm of the gradient}], summed over ranks.

    One rank runs the documents of a packed batch one after the other.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    ranks = start(work)
    made = provider(ranks, **work.get("changes", {}))
    if ranks > 1:
        from megatron_burst.recipes import apply_burst

        apply_burst(SimpleNamespace(model=made), **work.get("choices", {}))
    made.finalize()
    model = filled(made.provide(True, True))
    draw = torch.Generator().manual_seed(3)
    tokens, labels = torch.randint(0, 64, (2, 1, 64), generator=draw)
    packed, mask = work.get("packed"), (torch.rand(1, 64, generator=draw) < 0.7).float()
    if ranks == 1:
        ends = DOCUMENTS if packed else [0, 64]
        parts = [slice(*pair) for pair in itertools.pairwise(ends)]
        losses = [model(tokens[:, i], None, None, labels=labels[:, i]) for i in parts]
        return write(model, (torch.cat(losses, 1) * mask).sum(), work["output"])
    from megatron_burst.megatron import shard_sequence

    params = None
    if packed:
        ends = torch.tensor(DOCUMENTS, dtype=torch.int32)
        params = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=32,
            max_seqlen_kv=32,
        )  # fmt: skip
    tokens, labels, mask = (shard_sequence(x, params) for x in (tokens, labels, mask))
    losses = model(tokens, None, None, labels=labels, packed_seq_params=params)
    return write(model, (losses * mask).sum(), work["output"])
