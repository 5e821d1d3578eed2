"""What ranks do for the tests of this folder: build models of Transformer Engine's layers.

    run as a script by each rank: on_ranks.py FUNCTION JSON    # prints what FUNCTION(*JSON) returns

The server that forks the ranks has imported Megatron and Transformer Engine (`te_on_cpu`).
"""

import os

import answer
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

import megatron_burst as mb
import megatron_burst.megatron as burst

HEADS, LAYERS = 4, 2
LATENT = {
    "multi_latent_attention": True, "q_lora_rank": None, "kv_lora_rank": 16, "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4, "v_head_dim": 12, "rope_type": "rope",
}  # fmt: skip


def model(fields, ours, implementation="transformer_engine", seed=1):
    """A GPT at context-parallel size 2, or a hybrid model where the fields have a pattern, with our
    core attention or that of its layers."""
    fields = {key: tuple(v) if isinstance(v, list) else v for key, v in fields.items()}
    latent, pattern = fields.pop("latent", False), fields.pop("pattern", None)
    kind, fields = (
        (MLATransformerConfig, LATENT | fields) if latent else (TransformerConfig, fields)
    )
    config = kind(
        **{
            "num_layers": LAYERS, "hidden_size": 32, "ffn_hidden_size": 48,
            "num_attention_heads": HEADS, "normalization": "RMSNorm", "gated_linear_unit": True,
            "activation_func": F.silu, "add_bias_linear": False, "hidden_dropout": 0.0,
            "attention_dropout": 0.0, "context_parallel_size": 2, "use_cpu_initialization": True,
            "gradient_accumulation_fusion": False, "persist_layer_norm": False,
            "apply_rope_fusion": False, "bias_dropout_fusion": False, **fields,
        }
    )  # fmt: skip
    if ours:
        burst.install("zigzag")
        burst.configure(config, mb.BurstConfig(), seq_length=64)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    if pattern is not None:
        return HybridModel(
            config, hybrid_stack_spec, vocab_size=64, max_sequence_length=64,
            hybrid_layer_pattern=pattern, position_embedding_type="rope",
        )  # fmt: skip
    theirs = implementation == "transformer_engine"
    layers = get_gpt_decoder_block_spec(
        config, use_transformer_engine=theirs, normalization="RMSNorm"
    )
    further = None
    if config.mtp_num_layers:
        further = get_gpt_mtp_block_spec(config, layers, use_transformer_engine=theirs)
    return GPTModel(
        config, layers, vocab_size=64, max_sequence_length=64, position_embedding_type="rope",
        mtp_block_spec=further,
    )  # fmt: skip


def sharded(gpt):
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    return gpt.sharded_state_dict(metadata=metadata)


def core_attentions(gpt):
    return {
        name: module for name, module in gpt.named_modules() if name.endswith(".core_attention")
    }


def built(fields):
    """The classes of core attention, ours and theirs, with what each says of windows and sinks; and
    the keys with their shapes in checkpoints of both forms."""
    found = {}
    for ours in (True, False):
        gpt = model(dict(fields), ours)
        cores = core_attentions(gpt)
        found["ours" if ours else "theirs"] = {
            "classes": {name: type(core).__name__ for name, core in cores.items()},
            "windows": [list(w) if (w := _window(core)) else None for core in cores.values()],
            "sinks": [_shape(core.softmax_offset) for core in cores.values()],
            "sharded": {
                key: [list(value.global_shape), str(getattr(value, "dtype", None))]
                for key, value in sorted(_flat(sharded(gpt)).items())
            },
            "plain": {key: _shape(value) for key, value in sorted(gpt.state_dict().items())},
        }
    return found


def _flat(state):
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedBase, apply_factories

    apply_factories(state)
    return {value.key: value for value in nested_values(state) if isinstance(value, ShardedBase)}


def _window(core):
    if isinstance(core, burst.BurstCoreAttention):
        return core._window
    return core.window_size if core.window_size != (-1, 0) else None


def _shape(value):
    return None if value is None else list(getattr(value, "shape", [type(value).__name__]))


def exchanged(fields, folder, first, second, plain, without):
    """Save a model whose attention is `first` ("ours", "theirs"), load it into one with `second`:
    all names of tensors, of those that differ before and after. Keys that end in `without` are not
    asked for."""
    source = model(dict(fields), first == "ours", seed=1)
    target = model(dict(fields), second == "ours", seed=2)
    with torch.no_grad():
        for number, parameter in enumerate(source.parameters()):
            parameter.add_(0.01 * (number + 1))  # also what starts as ones or zeros
    before = differing(source, target)
    if plain:
        target.load_state_dict(source.state_dict(), strict=True)
    else:
        if dist.get_rank() == 0:
            os.makedirs(folder)
        dist.barrier()
        dist_checkpointing.save(sharded(source), folder)
        asked = {k: v for k, v in sharded(target).items() if not (without and k.endswith(without))}
        target.load_state_dict(dist_checkpointing.load(asked, folder), strict=True)
    names = [name for name, _ in source.named_parameters()]
    return {"before": before, "after": differing(source, target), "names": names}


def differing(one, other):
    pairs = dict(other.named_parameters())
    assert pairs.keys() == dict(one.named_parameters()).keys()
    return [name for name, value in one.named_parameters() if not torch.equal(value, pairs[name])]


def split_over_all():
    parallel_state.initialize_model_parallel(context_parallel_size=dist.get_world_size())


if __name__ == "__main__":
    answer.main(globals(), split_over_all)
