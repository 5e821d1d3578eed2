"""Seams: the lines that a patched Megatron has, so that nothing of it is replaced at run time.

A patched tree (`patches/`) marks each function that this plugin changes with ``@seam``. A seam
calls its function, until `megatron_burst.megatron.install` puts something around it, and again
after ``uninstall``. Owns: what a seam is, and the list of places that have one. Must not know:
Megatron, which imports this module while it is itself being imported, or what goes into a seam.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

MARKER = "__megatron_burst_seam__"
DECORATORS = ("seam", "entrance")


class Place(NamedTuple):
    """A function of Megatron with a seam: its purpose (a patch of the series), module and name."""

    purpose: str
    module: str
    name: str
    decorator: str = "seam"

    @property
    def file(self) -> str:
        """Path in a Megatron tree."""
        return self.module.replace(".", "/") + ".py"


_MODELS = "megatron.core.models"
PLACES = (
    Place("core-attention", "megatron.core.transformer.attention", "Attention.__init__"),
    Place(
        "core-attention",
        "megatron.core.transformer.multi_latent_attention",
        "MultiLatentAttention.__init__",
    ),
    Place("slicing", "megatron.core.utils", "get_batch_on_this_cp_rank"),
    Place("slicing", f"{_MODELS}.common.embeddings.rope_utils", "get_pos_emb_on_this_cp_rank"),
    Place("slicing", f"{_MODELS}.common.embeddings.rope_utils", "_apply_rotary_pos_emb_thd"),
    Place("recompute", "megatron.core.tensor_parallel.random", "checkpoint"),
    Place(
        "lm-head",
        f"{_MODELS}.common.language_module.language_module",
        "LanguageModule.compute_language_model_loss",
    ),
    Place(
        "lm-head",
        f"{_MODELS}.common.language_module.language_module",
        "LanguageModule.setup_embeddings_and_output_layer",
    ),
    Place("lm-head", f"{_MODELS}.gpt.gpt_model", "GPTModel.forward"),
    Place(
        "lm-head",
        "megatron.core.transformer.multi_token_prediction",
        "_compute_mtp_acceptance_counts",
    ),
    Place("lm-head", "megatron.core.transformer.multi_token_prediction", "process_mtp_loss"),
    Place("flags", "megatron.training.arguments", "add_megatron_arguments", "entrance"),
    Place("flags", "megatron.training.argument_utils", "core_transformer_config_from_args"),
)


class Seam:
    """What is inside a seam: the function it marks, and what runs instead of it."""

    def __init__(self, bare: Callable[..., Any]) -> None:
        self.bare = bare
        self.inner: Callable[..., Any] | None = None


def seam(function: F) -> F:
    """`function` itself, until something is put around it."""
    return _made(function)


def entrance(function: F, install: Callable[[], object]) -> F:
    """A seam that calls `install` when it is first called: where flags are declared."""
    return _made(function, install)


def _made(function: F, install: Callable[[], object] | None = None) -> F:
    inside = Seam(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if install is not None and inside.inner is None:
            install()
        return (inside.inner or inside.bare)(*args, **kwargs)

    setattr(call, MARKER, inside)
    return call  # pyright: ignore[reportReturnType]


def inside(function: object) -> Seam | None:
    """The seam that a function is, or None."""
    return getattr(function, MARKER, None)


def definition(tree: ast.Module, name: str) -> ast.FunctionDef | None:
    """The (last) definition of a function, or of Class.function, in a module's source."""
    body: list[ast.stmt] = tree.body
    *classes, function = name.split(".")
    for one in classes:
        body = next((n.body for n in body if isinstance(n, ast.ClassDef) and n.name == one), [])
    found = [n for n in body if isinstance(n, ast.FunctionDef) and n.name == function]
    return found[-1] if found else None


def marked(source: str, place: Place) -> bool:
    """Does this source of the module have the seam at that place?"""
    found = definition(ast.parse(source), place.name)
    names = [ast.unparse(d) for d in found.decorator_list] if found else []
    return names[:1] == [place.decorator]  # outermost, or it would not be what Megatron calls
