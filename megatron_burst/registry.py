# SPDX-License-Identifier: Apache-2.0
"""The registry of plugins: what each of them adds, and how the rest of the package finds it.

A plugin is a folder of `plugins/` whose module `entry` defines `PLUGIN`, a `Plugin`. The registry
reads the folders, so a plugin whose folder is deleted is gone. The rest of the package never
imports a plugin. It looks up what it needs here, by the name that a user typed or by the kind of
model. An entry imports nothing but this module; it names functions as `MODULE:NAME` below its own
folder, and `load` imports them when they are needed.

Owns the list of what a plugin may add.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

_FOLDER = f"{__package__}.plugins"


class Command(NamedTuple):
    """A sub-command of `megatron-burst`."""

    module: str  # has `add_arguments(parser)` and `run(arguments)`
    help: str  # one line


@dataclass(frozen=True)
class Plugin:
    """What one plugin adds. Each value names a module or a `MODULE:NAME` below the plugin's folder.

    Args:
        options: the plugin's options, a class derived from `spine_options.SpineOptions`, whose
            fields become fields of `BurstConfig` and flags.
        public: names in `megatron_burst`, each with its `MODULE:NAME`, or `MODULE` if the name is
            a module.
        commands: sub-commands of `megatron-burst`.
        hooks: what the rest of the package calls if the plugin is there, each with its
            `MODULE:NAME` or `MODULE`; `HOOKS` has their names.

    Raises:
        ValueError: for a hook that nothing calls.
    """

    options: str = ""
    public: Mapping[str, str] = field(default_factory=dict)
    commands: Mapping[str, Command] = field(default_factory=dict)
    hooks: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = sorted(set(self.hooks) - set(HOOKS))
        if unknown:
            raise ValueError(f"hooks {', '.join(unknown)}: known are {', '.join(HOOKS)}")


class Hook(NamedTuple):
    """What the rest of the package calls of a plugin."""

    plugin: str  # the one that has it, for messages where it is absent; empty: several may
    meaning: str


HOOKS: Mapping[str, Hook] = {
    "configured": Hook(
        "",
        "a function of the installed `PatchSet`, a `TransformerConfig` and its `BurstConfig`; "
        "`configure` calls it last",
    ),
    "cpu": Hook(
        "testing", "a module whose `enable()` maps CUDA to the CPU in this process: `--cpu`"
    ),
    "recipe_cpu": Hook(
        "testing", "a module with `enable()`, and with `adapt(recipe)` for a recipe's settings"
    ),
    "gpu_report": Hook("tools", "a module with `run(path, device, quick)`: `doctor --gpu-report`"),
    "host_memory": Hook(
        "longseq", "a module with `HostMemory` and `copy_rate`: `calibrate` measures copies"
    ),
    "offload_tier": Hook(
        "longseq",
        "a function of the installed `PatchSet` that returns what moves activations of this run to "
        "host memory, or None: recomputed layers",
    ),
    "option_problems": Hook(
        "",
        "a function of a `TransformerConfig` (or parsed arguments with the same names), a "
        "`BurstConfig` and the global sequence length in tokens (or None), which yields each "
        "`Problem` of the plugin's options: `configure`, Megatron-LM's command line, `doctor`",
    ),
    "patch_megatron": Hook(
        "", "a function of a `megatron.patching.PatchSet`, to which it adds: `install`"
    ),
    "row_chunks": Hook(
        "longseq",
        "a function of a `BurstConfig` that returns into how many chunks of rows layers cut their "
        'attention half, or "auto"',
    ),
    "sparse_problems": Hook(
        "sparse",
        "a function of a `TransformerConfig`, a `BurstConfig` and the setting that asks for sparse "
        "layers, which yields each `Problem` of these layers",
    ),
    "trees": Hook("rl", "the module `mb.trees`, which `--burst-pack trees` needs"),
    "vision_recipes": Hook("vision", "a module that is a `recipes.vision_models.VisionRecipes`"),
}


def plugins() -> dict[str, Plugin]:
    """All plugins that are there, by name, in alphabetical order."""
    folder = importlib.import_module(_FOLDER)
    names = sorted(found.name for found in pkgutil.iter_modules(folder.__path__) if found.ispkg)
    return {name: importlib.import_module(f"{_FOLDER}.{name}.entry").PLUGIN for name in names}


def load(plugin: str, place: str) -> Any:
    """Import what a plugin names: `MODULE`, or the object `NAME` of `MODULE:NAME`."""
    module, _, name = place.partition(":")
    loaded = importlib.import_module(f"{_FOLDER}.{plugin}.{module}")
    return getattr(loaded, name) if name else loaded


def option_classes() -> list[type]:
    """The classes of options of all plugins that have some, in alphabetical order of plugins.

    Raises:
        ValueError: for an option that two classes define, such as a plugin's and the spine's.
    """
    classes = [load(name, entry.options) for name, entry in plugins().items() if entry.options]
    defined: dict[str, type] = {}
    for cls in dict.fromkeys(base for one in classes for base in reversed(one.__mro__)):
        for name in vars(cls).get("__annotations__", {}):
            if name in defined:
                raise ValueError(f"option {name}: defined by {defined[name]} and {cls}")
            defined[name] = cls
    return classes


def public_names() -> dict[str, tuple[str, str]]:
    """Public name -> plugin and place, of all plugins."""
    return {
        name: (plugin, place)
        for plugin, entry in plugins().items()
        for name, place in entry.public.items()
    }


def commands() -> dict[str, Command]:
    """The sub-commands of all plugins, with the full names of their modules."""
    return {
        name: command._replace(module=f"{_FOLDER}.{plugin}.{command.module}")
        for plugin, entry in plugins().items()
        for name, command in entry.commands.items()
    }


def missing(hook: str, user: str) -> str | None:
    """The message for a hook that no plugin has; None if one has it. Imports nothing but entries.

    Args:
        hook: a name in `HOOKS`.
        user: what cannot work without it, for the message, such as a flag.
    """
    if any(hook in entry.hooks for entry in plugins().values()):
        return None
    plugin = HOOKS[hook].plugin
    return f"{user} needs the plugin {plugin} of megatron_burst, which is not installed"


def require(hook: str, user: str) -> None:
    """Raise ValueError, with the message of `missing`, unless a plugin has the hook."""
    message = missing(hook, user)
    if message is not None:
        raise ValueError(message)


def required(hook: str, user: str) -> Any:
    """What a plugin has for a hook, imported. Arguments and errors are those of `require`."""
    require(hook, user)
    return optional(hook)


def optional(hook: str) -> Any:
    """What a plugin has for a hook, imported; None without the plugin."""
    return next((found for _, found in hooked(hook)), None)


def hooked(hook: str) -> Iterator[tuple[str, Any]]:
    """Plugin and what it has for a hook, imported, in alphabetical order of plugins."""
    for name, entry in plugins().items():
        if hook in entry.hooks:
            yield name, load(name, entry.hooks[hook])
