"""Our flags in Megatron-LM: from its command line to the configuration of every model.

The functions of `megatron.training` that are wrapped here have had the same names and parameters
from Megatron-Core 0.16 to 0.20. A function is replaced wherever a module imported it by name, so
the order of imports does not matter if `install` runs before the script parses its arguments.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state

from megatron_burst import flags
from megatron_burst.comm.consensus import agree
from megatron_burst.megatron import stream_layout
from megatron_burst.megatron.checks import command_line
from megatron_burst.megatron.checks.layouts import adopted
from megatron_burst.megatron.checks.problem import refuse
from megatron_burst.megatron.data import every_stage, loader_masks
from megatron_burst.megatron.log import log, show_log
from megatron_burst.megatron.patching.compatibility import require_function
from megatron_burst.megatron.patching.registry import PatchSet
from megatron_burst.megatron.training import sft_validation

_ASKED = "flags"  # note: the flags of this process, once they are parsed
_SIZES = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
    "hierarchical_context_parallel_sizes", "seq_length", "micro_batch_size",
)  # fmt: skip
Configure = Callable[..., Any]


def load() -> None:
    """Import the modules whose functions `patch` wraps."""
    for name in ("arguments", "yaml_arguments", "checkpointing"):
        importlib.import_module(f"megatron.training.{name}")


def patch(patches: PatchSet, configure: Configure) -> None:
    """Add to a set of patches what a Megatron-LM script needs; imports `megatron.training`.

    configure: called as ``configure(transformer_config, burst_config, seq_length=...)``.
    """
    for module, name, parameters, wrap in (
        ("arguments", "add_megatron_arguments", ["parser"], _with_flags),
        ("arguments", "validate_args", ["args", "defaults"], _validating),
        ("yaml_arguments", "validate_yaml", ["args", "defaults"], _validating),
        ("arguments", "core_transformer_config_from_args", ["args"], _configuring(configure)),
        ("checkpointing", "check_checkpoint_args", ["checkpoint_args"], _comparing),
    ):
        home = importlib.import_module(f"megatron.training.{module}")
        original = require_function(home, name, parameters)
        patches.replace_function(home, name, wrap(original, patches))
    loader_masks.patch(patches)
    every_stage.patch(patches)
    sft_validation.patch(patches)
    name = "initialize_model_parallel"
    original = require_function(parallel_state, name, ["context_parallel_size"])
    patches.replace_function(parallel_state, name, _agreeing(original, patches))


def _with_flags(original: Callable, patches: PatchSet) -> Callable:
    @functools.wraps(original)
    def add_megatron_arguments(parser: Any) -> Any:
        parser = original(parser)
        flags.add_flags(parser, algorithm=flags.OFF)
        _mend_help(parser)
        return parser

    return add_megatron_arguments


def _mend_help(parser: argparse.ArgumentParser) -> None:
    """Escape bare percent signs in help texts, with which --help of Megatron-LM 0.19 fails."""
    for action in parser._actions:
        try:
            str(action.help or "").__mod__({**vars(action), "prog": parser.prog})
        except (ValueError, TypeError, KeyError):
            action.help = str(action.help).replace("%", "%%")


def _validating(original: Callable, patches: PatchSet) -> Callable:
    """Check our flags before Megatron checks its own: few of its assertions name a flag."""

    @functools.wraps(original)
    def validate(args: Any, *others: Any, **named: Any) -> Any:
        show_log(patches)
        _settle(args)
        check_flags(args, sys.argv[1:])
        patches.notes[_ASKED] = _facts(args)
        if command_line.takes_over(args):
            loader_masks.replace_masks(args, patches)
        return original(args, *others, **named)

    return validate


def _settle(args: Any) -> None:
    """`flags.settle`, with layouts that Megatron's own settings ask for, or that bytes decide."""
    open_ = not any(getattr(args, f"burst_{name}", None) for name in ("layout", "attention_layout"))
    flags.settle(args)
    settings = command_line.settings_of(args)
    if open_:
        found = adopted(flags.choices(args)[0], settings)
        args.burst_layout, args.burst_attention_layout = found.layout, found.attention_layout
    stream_layout.settle(args, settings)


def check_flags(args: Any, argv: list[str]) -> None:
    """Raise ``ValueError`` with all problems of arguments completed by `flags.settle`.

    Rank 0 logs flags that have no effect.
    """
    refuse(command_line.problems(args, argv))
    line = command_line.idle(args, argv)
    if line is not None:
        log(line)


def _facts(args: Any) -> dict[str, Any]:
    found = command_line.settings_of(args)
    sizes = {f"--{name.replace('_', '-')}": getattr(found, name, None) for name in _SIZES}
    return flags.stated(args) | sizes


def _agreeing(original: Callable, patches: PatchSet) -> Callable:
    """Compare the flags of all ranks before Megatron makes process groups, which is collective."""

    @functools.wraps(original)
    def initialize_model_parallel(*args: Any, **named: Any) -> Any:
        if _ASKED in patches.notes:
            agree(patches.notes[_ASKED], _gather)
        return original(*args, **named)

    return initialize_model_parallel


def _gather(header: torch.Tensor) -> list[torch.Tensor]:
    gathered = [header] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, header)
    return gathered


def _configuring(configure: Configure) -> Callable[[Callable, PatchSet], Callable]:
    def wrap(original: Callable, patches: PatchSet) -> Callable:
        @functools.wraps(original)
        def config_from(args: Any, *others: Any, **named: Any) -> Any:
            config = original(args, *others, **named)
            _settle(args)
            length = getattr(args, "seq_length", None)
            return configure(config, flags.burst_config(args), seq_length=length)

        return config_from

    return wrap


def _comparing(original: Callable, patches: PatchSet) -> Callable:
    """Log on rank 0 which of our flags, and sizes, differ from those of the checkpoint's run."""

    @functools.wraps(original)
    def check_checkpoint_args(checkpoint_args: Any, *others: Any, **named: Any) -> Any:
        result = original(checkpoint_args, *others, **named)
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        now = patches.notes.get(_ASKED)
        if rank == 0 and now is not None:
            for line in changes(checkpoint_args, now):
                log(line)
        return result

    return check_checkpoint_args


def changes(saved: Any, now: dict[str, Any]) -> list[str]:
    """One line per flag whose value in the checkpoint's arguments differs from this run's."""
    names = {flag.name: flag for flag in flags.FLAGS}
    lines = []
    for name, value in now.items():
        missing = None
        if name in names:
            field = names[name].field
            missing = {"algorithm": flags.OFF, "layout": "zigzag"}.get(field, flags.default(field))
        before = getattr(saved, name.removeprefix("--").replace("-", "_"), missing)
        if before != value:
            lines.append(f"the checkpoint was made with {name} {before}, this run has {value}")
    return lines
