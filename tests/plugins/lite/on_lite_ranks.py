"""Ranks of the tests: tiny models of Megatron Lite, from its own protocols and batches."""

import importlib
import os
import sys
from itertools import pairwise

import torch
import torch.distributed as dist
from recurrences import Case, tokens

SIZES = {
    "qwen3_moe": {
        "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 128, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "router_aux_loss_coef": 0.0,
        "num_nextn_predict_layers": 1, "layer_types": ["full_attention"] * 2,
    },
    "qwen3_5": {
        "num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "router_aux_loss_coef": 0.0,
        "shared_expert_intermediate_size": 16, "linear_num_key_heads": 1, "linear_key_head_dim": 8,
        "linear_num_value_heads": 3, "linear_value_head_dim": 4, "partial_rotary_factor": 0.5,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "kimi_k2": {
        "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4,
        "num_key_value_heads": 4, "vocab_size": 128, "intermediate_size": 32,
        "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "aux_loss_alpha": 0.0, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4, "v_head_dim": 8,
    },
}  # fmt: skip
CONFIGS = {"qwen3_moe": "Qwen3MoEConfig", "qwen3_5": "Qwen35Config", "kimi_k2": "KimiK2Config"}
LENGTHS = ([13, 40, 3], [29, 9])  # of the documents of two micro-batches


def prepare(source):
    """Prepare a process once: Megatron Lite on its path, and a CPU in place of CUDA."""
    import te_in_torch

    os.environ["MEGATRON_LITE_DISABLE_JIT_FUSER"] = "1"  # Lite's own; else a compiler is needed
    te_in_torch.install()
    sys.path.insert(0, source)
    torch.nn.Module.cuda = lambda self, *_: self
    torch.cuda.Stream = object
    torch.cuda.get_rng_state, torch.cuda.set_rng_state = torch.get_rng_state, torch.set_rng_state


def protocol(name):
    return importlib.import_module(f"megatron.lite.model.{name}.lite.protocol")


def build(name, cp, **more):
    """Return (protocol, bundle of the protocol) with random weights, equal on all ranks."""
    from megatron.lite.runtime.contracts import ParallelConfig

    config = importlib.import_module(f"megatron.lite.model.{name}.config")
    sizes = getattr(config, CONFIGS[name])(**SIZES[name])
    made = protocol(name)
    choices = {"optimizer": None, "use_thd": True, **more}
    bundle = made.build_model(
        sizes, impl_cfg=made.ImplConfig(parallel=ParallelConfig(cp=cp), **choices)
    )
    (model,) = bundle.chunks
    model.double()
    draw = torch.Generator().manual_seed(0)
    for _, weight in sorted(model.named_parameters()):
        weight.data = torch.randn(weight.shape, generator=draw, dtype=torch.float64) * 0.3
    for part in model.modules():
        if hasattr(part, "moe_permute_fusion"):
            part.moe_permute_fusion = False
        if hasattr(getattr(part, "dispatcher", None), "moe_permute_fusion"):
            part.dispatcher.moe_permute_fusion = False
    return made, bundle


def batches():
    from megatron.lite.runtime.contracts.data import PackedBatch

    draw = torch.Generator().manual_seed(1)
    for lengths in LENGTHS:
        tokens = torch.randint(128, (sum(lengths),), generator=draw)
        mask = (torch.rand(sum(lengths), generator=draw) < 0.8).double()
        yield PackedBatch(
            input_ids=tokens, labels=tokens.clone(), loss_mask=mask,
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
        )  # fmt: skip


def gradients(model):
    """Return gradients summed over ranks, by name; each rank has those of its own tokens."""
    found = {}
    for name, weight in sorted(model.named_parameters()):
        grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        dist.all_reduce(grad)
        found[name] = grad
    return found


def trained(name, cp, swap=None, more=None):
    """Run two micro-batches forward and then backward, with Lite's own step.

    Return (log-probabilities of every document, losses, MTP losses, gradients). swap: our options,
    or None.
    """
    from megatron.lite.model.protocol_utils import pack_thd_forward_kwargs

    from megatron_burst.plugins.lite.swap import set_attention_backend

    made, bundle = build(name, cp, **(more or {}))
    (model,) = bundle.chunks
    if swap is not None:
        set_attention_backend(model, **swap)
    logs, losses, further = [], [], []
    for batch in batches():
        out = bundle.forward_step(model, batch)
        mask = pack_thd_forward_kwargs(model, batch)["loss_mask"]
        losses.append(-(out["log_probs"] * mask).sum())
        further.append(out.get("mtp_loss", torch.zeros(())))
        logs += made.unpack_forward_output(model, batch, out["log_probs"].detach()).unbind()
    sum(losses).backward()
    return [*logs], _sum(losses), _sum(further), gradients(model)


def _sum(values):
    total = torch.stack([value.detach().double() for value in values])
    dist.all_reduce(total)
    return total


def one_by_one(name):
    """Return the same as `trained`, for one rank that runs each document alone and unpacked.

    Lite's own layers run, except the delta rule, which is in float32 there and is computed by hand.
    """
    from megatron.lite.primitive.modules import gated_delta_net

    gated_delta_net.torch_chunk_gated_delta_rule = delta_rule
    _, bundle = build(name, 1, use_thd=False)
    (model,) = bundle.chunks
    logs, losses = [], []
    for batch in batches():
        ends = [0, *batch.seq_lens.cumsum(0).tolist()]
        loss = 0.0
        for start, stop in pairwise(ends):
            tokens, mask = (x[None, start:stop] for x in (batch.input_ids, batch.loss_mask))
            labels, mask = (torch.nn.functional.pad(x[:, 1:], (0, 1)) for x in (tokens, mask))
            places = torch.arange(stop - start)[None]
            out = model(input_ids=tokens, labels=labels, position_ids=places)
            loss = loss - (out["log_probs"] * mask).sum()
            logs.append(out["log_probs"][0].detach())
        losses.append(loss)
    sum(losses).backward()
    return logs, _sum(losses), torch.zeros(2, dtype=torch.float64), gradients(model)


def delta_rule(q, k, v, *, g, beta, **states):
    """Compute the delta rule of one document, with rows in dimension 1 and no other states."""
    case = Case(*(x.transpose(0, 1) for x in (q, k, v, g, beta)))
    before = v.new_zeros(len(v), v.shape[2], k.shape[3], v.shape[3])
    out, _ = tokens(case, before, q.shape[3] ** -0.5)
    return out.transpose(0, 1), None


def swapped_back_and_forth():
    """Return the effects of each swap on a model of Qwen3 MoE.

    They are class names of attention, and whether parameters and checkpoint keys are unchanged.
    """
    from megatron_burst.plugins.lite.swap import set_attention_backend

    _, bundle = build("qwen3_moe", 2)
    (model,) = bundle.chunks
    weights = [id(weight) for weight in model.parameters()]

    def now():
        assert [id(weight) for weight in model.parameters()] == weights
        cores = {type(layer.attn.core_attn).__name__ for layer in model.layers}
        extra = sum("_extra_state" in key for key in model.state_dict())
        return [*cores], extra, model.attention_backend

    seen = [now()]
    groups = set_attention_backend(model)
    seen.append(now())
    model.set_attention_backend("te")  # Lite's own
    seen.append(now())
    assert set_attention_backend(model, groups=groups, algorithm="ring") is groups
    seen.append(now())
    assert set_attention_backend(model, "te") is None
    seen.append(now())
    return seen


def refused(name, more):
    from megatron_burst.plugins.lite.swap import set_attention_backend

    _, bundle = build(name, 2, **more)
    try:
        set_attention_backend(bundle.chunks)
    except ValueError as error:
        return str(error)


def documented(text):
    """Run a block of the page, which has built a model."""
    _, bundle = build("qwen3_moe", 2)
    batch = next(batches())
    exec(compile(text, "docs/megatron-lite.md", "exec"), {"bundle": bundle, "batch": batch})
