# SPDX-License-Identifier: Apache-2.0
"""Problems of the user's Megatron command: hazards, and settings that the run would refuse.

A hazard is a setting that runs, but may give wrong results or waste time or memory.

`config` and `megatron.checks` decide which settings are refused. This module passes the command to
these checks and converts problems to findings. It does not import Megatron-Core, because the import
would take longer than all these checks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from ... import flags
from ...config import BurstConfig
from ...megatron.checks import command_line
from ...megatron.checks.command_line import RESET
from ...megatron.checks.config import backend_problems, configuration_problems
from ...megatron.checks.problem import Problem
from ...megatron.checks.splitting import LINEAR_FLAG
from ...megatron.model_shape import ModelShape
from ...megatron.run_options import complete_flags, settings_of
from ...megatron.selection import splits, splits_with_burst
from ...units import byte_size
from ..megatron_arguments import FLAGS, SIZES, MegatronCommand
from ..parsers import nearest
from .report import Finding, note, ok, problem
from .sizes import hierarchical_sizes

ALGORITHM = "--context-parallel-algo"
TOPIC = "refused at start"
# With these flags, loss masks may exclude different numbers of tokens on different ranks.
UNEVEN = ("--eod-mask-loss", "--sft", "--dataloader-inter-document-masking")
LARGE_MASK = 2**30  # bytes; an attention mask of this size is a problem


def hazards(
    command: MegatronCommand, gpus_per_node: int, machine: dict[str, Any], te: str | None
) -> Iterator[Finding]:
    """Yield a finding for each setting of a command that may be a hazard.

    Args:
        command: The command.
        gpus_per_node: GPUs per node.
        machine: Result of `machine.describe`.
        te: Installed version of Transformer Engine, or None.
    """
    yield from _choice(command)
    yield from _sizes(command, gpus_per_node)
    if command.cp > 1:
        yield from _loss(command)
        yield from _mask(command)
    yield from _connections(command, machine)
    if command.transformer_impl == "transformer_engine" and not te:
        yield problem(
            "--transformer-impl",
            "Transformer Engine is Megatron's default, and it is not installed here",
            "install transformer-engine, or --transformer-impl local",
        )


def _choice(command: MegatronCommand) -> Iterator[Finding]:
    algorithm, kinds = command.context_parallel_algo, command.cp_comm_type
    if command.cp == 1:
        if algorithm not in (None, "megatron"):
            yield note(ALGORITHM, "has no effect at --context-parallel-size 1")
        return
    if algorithm in (None, "megatron"):
        yield note(
            ALGORITHM, "Megatron's own attention runs, not BurstAttention", f"{ALGORITHM} burst"
        )
    if kinds and command.ours:
        yield problem(
            "--cp-comm-type",
            f"{' '.join(kinds)} and {ALGORITHM} {algorithm} both choose the attention",
            "remove --cp-comm-type",
        )
    elif kinds and "a2a+p2p" in kinds and command.sizes is None:
        yield problem(
            "--cp-comm-type",
            "a2a+p2p without hierarchical sizes disables context parallelism, in some versions of "
            "Megatron without an error",
            f"add {SIZES}, or replace --cp-comm-type by {ALGORITHM} burst",
        )


def _sizes(command: MegatronCommand, gpus_per_node: int) -> Iterator[Finding]:
    tp, cp, sizes = command.tp, command.cp, command.sizes
    if sizes is not None and math.prod(sizes) != cp:
        yield problem(
            SIZES,
            f"{sizes} has the product {math.prod(sizes)}, but --context-parallel-size is {cp}",
            hierarchical_sizes(tp, cp, gpus_per_node).flags or f"remove {SIZES}",
        )
        return
    try:
        best = hierarchical_sizes(tp, cp, gpus_per_node)
    except ValueError as error:
        yield problem("nodes", str(error), "if the number is wrong, set --gpus-per-node")
        return
    if cp > 1 and sizes not in (None, [best.intra, best.inter]):
        yield note(
            SIZES,
            f"{sizes[0]} ranks per node do not match nodes of {gpus_per_node} GPUs at "
            f"TP {tp}: {best.reason}",
            best.flags or f"remove {SIZES}",
        )
    elif cp > 1 and sizes is None and not best.flat:
        yield note(SIZES, f"not set: ranks on one host form a node; {best.reason}", best.flags)
    elif cp > 1:
        yield ok(SIZES, best.reason)


def _loss(command: MegatronCommand) -> Iterator[Finding]:
    topic, fix = "loss mean", "--calculate-per-token-loss"
    if command.calculate_per_token_loss:
        yield ok(topic, "over the tokens of all ranks")
        return
    effect = "each rank divides its loss by its own token count, so gradients depend on the layout"
    uneven = command.given(*UNEVEN)
    if uneven:
        yield problem(topic, f"{effect}; with {uneven[0]} the counts differ", fix)
    else:
        yield note(topic, f"{effect} if loss masks exclude tokens", fix)


def _mask(command: MegatronCommand) -> Iterator[Finding]:
    topic, fix = "attention mask", "--no-create-attention-mask-in-dataloader"
    reset = command.given(RESET)
    if command.ours and reset:
        yield ok(
            topic, f"not created; with {RESET} a document ends after each end-of-document token"
        )
        return
    if command.no_create_attention_mask_in_dataloader and reset:
        lost = f"{RESET} has no effect: it changes the data loader's mask, which is not created"
        yield problem(topic, lost, f"remove {fix} or {RESET}")
        return
    if command.no_create_attention_mask_in_dataloader:
        yield ok(topic, "not created in the data loader")
        return
    mask_bytes = (command.seq_length or 0) ** 2 * (command.micro_batch_size or 1)
    size = f"{byte_size(mask_bytes)} are created per micro-batch and data-loader worker"
    if command.ours:
        yield ok(topic, "not created: BurstAttention computes masks in its kernels")
    elif mask_bytes >= LARGE_MASK:
        yield problem(topic, size, fix)
    else:
        yield note(topic, size, fix)


def _connections(command: MegatronCommand, machine: dict[str, Any]) -> Iterator[Finding]:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    value = machine["variables"].get(name)
    fsdp = command.use_megatron_fsdp or command.use_torch_fsdp2
    if fsdp and value == "1":
        yield problem(name, "is 1, but FSDP requires a value above 1", f"unset {name}")
    elif not fsdp and (command.tp > 1 or command.cp > 1) and value != "1":
        state = f"is {value or 'unset'}; with TP or CP, Megatron needs 1 on GPUs before Blackwell"
        old = any("sm_" in gpu and int(gpu.split("sm_")[1]) < 100 for gpu in machine["gpus"])
        yield (problem if old else note)(name, state, f"export {name}=1")
    elif value is not None:
        yield ok(name, value)


def refusals(command: MegatronCommand, te: str | None) -> Iterator[Finding]:
    """Yield a finding for each setting that the run would refuse at its start, or one ok finding.

    Yields nothing for a command without flags of this package.

    Args:
        command: The command.
        te: Installed version of Transformer Engine, or None.
    """
    unknown = [name for name in command.unknown if name.startswith("--burst-")]
    burst_flags = command.given(*FLAGS)
    if not unknown and not burst_flags:
        return
    for name in unknown:
        near = nearest(name, FLAGS)
        yield problem("flags", f"{name} is not a flag of this package", near or f"remove {name}")
    config = _config(command)
    args, mistyped = command.burst_arguments()
    burst, errors, _ = complete_flags(args, config)
    refused = [Problem(line) for line in (*mistyped, *errors)]
    refused += _problems(config, burst, command.seq_length, te)
    for refusal in refused:
        changes = (("add", refusal.add), ("remove", refusal.remove))
        fix = "; ".join(f"{word} {' '.join(names)}" for word, names in changes if names)
        named = dict.fromkeys(re.findall(r"--[a-z][a-z0-9-]*", refusal.reason))
        yield problem(TOPIC, refusal.reason, fix or f"change {' or '.join(named) or 'the model'}")
    idle = [name for name in burst_flags if name not in flags.ALONE]
    if burst.algorithm == flags.OFF and idle and not refused:
        yield problem(
            "flags", f"{', '.join(idle)} have no effect without {ALGORITHM}", f"{ALGORITHM} burst"
        )
    elif command.ours and not refused and not unknown:
        if (
            LINEAR_FLAG in burst_flags
            and splits(config)
            and ModelShape.of(config).linear_setting is None
        ):
            yield problem(
                "flags",
                f"{LINEAR_FLAG} has no effect: the model has no linear-attention or Mamba layers",
                f"remove {LINEAR_FLAG}",
            )
        yield ok("BurstAttention", "supports these settings")


def _problems(
    config: Any, burst: BurstConfig, seq_length: int | None, te: str | None
) -> Iterator[Problem]:
    yield from command_line.yaml_problems(config)
    # The command may run on other machines.
    yield from configuration_problems(config, burst, seq_length, this_machine=False)
    yield from backend_problems(config, burst)
    if splits_with_burst(config, burst):
        yield from command_line.run_problems(config, burst, engine=te is not None)


def _config(command: MegatronCommand) -> SimpleNamespace:
    """Convert the flags to the fields of a TransformerConfig that the checks read."""
    config = settings_of(command)
    config.context_parallel_size = command.cp
    config.hierarchical_context_parallel_sizes = command.fitting_sizes
    config.recompute_modules = command.recompute_modules or ["core_attn"]
    return config
