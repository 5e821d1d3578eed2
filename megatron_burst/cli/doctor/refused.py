"""Everything for which the plugin would refuse the user's command, found by its own checks.

`config` and `megatron.checks` decide what is refused; this module gives them the command and turns
their answers into findings. It does not import Megatron-Core, which would take most of the time.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from ... import flags
from ...config import BurstConfig
from ...megatron.checks import command_line
from ...megatron.checks.config import config_problems
from ...megatron.checks.hybrid import splits
from ...megatron.checks.linear import FLAG as LINEAR
from ...megatron.checks.linear import PATTERNS, linear_layers
from ...megatron.checks.lm_head import lm_head_problems
from ...megatron.checks.model import backend_problems
from ...megatron.checks.offload import offload_problems
from ...megatron.checks.problem import Problem
from .command import ALGORITHM, FLAGS, Command
from .finding import Finding, ok, problem

TOPIC = "refused at start"


def refusals(command: Command, te: str | None) -> Iterator[Finding]:
    """A finding for each setting that ends a run at its start, or one that there is none.

    No finding for a command without flags of ours. te: the version of Transformer Engine, or None.
    """
    unknown = [name for name in command.unknown if name.startswith("--burst-")]
    asked = command.given(*FLAGS)
    if not unknown and not asked:
        return
    for name in unknown:
        near = difflib.get_close_matches(name, FLAGS, 1)
        yield problem("flags", f"{name}: there is no such flag", *near or [f"remove {name}"])
    config = _config(command)
    args = SimpleNamespace()
    refused = list(_read(command, asked, args))
    flags.settle(args)
    burst, wrong = flags.choices(args)
    refused += map(Problem, wrong)
    refused += _problems(config, burst, command.seq_length, te)
    for one in refused:
        yield problem(TOPIC, one.reason, _fix(one))
    idle = [name for name in asked if name not in flags.ALONE]
    if burst.algorithm == flags.OFF and idle and not refused:
        yield problem(
            "flags", f"{', '.join(idle)}: no effect without {ALGORITHM}", f"{ALGORITHM} burst"
        )
    elif command.ours and not refused and not unknown:
        if LINEAR in asked and splits(config) and linear_layers(config) is None:
            yield problem("flags", f"{LINEAR}: no layer carries a state", f"remove {LINEAR}")
        yield ok("BurstAttention", "takes these settings")


def _read(command: Command, names: Sequence[str], args: SimpleNamespace) -> Iterator[Problem]:
    """Give ``args`` the values of these flags of ours, and yield a problem for each bad one."""
    for name in names:
        flag = FLAGS[name]
        text = getattr(command, flag.dest)
        try:
            setattr(args, flag.dest, flag.type(text))
        except ValueError:
            yield Problem(f"{name} must be of type {flag.type.__name__}, got {text!r}")


def _problems(
    config: Any, burst: BurstConfig, seq_length: int | None, te: str | None
) -> Iterator[Problem]:
    yield from command_line.yaml_problems(config)
    yield from config_problems(config, burst, seq_length)
    yield from lm_head_problems(config, burst)
    yield from offload_problems(config, burst)
    yield from backend_problems(config, burst)
    if burst.algorithm != flags.OFF and splits(config):
        yield from command_line.run_problems(config, burst, engine=te is not None)


def _fix(refused: Problem) -> str:
    """The flags to add and to remove; if there are none, those that the reason names."""
    said = [f"add {' '.join(refused.add)}"] * bool(refused.add)
    said += [f"remove {' '.join(refused.remove)}"] * bool(refused.remove)
    return "; ".join(said) or f"change {' or '.join(_named(refused.reason)) or 'the model'}"


def _named(text: str) -> list[str]:
    """The flags in a text, each once."""
    return list(dict.fromkeys(re.findall(r"--[a-z][a-z0-9-]*", text)))


def _config(command: Command) -> SimpleNamespace:
    """What the checks read of a TransformerConfig, from the flags."""
    selective = command.recompute_activations
    return SimpleNamespace(
        **vars(command)
        | {
            "context_parallel_size": command.cp,
            "hierarchical_context_parallel_sizes": command.fitting_sizes,
            "num_query_groups": command.num_query_groups if command.group_query_attention else None,
            "recompute_granularity": "selective" if selective else command.recompute_granularity,
            "recompute_modules": command.recompute_modules or ["core_attn"],
            "fp8": command.fp8_format,
            "fp4": command.fp4_format,
            "apply_rope_fusion": not command.no_rope_fusion,
            "is_hybrid_model": any(getattr(command, name) for name in PATTERNS),
        }
    )
