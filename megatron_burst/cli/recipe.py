"""`megatron-burst recipe NAME [OVERRIDE ...]`: train a recipe of Megatron-Bridge.

Owns the order: recipe, `apply_burst`, overrides, check, Bridge's own `pretrain` (`finetune` for
a recipe that finetunes). Overrides are Bridge's, in Hydra's words (`train.train_iters=100`), and
`burst.X=VALUE` for what `apply_burst` takes. Imports Megatron when it runs. Must not know: what a
recipe holds.
"""

from __future__ import annotations

import argparse
import ast
import importlib
from types import ModuleType
from typing import Any

from .errors import plainly

_OURS = "burst."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """NAME and its overrides, and what to do instead of training."""
    parser.epilog = (
        "On several ranks: torchrun --nproc-per-node N -m megatron_burst recipe NAME ... "
        "Overrides: train.train_iters=100 model.context_parallel_size=8 burst.store=0.3"
    )
    parser.add_argument("--list", action="store_true", help="the ready recipes, and nothing else")
    parser.add_argument(
        "--print", action="store_true", help="show the recipe after all overrides, do not train"
    )
    parser.add_argument(
        "--cpu",
        action="store_true",
        help="without GPUs, for tests and debugging: fp32, gloo, Megatron's local layers (slow)",
    )
    parser.add_argument(
        "name", metavar="NAME", nargs="?", help="a ready recipe, or one of Megatron-Bridge"
    )
    parser.add_argument(
        "overrides", metavar="OVERRIDE", nargs=argparse.REMAINDER, help="setting=value"
    )


def run(arguments: argparse.Namespace) -> None:
    """Train; ``ValueError`` for a name, a setting or a value that cannot be."""
    if arguments.list:
        for name, recipe in _module("recipes.ready").RECIPES.items():
            print(f"{name:36} {(recipe.__doc__ or '').splitlines()[0]}")
        return
    if arguments.name is None:
        raise ValueError("NAME is missing: a recipe's; megatron-burst recipe --list has some")
    recipe = _recipe(arguments)
    if arguments.print:
        recipe.print_yaml()
        return
    step = _module("training.gpt_step", "megatron.bridge").forward_step
    finetunes = hasattr(recipe.dataset, "packed_sequence_specs")
    name = "finetune" if finetunes else "pretrain"
    train = getattr(_module(f"training.{name}", "megatron.bridge"), name)
    with plainly():
        train(recipe, step)


def _recipe(arguments: argparse.Namespace) -> Any:
    """The recipe, with all overrides in it, checked."""
    ours = [text for text in arguments.overrides if text.startswith(_OURS)]
    theirs = [text for text in arguments.overrides if not text.startswith(_OURS)]
    for text in ours:
        if "=" not in text:
            raise ValueError(f"override {text}: write {text}=value")
    for text in theirs:
        if text.startswith("-"):
            raise ValueError(f"override {text}: options come before NAME, overrides after it")
        if "=" not in text or text[0] in "+~":
            raise ValueError(
                f"override {text}: write setting=value with a setting that the recipe has; what is "
                "added to it with + nobody reads"
            )
    cpu, override = _module("recipes.cpu"), _module("recipes.override")
    layers, ready = _module("recipes.layers"), _module("recipes.ready")
    try:
        if arguments.cpu:
            cpu.enable()
        recipe = ready.find(arguments.name)()
    except ImportError as error:
        raise ValueError(f"recipes need Megatron-Bridge: {error}") from error
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    if arguments.cpu:
        cpu.settle(recipe)
    choices = layers.choices_of(recipe.model.transformer_layer_spec) | _parsed(ours)
    override.apply_burst(recipe, **choices)
    omegaconf = _module("training.utils.omegaconf_utils", "megatron.bridge")
    try:
        recipe = omegaconf.process_config_with_overrides(recipe, cli_overrides=theirs)
    except omegaconf.OverridesError as error:
        raise ValueError(f"override: {str(error).splitlines()[0]}") from error
    _module("recipes.validate").check(recipe)
    return recipe


def _module(name: str, package: str = "megatron_burst") -> ModuleType:
    """``ValueError`` if it cannot be imported: something that a recipe needs is not installed."""
    try:
        return importlib.import_module(f"{package}.{name}")
    except ImportError as error:
        raise ValueError(f"recipes need Megatron-Bridge: {error}") from error


def _parsed(overrides: list[str]) -> dict[str, Any]:
    """`burst.store=0.5` -> {"store": 0.5}."""
    choices = {}
    for text in overrides:
        name, _, value = text.removeprefix(_OURS).partition("=")
        try:
            choices[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            choices[name] = {"null": None}.get(value, value)
    return choices
