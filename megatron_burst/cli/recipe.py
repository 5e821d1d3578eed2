# SPDX-License-Identifier: Apache-2.0
"""`megatron-burst recipe NAME [OVERRIDE ...]`: train a recipe of Megatron-Bridge.

The steps are: make the recipe, call `apply_burst`, apply overrides, check the recipe, and call
Bridge's `pretrain` (`finetune` for a fine-tuning recipe). An override is either a Bridge override
in Hydra's syntax (`train.train_iters=100`), or `burst.X=VALUE` for an argument of `apply_burst`.
"""

from __future__ import annotations

import argparse
import ast
import importlib
from types import ModuleType
from typing import Any

from rich.table import Table
from rich.text import Text

from .. import registry
from .console import unwrapped
from .errors import user_errors
from .ranks import groups_ended

_PREFIX = "burst."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `recipe`."""
    parser.epilog = (
        "On 8 GPUs: torchrun --nproc-per-node 8 -m megatron_burst recipe NAME ... "
        "Overrides: train.train_iters=100 model.context_parallel_size=8 burst.store=0.3"
    )
    add = parser.add_argument
    add("--list", action="store_true", help="list the ready-made recipes and exit")
    add("--print", action="store_true", help="print the recipe after all overrides and exit")
    add("--cpu", action="store_true",
        help="run on the CPU, for tests: fp32, gloo, Megatron's local layers (slow)")  # fmt: skip
    add(
        "name",
        metavar="NAME",
        nargs="?",
        help="a ready-made recipe (--list), or a Megatron-Bridge recipe",
    )
    add("overrides", metavar="OVERRIDE", nargs=argparse.REMAINDER,
        help="setting=value of the recipe, or burst.X=value")  # fmt: skip


def run(arguments: argparse.Namespace) -> None:
    """Train or print the recipe that the arguments name, or list the ready-made recipes.

    Raises:
        ValueError: A name, setting or value is wrong.
    """
    words = arguments.overrides  # includes options after NAME, which argparse does not parse
    for option in ("list", "print", "cpu"):
        if f"--{option}" in words:
            setattr(arguments, option, True)
    arguments.overrides = [word for word in words if word not in ("--list", "--print", "--cpu")]
    if arguments.list:
        table = Table.grid(padding=(0, 2))
        for name, recipe in _module("recipes.ready_made").RECIPES.items():
            table.add_row(Text(name), Text((recipe.__doc__ or "").splitlines()[0]))
        unwrapped().print(table)
        return
    if arguments.name is None:
        raise ValueError("NAME is missing; pass a recipe, see megatron-burst recipe --list")
    recipe = _recipe(arguments)
    if arguments.print:
        recipe.print_yaml()
        return
    finetunes = hasattr(recipe.dataset, "packed_sequence_specs")
    name = "finetune" if finetunes else "pretrain"
    train = getattr(_module(f"training.{name}", "megatron.bridge"), name)
    with user_errors(), groups_ended():
        train(recipe, _forward_step(recipe))


def _forward_step(recipe: Any) -> Any:
    """Return Bridge's forward step for the model: diffusion, language or vision-language."""
    diffusion = _module("recipes.diffusion_models").diffusion_recipes(recipe.model)
    if diffusion is not None:
        return diffusion.forward_step(recipe)
    name = "vlm_step" if _module("recipes.vision_models").is_vision(recipe.model) else "gpt_step"
    return _module(f"training.{name}", "megatron.bridge").forward_step


def _recipe(arguments: argparse.Namespace) -> Any:
    """Return the recipe with all overrides applied and checked."""
    burst_overrides = [text for text in arguments.overrides if text.startswith(_PREFIX)]
    bridge_overrides = [text for text in arguments.overrides if not text.startswith(_PREFIX)]
    for text in burst_overrides:
        if "=" not in text:
            raise ValueError(f"override {text}: write {text}=value")
    for text in bridge_overrides:
        if text.startswith("-"):
            raise ValueError(f"{text} is not an option; see megatron-burst recipe --help")
        if "=" not in text or text[0] in "+~":
            raise ValueError(
                f"override {text}: write setting=value with a setting of the recipe; settings "
                "added with + would have no effect"
            )
    apply, layers = _module("recipes.apply"), _module("recipes.layers")
    ready = _module("recipes.ready_made")
    try:
        cpu = registry.required("recipe_cpu", "--cpu") if arguments.cpu else None
        if cpu is not None:
            cpu.enable()
        recipe = ready.find(arguments.name)()
    except ImportError as error:
        raise ValueError(f"recipes need Megatron-Bridge: {error}") from error
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    if cpu is not None:
        cpu.adapt(recipe)
    choices = layers.choices_of(recipe.model.transformer_layer_spec) | _parsed(burst_overrides)
    apply.apply_burst(recipe, **choices)
    omegaconf = _module("training.utils.omegaconf_utils", "megatron.bridge")
    try:
        recipe = omegaconf.process_config_with_overrides(recipe, cli_overrides=bridge_overrides)
    except omegaconf.OverridesError as error:
        raise ValueError(f"override: {str(error).splitlines()[0]}") from error
    _module("recipes.validate").check(recipe)
    return recipe


def _module(name: str, package: str = "megatron_burst") -> ModuleType:
    """Import the module `name`, relative to `package`.

    Raises:
        ValueError: A package that recipes need is not installed.
    """
    try:
        return importlib.import_module(f"{package}.{name}")
    except ImportError as error:
        raise ValueError(f"recipes need Megatron-Bridge: {error}") from error


def _parsed(overrides: list[str]) -> dict[str, Any]:
    """Parse overrides: `burst.store=0.5` gives {"store": 0.5}."""
    choices = {}
    for text in overrides:
        name, _, value = text.removeprefix(_PREFIX).partition("=")
        try:
            choices[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            choices[name] = {"null": None}.get(value, value)
    return choices
