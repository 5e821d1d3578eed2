"""Code that the ranks of the DSA tests run.

A GPT or hybrid model of Megatron on a CPU runs some steps of forward and backward in Megatron's own
schedule.
"""

from functools import partial

import torch
import torch.distributed as dist
from session import log_lines, parallel

SEQUENCE, VOCABULARY, HIDDEN, HEADS = 64, 61, 32, 4


def config(sizes, **changes):
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    fields = {
        "num_layers": 2, "hidden_size": HIDDEN, "ffn_hidden_size": 48, "q_lora_rank": 24,
        "num_attention_heads": HEADS, "kv_lora_rank": 16, "qk_head_dim": 8, "v_head_dim": 8,
        "qk_pos_emb_head_dim": 4, "rope_type": "rope", "rotary_base": 10000, "qk_layernorm": True,
        "normalization": "RMSNorm", "gated_linear_unit": True, "add_bias_linear": False,
        "activation_func": torch.nn.functional.silu, "hidden_dropout": 0.0,
        "attention_dropout": 0.0, "init_method_std": 0.3, "experimental_attention_variant": "dsa",
        # With as many heads no two scores are 0, of which Megatron takes any.
        "dsa_indexer_n_heads": 16, "dsa_indexer_head_dim": 8, "dsa_indexer_topk": 6,
        "dsa_indexer_loss_coeff": 0.5, "dsa_indexer_use_sparse_loss": True,
        "dsa_indexer_rotate_activation": False, "transformer_impl": "local",
        "calculate_per_token_loss": True, "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False, "persist_layer_norm": False,
        "bias_activation_fusion": False, "bias_dropout_fusion": False,
        "masked_softmax_fusion": False, "apply_rope_fusion": False,
        "pipeline_dtype": torch.float32,
    }  # fmt: skip
    return MLATransformerConfig(**fields | sizes | changes)


def build(settings, pattern=None):
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel

    from megatron_burst.plugins.testing import local_specs

    common = {
        "vocab_size": 64, "max_sequence_length": SEQUENCE, "position_embedding_type": "rope",
        "pre_process": parallel_state.is_pipeline_first_stage(),
        "post_process": parallel_state.is_pipeline_last_stage(),
    }  # fmt: skip
    if pattern is None:
        return GPTModel(settings, local_specs.local_block_spec(settings), **common)
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    spec = local_specs.local_hybrid_stack_spec()
    return HybridModel(settings, spec, hybrid_layer_pattern=pattern, **common)


def batches(count):
    """Return whole sequences [1, SEQUENCE] of tokens and labels, and the loss mask."""
    draw = torch.Generator().manual_seed(7)
    for _ in range(count):
        tokens = torch.randint(VOCABULARY, (1, SEQUENCE + 1), generator=draw)
        mask = (torch.rand(1, SEQUENCE, generator=draw) > 0.2).float()
        yield {
            "tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous(),
            "loss_mask": mask, "position_ids": torch.arange(SEQUENCE)[None],
        }  # fmt: skip


def packed_params(lengths):
    from megatron.core.packed_seq_params import PackedSeqParams

    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends,
        max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths),
    )  # fmt: skip


def run(sizes, chosen, changes, lengths, pattern, count):
    """Return the results of `count` micro-batches.

    These are the loss of each per token, the indexer's loss as Megatron logs it, gradients by name
    and their norm, and the logged "lines". chosen has fields of BurstConfig, or is None for stock
    Megatron.
    """
    import megatron_burst as mb
    import megatron_burst.megatron as burst

    layout = (chosen or {}).get("layout", "zigzag")
    groups = {name: size for name, size in sizes.items() if name != "sequence_parallel"}
    with parallel(layout, **groups):
        settings = config(sizes, **(changes or {}))
        with log_lines() as lines:
            if chosen is not None:
                burst.configure(settings, mb.BurstConfig(**chosen), seq_length=SEQUENCE)
            return _trained(settings, lengths, pattern, count) | {"lines": lines}


def _trained(settings, lengths, pattern, count):
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.experimental_attention_variant.dsa import (
        DSAIndexerLossLoggingHelper as Helper,
    )

    import megatron_burst.megatron as burst

    # As if stages were one: layers of all of them, and the rank's own taken.
    torch.manual_seed(5 + 100 * parallel_state.get_pipeline_model_parallel_rank())
    model_parallel_cuda_manual_seed(5)
    model = build(settings, pattern)
    model = DistributedDataParallel(settings, DistributedDataParallelConfig(), model)
    settings.finalize_model_grads_func = finalize_model_grads
    Helper.tracker.clear()
    requested = lengths and packed_params(lengths)

    def step(iterator, model):
        batch = next(iterator)
        own = {name: burst.shard_sequence(x, requested, dim=1) for name, x in batch.items()}
        losses = model(
            own["tokens"], own["position_ids"], None, labels=own["labels"],
            packed_seq_params=requested and packed_params(lengths),
        )  # fmt: skip
        return losses, partial(_sum, own["loss_mask"])

    model.zero_grad_buffer()
    reports = get_forward_backward_func()(
        forward_step_func=step, data_iterator=[batches(count)], model=[model],
        num_microbatches=count, seq_length=SEQUENCE, micro_batch_size=1,
    )  # fmt: skip
    totals = torch.stack(reports) if reports else torch.zeros(count, 2)
    for group in (
        parallel_state.get_context_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
    ):
        dist.all_reduce(totals, group=group)
    logged = {}
    Helper.track_indexer_metrics(1.0, 1, None, total_loss_dict=logged)
    Helper.tracker.clear()
    grads = {
        name: parameter.main_grad.clone() for name, parameter in model.module.named_parameters()
    }
    return {
        "loss": totals[:, 0] / totals[:, 1], "indexer": logged.get("indexer loss"), "grads": grads,
        "norm": sum(float(g.double().square().sum()) for g in grads.values()) ** 0.5,
    }  # fmt: skip


def overlapped(sizes, chosen, changes, steps=2):
    """Run two steps of Megatron's data parallelism with overlapped reductions.

    Return trainable parameters of indexers by name, the largest change of an indexer's weights, and
    the logged "lines".
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    import megatron_burst as mb
    import megatron_burst.megatron as burst

    with parallel("zigzag", **sizes), log_lines() as lines:
        settings = config(sizes, **changes)
        burst.configure(settings, mb.BurstConfig(**chosen), seq_length=SEQUENCE)
        torch.manual_seed(5)
        model_parallel_cuda_manual_seed(5)
        requested = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=1000)
        model = DistributedDataParallel(settings, requested, build(settings))
        reached = []
        for batch in batches(steps):
            own = {name: burst.shard_sequence(x) for name, x in batch.items()}
            model.zero_grad_buffer()
            losses = model(own["tokens"], own["position_ids"], None, labels=own["labels"])
            (losses * own["loss_mask"]).sum().backward()
            model.finish_grad_sync()
            total = (losses * own["loss_mask"]).sum().detach()
            dist.all_reduce(total, group=parallel_state.get_context_parallel_group())
            reached.append(float(total))
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.data -= 0.01 * parameter.main_grad
        trained = [
            name
            for name, parameter in model.module.named_parameters()
            if "indexer" in name and parameter.requires_grad
        ]
        return {"losses": reached, "trained": trained, "lines": lines}


def _sum(mask, losses):
    total, tokens = (losses.float() * mask).sum(), mask.sum()
    return total, tokens.to(torch.int), torch.stack([total.detach(), tokens])
