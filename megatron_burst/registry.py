# SPDX-License-Identifier: Apache-2.0
"""Registry of plugins: declarations of what each plugin adds, and functions that load it.

A plugin is a folder of `plugins/` whose module `entry` defines `PLUGIN`, a `Plugin`. The registry
reads the folders, so deleting a folder removes its plugin. The rest of the package imports plugins
only through this registry. A module `entry` imports only this module. It names functions as
`MODULE:NAME`, relative to the folder of the plugin, and `load` imports them on demand.

`Plugin` lists what a plugin can add, and `HOOKS` lists the functions that it can provide.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

_FOLDER = f"{__package__}.plugins"


class Command(NamedTuple):
    """A sub-command of `megatron-burst`.

    Attributes:
        module: Name of the module with `add_arguments(parser)` and `run(arguments)`.
        help: Help text in one line.
    """

    module: str
    help: str


@dataclass(frozen=True)
class Plugin:
    """Declaration of what one plugin adds.

    `MODULE` and `MODULE:NAME` are relative to the folder of the plugin.

    Args:
        options: Place of the plugin's option class, a subclass of `spine_options.SpineOptions`. Its
            fields become fields of `BurstConfig` and flags. Empty if the plugin has no options.
        public: Place of each public name of `megatron_burst`, by name: `MODULE:NAME`, or `MODULE`
            for a module.
        commands: Sub-commands of `megatron-burst`, by name.
        hooks: Place of each hook that the plugin provides, by name in `HOOKS`: `MODULE:NAME` or
            `MODULE`.

    Raises:
        ValueError: A hook is not in `HOOKS`.
    """

    options: str = ""
    public: Mapping[str, str] = field(default_factory=dict)
    commands: Mapping[str, Command] = field(default_factory=dict)
    hooks: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = sorted(set(self.hooks) - set(HOOKS))
        if unknown:
            raise ValueError(f"hooks {', '.join(unknown)} do not exist; use {', '.join(HOOKS)}")


class Hook(NamedTuple):
    """A function or module of plugins that the rest of the package calls.

    Attributes:
        plugin: Plugin that provides the hook, for the error message if that plugin is not
            installed. Empty if several plugins may provide the hook.
        meaning: Text that describes the signature of the hook, and its caller.
    """

    plugin: str
    meaning: str


HOOKS: Mapping[str, Hook] = {
    "configured": Hook(
        "",
        "a function of the installed `PatchSet`, a `TransformerConfig` and its `BurstConfig`; "
        "`configure_model` calls it last",
    ),
    "cpu": Hook(
        "testing", "a module whose `enable()` maps CUDA to the CPU in this process; for `--cpu`"
    ),
    "recipe_cpu": Hook(
        "testing", "a module with `enable()`, and with `adapt(recipe)` for a recipe's settings"
    ),
    "diffusion_recipes": Hook(
        "diffusion", "a module that implements `recipes.diffusion_models.DiffusionRecipes`"
    ),
    "gpu_report": Hook(
        "tools", "a module with `run(path, device, quick)`; for `doctor --gpu-report`"
    ),
    "host_memory": Hook(
        "longseq", "a module with `HostMemory` and `copy_rate`; `calibrate` measures copies"
    ),
    "hybrid_keys": Hook(
        "sparse",
        "a function of a `BurstConfig`, the rows per key, whether an indexer selects keys, the "
        "width of keys and whether CUDA is used, that returns the algorithm of these keys and "
        "whether the kernels of selected keys run; `advise` calls it",
    ),
    "offload_tier": Hook(
        "longseq",
        "a function of the installed `PatchSet` that returns the object which moves activations to "
        "host memory, or None; recomputed layers call it",
    ),
    "option_problems": Hook(
        "",
        "a function of a `TransformerConfig` (or parsed arguments with the same names), a "
        "`BurstConfig` and the global sequence length in tokens (or None) that yields each "
        "`Problem` of the plugin's options; `configure`, Megatron-LM's command line and `doctor` "
        "call it",
    ),
    "patch_megatron": Hook(
        "", "a function that adds patches to a `megatron.patching.PatchSet`; `install` calls it"
    ),
    "row_chunks": Hook(
        "longseq",
        "a function of a `BurstConfig` that returns the number of row chunks in the attention part "
        'of a layer, or "auto"',
    ),
    "sparse_problems": Hook(
        "sparse",
        "a function of a `TransformerConfig`, a `BurstConfig` and the setting that enables sparse "
        "layers that yields each `Problem` of these layers",
    ),
    "trees": Hook("rl", "the module `mb.trees`, which `--burst-pack trees` needs"),
    "vision_recipes": Hook(
        "vision", "a module that implements `recipes.vision_models.VisionRecipes`"
    ),
}


def plugins() -> dict[str, Plugin]:
    """Return all installed plugins by name, in alphabetical order."""
    folder = importlib.import_module(_FOLDER)
    names = sorted(module.name for module in pkgutil.iter_modules(folder.__path__) if module.ispkg)
    return {name: importlib.import_module(f"{_FOLDER}.{name}.entry").PLUGIN for name in names}


def load(plugin: str, place: str) -> Any:
    """Import a module of a plugin, or an object of the module.

    Args:
        plugin: Name of the plugin.
        place: `MODULE` or `MODULE:NAME`, relative to the folder of the plugin.

    Returns:
        The module, or the object `NAME` of the module.
    """
    module, _, name = place.partition(":")
    loaded = importlib.import_module(f"{_FOLDER}.{plugin}.{module}")
    return getattr(loaded, name) if name else loaded


def option_classes() -> list[type]:
    """Return the option classes of all plugins that have options, in alphabetical order of plugins.

    Raises:
        ValueError: Two option classes, of plugins or of this package, define the same option, or a
            class is not a dataclass.
    """
    classes = [load(name, entry.options) for name, entry in plugins().items() if entry.options]
    for cls in classes:
        if "__dataclass_fields__" not in vars(cls):
            raise ValueError(f"{cls} is not a dataclass; add @dataclass(frozen=True)")
    defined: dict[str, type] = {}
    for cls in dict.fromkeys(
        base for option_class in classes for base in reversed(option_class.__mro__)
    ):
        for name in vars(cls).get("__annotations__", {}):
            if name in defined:
                raise ValueError(
                    f"option {name} is defined by both {defined[name]} and {cls}; rename one"
                )
            defined[name] = cls
    return classes


def public_names() -> dict[str, tuple[str, str]]:
    """Return (plugin, `MODULE:NAME`) of each public name of all plugins, by name."""
    return {
        name: (plugin, place)
        for plugin, entry in plugins().items()
        for name, place in entry.public.items()
    }


def commands() -> dict[str, Command]:
    """Return the sub-commands of all plugins by name, with full names of their modules."""
    return {
        name: command._replace(module=f"{_FOLDER}.{plugin}.{command.module}")
        for plugin, entry in plugins().items()
        for name, command in entry.commands.items()
    }


def missing(hook: str, user: str) -> str | None:
    """Return an error message if no installed plugin provides the hook, otherwise None.

    The check imports only the module `entry` of each plugin, not the hook.

    Args:
        hook: A name in `HOOKS`.
        user: Subject of the error message: the flag or function that requires the hook.
    """
    if any(hook in entry.hooks for entry in plugins().values()):
        return None
    plugin = HOOKS[hook].plugin
    return (
        f"{user} needs the plugin {plugin} of megatron_burst, which is not installed; install the "
        "complete package again"
    )


def require(hook: str, user: str) -> None:
    """Check that an installed plugin provides the hook, without importing the hook.

    Args:
        hook: A name in `HOOKS`.
        user: Subject of the error message: the flag or function that requires the hook.

    Raises:
        ValueError: No installed plugin provides the hook.
    """
    message = missing(hook, user)
    if message is not None:
        raise ValueError(message)


def required(hook: str, user: str) -> Any:
    """Import and return a hook; raise ValueError if no plugin provides it.

    Args:
        hook: A name in `HOOKS`.
        user: Subject of the error message: the flag or function that requires the hook.

    Raises:
        ValueError: No installed plugin provides the hook.
    """
    require(hook, user)
    return optional(hook)


def optional(hook: str) -> Any:
    """Import and return a hook; None if no installed plugin provides the hook."""
    return next((hook_object for _, hook_object in hooked(hook)), None)


def hooked(hook: str) -> Iterator[tuple[str, Any]]:
    """Yield (plugin name, imported hook) for each plugin with the hook, in alphabetical order."""
    for name, entry in plugins().items():
        if hook in entry.hooks:
            yield name, load(name, entry.hooks[hook])
