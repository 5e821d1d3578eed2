# SPDX-License-Identifier: Apache-2.0
"""BurstAttention in Megatron-LM: flags of the command line, and the configuration of every model.

The functions of `megatron.training` that are wrapped here have the same names and parameters from
Megatron-Core 0.16 to 0.20. A function is replaced in every module that imported it by name, so the
order of imports does not matter if `install` runs before the script parses its arguments.

The module also corrects the validation of supervised fine-tuning. With `--sft` Megatron-LM averages
each rank's mean loss per micro-batch over all ranks, so the weight of a token depends on how its
sequence is split: uneven loss masks change the loss by up to 1e-3. Here each rank of a
context-parallel group reports the sums of the group, whose mean equals the mean of one rank with
whole sequences. Megatron's training loss is a sum that is divided at the end, so training needs no
change.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state

from .. import flags
from ..comm.consensus import agree
from ..config import FIELDS
from . import patching, step_metrics
from .attention.plan_book import splits_attention
from .checks import command_line
from .checks.cuda_graphs import contain_attention
from .checks.problem import Problem, refuse
from .configuration import configure_model
from .data import datasets
from .data.cut import compare_clusters, gather_from_all
from .data.slicing import context_group
from .patching import PatchSet, bound_to, log, show_log
from .run_options import ParsedOptions, complete_arguments
from .selection import splits_with_burst

_SIZES = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
    "hierarchical_context_parallel_sizes", "seq_length", "micro_batch_size",
)  # fmt: skip


def load_training_modules() -> None:
    """Import the modules that have seams (module `seam`) among the functions to wrap."""
    for name in ("arguments", "yaml_arguments", "checkpointing"):
        importlib.import_module(f"megatron.training.{name}")


@dataclass(frozen=True)
class TrainingHooks:
    """Replacements of functions that a Megatron-LM script calls.

    `patch` makes the replacements. Each other method has the name of the function that it replaces,
    and gets the original function, then the arguments of the call. `validate_args` replaces
    `validate_yaml` too. The functions are in `megatron.training`, except
    `initialize_model_parallel`, which is in `megatron.core.parallel_state`.

    Attributes:
        patches: The set of patches.
    """

    patches: PatchSet

    def patch(self) -> None:
        """Wrap the functions that a Megatron-LM script calls; imports `megatron.training`."""
        wrap = self.patches.wrap
        arguments = importlib.import_module("megatron.training.arguments")
        wrap(arguments, "add_megatron_arguments", ["parser"], self.add_megatron_arguments)
        wrap(arguments, "validate_args", ["args", "defaults"], self.validate_args)
        wrap(
            importlib.import_module("megatron.training.yaml_arguments"),
            "validate_yaml",
            ["args", "defaults"],
            self.validate_args,
        )
        wrap(
            arguments,
            "core_transformer_config_from_args",
            ["args"],
            self.core_transformer_config_from_args,
        )
        wrap(
            importlib.import_module("megatron.training.checkpointing"),
            "check_checkpoint_args",
            ["checkpoint_args"],
            self.check_checkpoint_args,
        )
        datasets.patch_masks(self.patches)
        datasets.patch_stages(self.patches)
        patch_evaluation(self.patches)
        step_metrics.patch(self.patches)
        wrap(
            parallel_state,
            "initialize_model_parallel",
            ["context_parallel_size"],
            self.initialize_model_parallel,
        )

    def add_megatron_arguments(self, original: Callable, parser: Any) -> Any:
        """Add Megatron-LM's flags and the flags of this package to `parser`."""
        parser = original(parser)
        flags.add_flags(parser, algorithm=flags.OFF)
        _escape_percent_signs(parser)
        return parser

    def validate_args(self, original: Callable, args: Any, *extra: Any, **named: Any) -> Any:
        """Refuse unsupported settings before Megatron does, whose errors rarely name a flag.

        Also completes `args`, and stores in the state of the run what later calls need: the flags
        that ranks compare, the flag that defines documents, and the metrics.
        """
        show_log(self.patches)
        options = check_flags(args, sys.argv[1:])
        self.patches.run.flags = _facts(args, options.settings)
        if splits_with_burst(options.settings, options.burst):
            self.patches.run.documents = datasets.replace_masks(args, self.patches.run.documents)
        result = original(args, *extra, **named)
        # A CUDA graph replays without Python, so nothing could be counted.
        if not contain_attention(args):
            step_metrics.start_if_written(self.patches, args)
        return result

    def initialize_model_parallel(self, original: Callable, *args: Any, **named: Any) -> Any:
        """Compare the flags of all ranks, then make Megatron's process groups."""
        if (facts := self.patches.run.flags) is not None:
            agree(facts, gather_from_all)
            compare_clusters(self.patches.run, facts["--burst-cluster"])
        return original(*args, **named)

    def core_transformer_config_from_args(
        self, original: Callable, args: Any, *extra: Any, **named: Any
    ) -> Any:
        """Configure BurstAttention in the configuration that Megatron makes from arguments."""
        algorithm = getattr(args, "context_parallel_algo", None)
        with patching.selecting_burst(algorithm not in (None, flags.OFF)):
            config = original(args, *extra, **named)
        # Arguments that `validate_args` has completed do not change here. The arguments of a
        # checkpoint may be incomplete.
        settings, burst, errors = complete_arguments(args)
        seq_length = getattr(settings, "seq_length", None)
        return configure_model(config, burst, seq_length, map(Problem, errors))

    def check_checkpoint_args(
        self, original: Callable, checkpoint_args: Any, *extra: Any, **named: Any
    ) -> Any:
        """Check a checkpoint's arguments; rank 0 logs flags and sizes that differ from this run."""
        result = original(checkpoint_args, *extra, **named)
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        if rank == 0 and self.patches.run.flags is not None:
            for line in changes(checkpoint_args, self.patches.run.flags):
                log(line)
        return result


def _escape_percent_signs(parser: argparse.ArgumentParser) -> None:
    """Escape bare percent signs in help texts; without this, --help of Megatron-LM 0.19 fails."""
    for action in parser._actions:
        try:
            str(action.help or "").__mod__({**vars(action), "prog": parser.prog})
        except (ValueError, TypeError, KeyError):
            action.help = str(action.help).replace("%", "%%")


def check_flags(args: Any, argv: list[str]) -> ParsedOptions:
    """Complete parsed arguments, raise an error with all their problems, and log idle flags.

    Args:
        args: parsed arguments; changed by `complete_arguments`.
        argv: the words of the command line.

    Raises:
        SettingsError: There are problems.
    """
    options = complete_arguments(args)
    settings, burst, errors = options
    refuse(command_line.problems(settings, burst, argv, errors))
    line = command_line.idle(settings, burst, argv)
    if line is not None:
        log(line)
    return options


def _facts(args: Any, settings: Any) -> dict[str, Any]:
    """Return the flags and sizes that all ranks must have in common, by flag name."""
    sizes = {f"--{name.replace('_', '-')}": getattr(settings, name, None) for name in _SIZES}
    return flags.stated(args) | sizes


def changes(saved: Any, now: dict[str, Any]) -> list[str]:
    """Return a log line for each flag or size that differs between checkpoint and run.

    Args:
        saved: the arguments in the checkpoint.
        now: the flags and sizes of this run, by flag name.
    """
    names = {field.flag: name for name, field in FIELDS.items()}
    lines = []
    for name, value in now.items():
        missing = None
        if name in names:
            field = names[name]
            missing = {"algorithm": flags.OFF, "layout": "zigzag"}.get(field, flags.default(field))
        before = getattr(saved, name.removeprefix("--").replace("-", "_"), missing)
        if before != value:
            lines.append(f"the checkpoint was made with {name} {before}, this run has {value}")
    return lines


def patch_evaluation(patches: patching.PatchSet) -> None:
    """Wrap Megatron-LM's `evaluate` to weight all tokens equally in validation with `--sft`."""
    home = importlib.import_module("megatron.training.training")
    patches.wrap(home, "evaluate", ["forward_step_func"], _evaluating)


def _evaluating(original: Callable, *args: Any, **named: Any) -> Any:
    group = context_group()
    sft = getattr(importlib.import_module("megatron.training").get_args(), "sft", False)
    if not sft or group.size() == 1 or not splits_attention(group):
        return original(*args, **named)
    bound = bound_to(original, args, named)
    bound.arguments["forward_step_func"] = _summing(bound.arguments["forward_step_func"], group)
    return original(*bound.args, **bound.kwargs)


def _summing(forward_step: Callable, group: Any) -> Callable:
    """Wrap a forward step: its loss function reports [sum, count] over all ranks of `group`."""

    @functools.wraps(forward_step)
    def step(*args: Any, **named: Any) -> Any:
        output, loss_function = forward_step(*args, **named)

        def loss(*outputs: Any, **options: Any) -> Any:
            result = loss_function(*outputs, **options)
            if options or not isinstance(result, tuple):  # the call does not compute losses
                return result
            *first, reported = result
            return *first, {name: _summed(value, group) for name, value in reported.items()}

        return output, loss

    return step


def _summed(value: Any, group: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.numel() != 2:
        return value  # already a mean, which Megatron does not weight
    value = value.detach().clone()
    torch.distributed.all_reduce(value, group=group)
    return value
