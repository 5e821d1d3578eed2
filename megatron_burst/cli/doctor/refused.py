"""What a run of the user's command would be refused for: asked from the plugin, all at once.

Owns how a command line becomes what the plugin's checks read, and how their answers become
findings. What is refused is `config` and `megatron.checks`'s to say. Must not import
Megatron-Core, which takes longer than all else.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from ... import flags
from ...config import BurstConfig
from ...megatron import checks, command_line, lm_head
from ...megatron.problem import Problem
from .command import ALGORITHM, FLAGS, Command
from .finding import Finding, ok, problem

TOPIC = "refused at start"


def refusals(command: Command, te: str | None) -> Iterator[Finding]:
    """A finding for each setting that ends a run at its start, or one that says there is none.

    te: the version of Transformer Engine, or None. Nothing for a command without flags of ours.
    """
    unknown = [f for f in command.given if f.startswith("--burst-") and f not in FLAGS]
    asked = [name for name in FLAGS if name in command]
    if not unknown and not asked:
        return
    for name in unknown:
        near = difflib.get_close_matches(name, FLAGS, 1)
        yield problem("flags", f"{name}: there is no such flag", *near or [f"remove {name}"])
    config = _config(command)
    args = SimpleNamespace(mtp_num_layers=config.mtp_num_layers)
    refused = list(_read(command, asked, args))
    flags.settle(args)
    burst, wrong = flags.choices(args)
    refused += map(Problem, wrong)
    refused += _problems(config, burst, command.number("--seq-length", None), te)
    for one in refused:
        yield problem(TOPIC, one.reason, _fix(one))
    idle = [name for name in asked if name not in flags.ALONE]
    if burst.algorithm == flags.OFF and idle and not refused:
        yield problem("flags", f"{', '.join(idle)}: nothing follows them", f"{ALGORITHM} burst")
    elif command.ours and not refused and not unknown:
        yield ok("BurstAttention", "takes these settings")


def _read(command: Command, names: Sequence[str], args: SimpleNamespace) -> Iterator[Problem]:
    """Give ``args`` the values of these flags of ours; what is no value of its type is refused."""
    for name in names:
        flag = FLAGS[name]
        try:
            if flag.type is str:
                setattr(args, flag.dest, command.text(name))
            else:
                setattr(args, flag.dest, command.number(name, None, flag.type))
        except ValueError as error:
            yield Problem(str(error))


def _problems(
    config: Any, burst: BurstConfig, seq_length: int | None, te: str | None
) -> Iterator[Problem]:
    yield from checks.config_problems(config, burst, seq_length)
    yield from lm_head.problems(config, burst)
    if burst.algorithm != flags.OFF and config.context_parallel_size > 1:
        yield from command_line.run_problems(config, engine=te is not None)


def _fix(refused: Problem) -> str:
    """The flags to add and to remove; where none settles it, those that the reason names."""
    said = [f"add {' '.join(refused.add)}"] * bool(refused.add)
    said += [f"remove {' '.join(refused.remove)}"] * bool(refused.remove)
    return "; ".join(said) or f"change {' or '.join(_named(refused.reason)) or 'the model'}"


def _named(text: str) -> list[str]:
    """The flags in a text, each once."""
    return list(dict.fromkeys(re.findall(r"--[a-z][a-z0-9-]*", text)))


def _config(command: Command) -> SimpleNamespace:
    """What the checks read of a TransformerConfig, from the flags, with Megatron's defaults."""
    grouped = "--group-query-attention" in command
    given: dict[str, Any] = {
        "context_parallel_size": command.cp,
        "tensor_model_parallel_size": command.tp,
        # those that do not multiply to the context-parallel size are a finding already
        "hierarchical_context_parallel_sizes": command.fitting_sizes,
        "num_attention_heads": command.number("--num-attention-heads", None),
        "num_query_groups": command.number("--num-query-groups", 1) if grouped else None,
        "attention_dropout": command.number("--attention-dropout", 0.1, float),
        "window_size": command.numbers("--window-size"),
        "softmax_type": command.text("--softmax-type", "vanilla"),
        "recompute_granularity": "selective"
        if "--recompute-activations" in command
        else command.text("--recompute-granularity"),
        "recompute_modules": command.given.get("--recompute-modules", ["core_attn"]),
        "fp8": command.text("--fp8-format"),
        "fp16": "--fp16" in command,
        "cross_entropy_loss_fusion": "--cross-entropy-loss-fusion" in command,
        "mtp_num_layers": command.number("--mtp-num-layers", None),
        "apply_rope_fusion": "--no-rope-fusion" not in command,
        "is_hybrid_model": "--hybrid-layer-pattern" in command,
        "hybrid_layer_pattern": command.text("--hybrid-layer-pattern"),
        "spec": command.given.get("--spec"),
        "micro_batch_size": command.number("--micro-batch-size", None),
        "pipeline_model_parallel_size": command.number("--pipeline-model-parallel-size", 1),
        "position_embedding_type": command.text("--position-embedding-type"),
    }
    for name in ("--num-layers-per-virtual-pipeline-stage",
                 "--num-virtual-stages-per-pipeline-rank"):  # fmt: skip
        given[name.removeprefix("--").replace("-", "_")] = command.number(name, None)
    for switch in ("qk-clip", "apply-query-key-layer-scaling", "hybrid-context-parallel",
                   "multi-latent-attention", "defer-embedding-wgrad-compute",
                   "overlap-moe-expert-parallel-comm", "fp8-dot-product-attention",
                   "reset-attention-mask", "dataloader-inter-document-masking", "sft", "fim-data",
                   "use-rotary-position-embeddings"):  # fmt: skip
        given[switch.replace("-", "_")] = f"--{switch}" in command
    return SimpleNamespace(**given)
