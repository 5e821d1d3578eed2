"""What ranks of `test_rl` run: a small GPT in fp64 whose weights do not depend on parallel sizes,
and trajectories through it, one at a time on one rank by Megatron's own code, and by `mb.rl`."""

import contextlib
import zlib
from types import SimpleNamespace

import torch
import torch.distributed as dist
from session import parallel

VOCABULARY, TEMPERATURE = 32, 0.7
# Two prompts; branches inside answers, one trajectory inside another, equal ones, one token, none.
TRAJECTORIES = [
    [5, 6, 7, 8, 9, 1, 2, 3], [5, 6, 7, 8, 9, 1, 2, 4, 4, 4, 11], [5, 6, 7, 8, 9, 12],
    [5, 6, 7], [9, 9, 30, 31, 2, 2, 2, 2, 2, 2, 2, 2, 7], [9, 9, 30, 31, 2, 2, 8], [5, 6, 7],
    [3], [], [9, 9, 30, 31, 2, 2, 2, 2, 2, 2, 2, 2, 7, 1, 0, 1],
]  # fmt: skip
WEIGHTS = [1.0, -0.5, 2.0, 0.25, 1.5, -1.0, 0.75, 1.0, 1.0, 0.5]


def settings(changes):
    """The configuration of a small model; with `multi_latent_attention`, Megatron's for latents."""
    from megatron.core.transformer import transformer_config

    latent = changes.get("multi_latent_attention", False)
    kind = "MLATransformerConfig" if latent else "TransformerConfig"
    return getattr(transformer_config, kind)(**{
        "num_layers": 4, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4,
        "num_query_groups": 2, "qk_layernorm": True, "hidden_dropout": 0.0,
        "attention_dropout": 0.0, "params_dtype": torch.float64, "pipeline_dtype": torch.float64,
        "use_cpu_initialization": True, "gradient_accumulation_fusion": False,
        "persist_layer_norm": False, "bias_activation_fusion": False, "bias_dropout_fusion": False,
        "masked_softmax_fusion": False, "apply_rope_fusion": False, **changes,
    })  # fmt: skip


def gpt(config, **stage):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.moe import moe_utils

    # 0.16 reads it, and does not define it without Transformer Engine.
    vars(moe_utils).setdefault("te_general_gemm", None)
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, moe_grouped_gemm=False, qk_layernorm=True
    )
    return GPTModel(
        config, spec, VOCABULARY, 64, position_embedding_type="rope",
        share_embeddings_and_output_weights=False, **stage,
    ).double()  # fmt: skip


def build(changes, choices, wrapped=True):
    """The chunks of this rank's stages."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    import megatron_burst as mb

    config = settings(changes)
    if choices is not None:
        mb.megatron.configure(config, mb.BurstConfig(**choices))
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    virtual = config.virtual_pipeline_model_parallel_size
    chunks = []
    for chunk in range(virtual or 1):
        stage = {"vp_stage": chunk} if virtual else {}
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, **stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, **stage)
        model = gpt(config, pre_process=first, post_process=last, **stage)
        own = config.num_layers // stages // (virtual or 1)
        offset = (chunk * stages + parallel_state.get_pipeline_model_parallel_rank()) * own
        for name, parameter in model.named_parameters():
            parameter.whole = whole_name(name, offset)
            parameter.data.copy_(own_part(parameter, weights(parameter)))
        if wrapped:
            model = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
        chunks.append(model)
    return chunks


def whole_name(name, offset):
    """The name of a parameter with the number of its layer in the whole model."""
    before, mark, after = name.partition("decoder.layers.")
    if not mark:
        return name
    number, _, rest = after.partition(".")
    return f"{before}{mark}{int(number) + offset}.{rest}"


def weights(parameter):
    from megatron.core import parallel_state

    shape = list(parameter.shape)
    if getattr(parameter, "tensor_model_parallel", False):
        shape[parameter.partition_dim] *= parallel_state.get_tensor_model_parallel_world_size()
    draw = torch.Generator().manual_seed(zlib.crc32(parameter.whole.encode()))
    noise = torch.randn(shape, generator=draw, dtype=torch.float64)
    return (
        1 + 0.2 * noise
        if "norm" in parameter.whole and "weight" in parameter.whole
        else (0.3 * noise)
    )


def own_part(parameter, whole):
    from megatron.core import parallel_state

    if not getattr(parameter, "tensor_model_parallel", False):
        return whole
    size = parallel_state.get_tensor_model_parallel_world_size()
    parts = whole.chunk(size, parameter.partition_dim)
    return parts[parallel_state.get_tensor_model_parallel_rank()]


@contextlib.contextmanager
def model(changes, choices, **more):
    from megatron.core.tensor_parallel import random

    sizes = {name: value for name, value in changes.items() if name.endswith("parallel_size")}
    virtual = changes.get("virtual_pipeline_model_parallel_size")
    with parallel((choices or {}).get("layout", "zigzag"), **sizes):
        random.model_parallel_cuda_manual_seed(7, force_reset_rng=True)
        assert virtual is None or sizes["virtual_pipeline_model_parallel_size"] == virtual
        yield build(changes, choices, **more)


def the_loss(part):
    """Another weight for every token of every trajectory, and something that is not linear."""
    found = 0.0
    for i, own, uncertain in zip(part.index, part.logprobs, part.entropies, strict=True):
        at = torch.arange(len(own), dtype=own.dtype, device=own.device)
        found = found + WEIGHTS[i] * ((1 + at).cos() * own + 0.1 * uncertain).sum()
        found = found + 0.01 * (own.exp() ** 2).sum()
    return found


def no_scalar(part):
    return part.logprobs[0]


def alone(changes, window=1000):
    """Log-probabilities, entropies, loss and gradients by name, each trajectory by itself through
    Megatron's own model on one rank, with a dense mask, and a dense log-softmax."""
    with model(changes, None, wrapped=False) as (gpt,):
        found = []
        for tokens in TRAJECTORIES:
            if len(tokens) < 2:
                found.append((torch.zeros(0, dtype=torch.float64),) * 2)
                continue
            ids = torch.tensor(tokens)[None]
            seen = torch.arange(len(tokens))
            hidden = (seen[:, None] < seen) | (seen[:, None] - seen > window)
            logits = gpt(ids, seen[None], hidden[None, None])[0, :-1] / TEMPERATURE
            logs = logits.log_softmax(-1)
            found.append((logs.gather(1, ids[0, 1:, None])[:, 0], -(logs.exp() * logs).sum(-1)))
        logprobs, entropies = zip(*found, strict=True)
        every = SimpleNamespace(index=range(10), logprobs=logprobs, entropies=entropies)
        loss = the_loss(every)
        loss.backward()
        grads = {p.whole: p.grad for p in gpt.parameters()}
        return (
            [x.detach() for x in logprobs], [x.detach() for x in entropies], loss.detach(), grads
        )  # fmt: skip


def worst(changes, choices, expected, options):
    """The largest errors of log-probabilities, entropies, loss and gradients on this rank, and
    which trajectories it has."""
    import megatron_burst as mb

    logprobs, entropies, _, grads = expected
    with model(changes, choices) as chunks:
        for chunk in chunks:
            chunk.zero_grad_buffer()
        options = {"temperature": TEMPERATURE, **options}
        before = mb.rl.logprobs(chunks, TRAJECTORIES, **options)
        found = mb.rl.logprobs(chunks, TRAJECTORIES, loss=the_loss, **options)
        assert (before.index, before.loss) == (found.index, None)
        errors = {"logprobs": 0.0, "entropies": 0.0, "gradients": 0.0}
        for place, i in enumerate(found.index):
            for values, want, name in (
                (found.logprobs, logprobs, "logprobs"), (found.entropies, entropies, "entropies"),
                (before.logprobs, logprobs, "logprobs"),
            ):  # fmt: skip
                gap = (values[place] - want[i]).abs()
                errors[name] = max(errors[name], float(gap.max()) if len(gap) else 0.0)
        for chunk in chunks:
            for parameter in chunk.parameters():
                gap = (parameter.main_grad - own_part(parameter, grads[parameter.whole])).abs()
                errors["gradients"] = max(errors["gradients"], float(gap.max()))
        own = float(found.loss) if found.loss is not None else None
        return errors, found.index, own, (found.tokens, found.rows)


def hybrid(pattern):
    """Trees and documents through a HybridModel over four ranks: their numbers of rows, and the
    largest differences of log-probabilities and of gradients."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.tensor_parallel import random

    import megatron_burst as mb
    from megatron_burst.plugins.testing.local_specs import local_hybrid_stack_spec

    found = []
    with parallel("zigzag", context_parallel_size=4):
        random.model_parallel_cuda_manual_seed(7, force_reset_rng=True)
        config = settings({
            "context_parallel_size": 4, "num_layers": len(pattern), "is_hybrid_model": True,
            "mamba_num_heads": 8, "mamba_head_dim": 8, "mamba_state_dim": 8,
            "mamba_num_groups": 2, "qk_layernorm": False,
        })  # fmt: skip
        mb.megatron.configure(config, mb.BurstConfig())
        whole = HybridModel(
            config, local_hybrid_stack_spec(), VOCABULARY, 64, hybrid_layer_pattern=pattern,
            position_embedding_type="rope", share_embeddings_and_output_weights=False,
        ).double()  # fmt: skip
        for parameter in whole.parameters():
            if parameter.dim() > 1:
                draw = torch.Generator().manual_seed(parameter.numel())
                noise = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
                parameter.data.copy_(0.2 * noise)
        whole = DistributedDataParallel(config, DistributedDataParallelConfig(), whole)
        for tree in (True, False):
            whole.zero_grad_buffer()
            part = mb.rl.logprobs(whole, TRAJECTORIES[:6], loss=the_loss, tree=tree, max_tokens=48)
            found.append((part, [p.main_grad.clone() for p in whole.parameters()]))
    (trees, ours), (documents, theirs) = found
    values, wanted = (torch.cat(part.logprobs) for part in (trees, documents))
    apart = [float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)]
    return trees.rows, documents.rows, float((values - wanted).abs().max()), max(apart)


def router_gradient(changes):
    """The norm of a router's gradient where nothing but the balance loss has one."""
    import megatron_burst as mb

    with model(changes, {}) as chunks:
        chunks[0].zero_grad_buffer()
        mb.rl.logprobs(
            chunks, TRAJECTORIES, loss=lambda part: sum(0.0 * each.sum() for each in part.logprobs)
        )
        (found,) = [p for p in chunks[0].parameters() if "layers.0.mlp.router.weight" in p.whole]
        return float(found.main_grad.norm())


def recorded():
    """Whether activations of a call without a loss are kept for backward."""
    import megatron_burst as mb

    with model({"context_parallel_size": 4}, {}) as chunks:
        kept = []
        chunks[0].module.decoder.register_forward_hook(
            lambda module, args, output: kept.append(output.requires_grad)
        )
        mb.rl.logprobs(chunks, TRAJECTORIES)
        return any(kept)


def message(changes, choices, options, given=None, wrapped=True, gradients=True):
    """The ValueError of a call, or None; `given`: trajectories of each rank."""
    import megatron_burst as mb

    with model(changes, choices, wrapped=wrapped) as chunks:
        try:
            with torch.set_grad_enabled(gradients):
                mb.rl.logprobs(chunks, given[dist.get_rank()] if given else TRAJECTORIES, **options)
        except ValueError as error:
            return str(error)
    return None


def read_by_others():
    """What Megatron's lengths of documents say where a tree's parameters are copied on their way,
    and whether an equal tree gets the plan of the first."""
    import megatron_burst as mb
    from megatron_burst.megatron.data.packed import packs
    from megatron_burst.plugins.rl.tree_pack import TreePack

    with parallel("zigzag", context_parallel_size=4):
        config = settings({"context_parallel_size": 4})
        mb.megatron.configure(config, mb.BurstConfig())
        others = [[token + 1 for token in each] for each in TRAJECTORIES]
        one, same, other = (
            TreePack.of(mb.trees.pack(each, multiple=8), config)
            for each in (TRAJECTORIES, others, TRAJECTORIES[:5])
        )
        copied = one.params(torch.device("cpu")).cu_seqlens_q.clone()
        try:
            packs().of(one.total, copied)
        except ValueError as error:
            return one == same, hash(one) == hash(same), one == other, str(error)
    return None


def documented(text):
    """A block of the documentation, with what it says that its reader has."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.tensor_parallel import random

    with parallel("zigzag", context_parallel_size=2):
        random.model_parallel_cuda_manual_seed(7, force_reset_rng=True)
        space = {
            "config": settings({"context_parallel_size": 2}), "build": gpt,
            "ddp_config": DistributedDataParallelConfig(), "trajectories": TRAJECTORIES,
            "advantages": WEIGHTS,
        }  # fmt: skip
        exec(text, space)
        gradient = max(float(p.main_grad.abs().max()) for p in space["model"].parameters())
        return space["old"].index, space["new"].index, gradient
