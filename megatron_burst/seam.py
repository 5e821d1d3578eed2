# SPDX-License-Identifier: Apache-2.0
"""Seams: decorators in a patched Megatron tree that make functions replaceable.

In a patched tree (`patches/`), `@seam` decorates each function that this package changes, so
nothing is monkey-patched at run time. A seam calls the original function until
`megatron_burst.megatron.install` sets a replacement, and again after `uninstall`. This module
imports nothing else of the package and nothing of Megatron, because Megatron imports this module.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

MARKER = "__megatron_burst_seam__"
DECORATORS = ("seam", "entrance")


class SeamPlace(NamedTuple):
    """A function of Megatron with a seam.

    Attributes:
        purpose: Name of the patch (in `patches/`) that adds the seam.
        module: Module of the function.
        name: Qualified name of the function in the module.
        decorator: "seam" or "entrance".
    """

    purpose: str
    module: str
    name: str
    decorator: str = "seam"

    @property
    def file(self) -> str:
        """Return the path of the module in a Megatron tree."""
        return self.module.replace(".", "/") + ".py"


_MODELS = "megatron.core.models"
PLACES = (
    SeamPlace("core-attention", "megatron.core.transformer.attention", "Attention.__init__"),
    SeamPlace(
        "core-attention",
        "megatron.core.transformer.multi_latent_attention",
        "MultiLatentAttention.__init__",
    ),
    SeamPlace("slicing", "megatron.core.utils", "get_batch_on_this_cp_rank"),
    SeamPlace("slicing", f"{_MODELS}.common.embeddings.rope_utils", "get_pos_emb_on_this_cp_rank"),
    SeamPlace("slicing", f"{_MODELS}.common.embeddings.rope_utils", "_apply_rotary_pos_emb_thd"),
    SeamPlace("recompute", "megatron.core.tensor_parallel.random", "checkpoint"),
    SeamPlace(
        "lm-head",
        f"{_MODELS}.common.language_module.language_module",
        "LanguageModule.compute_language_model_loss",
    ),
    SeamPlace(
        "lm-head",
        f"{_MODELS}.common.language_module.language_module",
        "LanguageModule.setup_embeddings_and_output_layer",
    ),
    SeamPlace("lm-head", f"{_MODELS}.gpt.gpt_model", "GPTModel.forward"),
    SeamPlace(
        "lm-head",
        "megatron.core.transformer.multi_token_prediction",
        "_compute_mtp_acceptance_counts",
    ),
    SeamPlace("lm-head", "megatron.core.transformer.multi_token_prediction", "process_mtp_loss"),
    SeamPlace("flags", "megatron.training.arguments", "add_megatron_arguments", "entrance"),
    SeamPlace("flags", "megatron.training.argument_utils", "core_transformer_config_from_args"),
)


class Seam:
    """A decorated function of Megatron, and its current replacement.

    Attributes:
        bare: The decorated function.
        inner: Replacement that is called instead of `bare`, or None.
    """

    def __init__(self, bare: Callable[..., Any]) -> None:
        self.bare = bare
        self.inner: Callable[..., Any] | None = None


def seam(function: F) -> F:
    """Decorate `function` so that `install` can replace it."""
    return _with_seam(function)


def entrance(function: F, install: Callable[[], object]) -> F:
    """Decorate `function` so that a call first runs `install`, if no replacement is set.

    A patched Megatron uses this decorator for the function that declares its flags.

    Args:
        function: A function of Megatron.
        install: Function that sets the replacements of all seams.
    """
    return _with_seam(function, install)


def _with_seam(function: F, install: Callable[[], object] | None = None) -> F:
    state = Seam(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if install is not None and state.inner is None:
            install()
        return (state.inner or state.bare)(*args, **kwargs)

    setattr(call, MARKER, state)
    return call  # pyright: ignore[reportReturnType]


def inside(function: object) -> Seam | None:
    """Return the seam of a function; None if the function has no seam."""
    return getattr(function, MARKER, None)


def definition(tree: ast.Module, name: str) -> ast.FunctionDef | None:
    """Return the last definition of a function in a module; None if the module has none.

    Args:
        tree: Parsed source of the module.
        name: "function" or "Class.function".
    """
    body: list[ast.stmt] = tree.body
    *classes, function = name.split(".")
    for class_name in classes:
        body = next(
            (
                node.body
                for node in body
                if isinstance(node, ast.ClassDef) and node.name == class_name
            ),
            [],
        )
    definitions = [
        node for node in body if isinstance(node, ast.FunctionDef) and node.name == function
    ]
    return definitions[-1] if definitions else None


def marked(source: str, place: SeamPlace) -> bool:
    """Return True if the function of `place` has its seam decorator in the module's source."""
    function = definition(ast.parse(source), place.name)
    names = [ast.unparse(decorator) for decorator in function.decorator_list] if function else []
    return names[:1] == [place.decorator]  # must be outermost, so that Megatron calls it
