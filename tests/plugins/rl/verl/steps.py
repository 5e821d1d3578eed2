"""verl's own Megatron engine on the CPU, on forked ranks, from verl's own configuration.

It imports verl once and forks the ranks of each job (`jobs`). Every rank saves its results as
FILE.RANK.pt. In place of a GPU it uses `plugins/testing`, local layers of Megatron, float32 and, on
one rank, dense attention over packed batches, which Megatron supports only with Transformer Engine.
"""

import functools
import itertools
import os
import re
import sys
from types import SimpleNamespace

import torch
from jobs import serve_jobs
from loaded import BRIDGE, load

# What a CPU needs.
CPU = {
    "use_cpu_initialization": True, "apply_rope_fusion": False, "persist_layer_norm": False,
    "gradient_accumulation_fusion": False, "masked_softmax_fusion": False,
    "bias_activation_fusion": False, "bias_dropout_fusion": False,
    "cross_entropy_loss_fusion": False,
}  # fmt: skip


# There is no tokenizer, and every rank has whole gradients.
WHOLE = (
    "+actor_rollout_ref.model.load_tokenizer=False",
    "actor_rollout_ref.actor.megatron.use_distributed_optimizer=False",
)


def job(work):
    """Infer and train one step on one rank; save log-probabilities, entropies and gradients."""
    if "refused" in work:
        torch.save([refused(work | {"words": words}) for words in work["refused"]], saved(work))
        return
    engine = built(work)
    batch = trajectories(work)
    with engine.eval_mode():
        inferred = engine.infer_batch(batch)
    with engine.train_mode():
        engine.optimizer_zero_grad()
        trained = engine.forward_backward_batch(batch, loss, forward_only=False)
        parameters = engine.module[0].named_parameters()
        gradients = {of_model(name, engine): p.main_grad.clone() for name, p in parameters}
    actual = {"gradients": gradients, "rows": rows}
    if engine.is_mp_src_rank_with_outputs():
        for kind, outputs in (("inferred", inferred), ("trained", trained)):
            actual[kind] = {k: list(x.unbind()) for k, x in outputs["model_output"].items()}
        actual["loss"] = sum(trained["loss"])
    torch.save(actual, saved(work))


def saved(work):
    return f"{work['output']}.{os.environ['RANK']}.pt"


def refused(work):
    """Return the error of an engine that refuses its settings."""
    try:
        built(work)
    except ValueError as error:
        return str(error)
    return "nothing"


def of_model(name, engine):
    """Return the name of a parameter in the whole model; stages number their layers from 0."""
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    first = get_transformer_layer_offset(engine.tf_config)
    return re.sub(r"layers\.(\d+)", lambda m: f"layers.{int(m[1]) + first}", name)


rows = []  # that each forward of the model had on this rank


def built(work):
    """Return the engine for the configuration that verl's command line makes of these words."""
    from hydra import compose, initialize_config_module
    from megatron.bridge.models.gpt_provider import local_layer_spec
    from megatron.core.models.gpt import GPTModel
    from verl.trainer.config import CheckpointConfig
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.config import McoreOptimizerConfig
    from verl.workers.engine.base import EngineRegistry

    with initialize_config_module("verl.trainer.config", version_base=None):
        words = [f"actor_rollout_ref.model.path={work['model']}", *work["words"], *WHOLE]
        config = compose("ppo_megatron_trainer", overrides=words)
    settings = config.actor_rollout_ref
    settings.model.override_config = {"attn_implementation": "eager"}
    model = omega_conf_to_dataclass(settings.model)  # imports external_lib
    object.__setattr__(model, "tokenizer", SimpleNamespace(pad_token_id=0))
    engine = omega_conf_to_dataclass(settings.actor.megatron)
    object.__setattr__(engine, "dtype", "float32")
    engine.use_fused_kernels = model.use_fused_kernels
    engine.override_transformer_config.update(CPU, transformer_layer_spec=local_layer_spec)
    optimizer = McoreOptimizerConfig(lr=1e-3, lr_decay_steps=10, total_training_steps=10)
    cls = EngineRegistry.get_engine_cls("language_model", "megatron")
    if not model.external_lib:  # verl as it is
        dense_attention()
    made = cls(model, engine, optimizer, CheckpointConfig())
    made.initialize()
    for module in made.module[0].modules():
        if isinstance(module, GPTModel):
            module.decoder.register_forward_hook(lambda _, arguments, out: rows.append(len(out)))
    return made


def trajectories(work):
    """Return a batch like that of verl's trainer: jagged prompts and answers in micro-batches."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils

    tokens = [torch.tensor(one) for one in work["trajectories"]]
    answers = [torch.arange(len(one)) >= len(one) - max(1, len(one) // 2) for one in tokens]
    jagged = functools.partial(torch.nested.as_nested_tensor, layout=torch.jagged)
    batch = {"input_ids": jagged(tokens), "loss_mask": jagged([x.float() for x in answers])}
    batch["temperature"] = torch.tensor(work.get("temperatures", [0.7] * len(tokens)))
    batch = TensorDict(batch, batch_size=[len(tokens)])
    tensordict_utils.assign_non_tensor(
        batch, use_dynamic_bsz=False, micro_batch_size_per_gpu=work["micro_batch"],
        calculate_entropy=True,
    )  # fmt: skip
    return batch


def loss(model_output, data, dp_group=None):
    """Return a loss with a weight per trajectory and token, like advantages, and entropies."""
    total = 0
    of = (model_output[name].unbind() for name in ("log_probs", "entropy"))
    for tokens, logprobs, entropies in zip(data["input_ids"].unbind(), *of, strict=True):
        answer = len(tokens) - max(1, len(tokens) // 2)
        weights = torch.linspace(-1, 2, len(tokens) - answer) + len(tokens) / 50
        predicts = slice(answer - 1, len(tokens) - 1)
        total = total - (weights * logprobs[predicts]).sum() + entropies[predicts].sum() / 10
    return total / 50, {}


def dense_attention():
    """Compute one rank's attention over a packed batch, document by document."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    def forward(self, query, key, value, *args, packed_seq_params, **kwargs):
        ends, out = packed_seq_params.cu_seqlens_q.tolist(), []
        shared = query.shape[1] // key.shape[1]
        for a, b in itertools.pairwise(ends):
            q = query[a:b].transpose(0, 1)
            k, v = (x[a:b].transpose(0, 1).repeat_interleave(shared, 0) for x in (key, value))
            hidden = torch.ones(b - a, b - a).triu(1).bool()
            logits = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).masked_fill(hidden, -torch.inf)
            out.append((logits.softmax(-1) @ v).transpose(0, 1).flatten(1))
        return torch.cat(out)

    DotProductAttention.forward = forward


def tiny_model(folder):
    """Write a random Qwen3 model in the format of a hub."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.2)
    model.save_pretrained(folder)


def main(folder):
    """Import verl, write the model and run jobs."""
    from megatron_burst.plugins.testing import recipes

    recipes.import_bridge()
    load([*BRIDGE, "verl.workers.engine.megatron.transformer_impl", "hydra", "verl.trainer.config",
        "verl.workers.config", "megatron.core.models.gpt", "megatron_burst.plugins.rl.logprobs",
        "megatron_burst.plugins.rl.trees"])  # fmt: skip
    tiny_model(folder)
    serve_jobs(functools.partial(on_rank, folder))


def on_rank(folder, work):
    torch.distributed.init_process_group("gloo")
    job(work | {"model": folder})


if __name__ == "__main__":
    main(sys.argv[1])
