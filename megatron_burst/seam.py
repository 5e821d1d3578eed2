# SPDX-License-Identifier: Apache-2.0
"""Seams: decorators in a patched Megatron, so that none of its functions is replaced at run time.

A patched tree (`patches/`) marks each function that this plugin changes with `@seam`. A seam
calls its function until `megatron_burst.megatron.install` puts a replacement into it, and again
after `uninstall`. This module imports nothing of the package or of Megatron, because Megatron
imports it while it is itself being imported.
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
    """The state of a seam: the function it marks, and the replacement that runs instead."""

    def __init__(self, bare: Callable[..., Any]) -> None:
        self.bare = bare
        self.inner: Callable[..., Any] | None = None


def seam(function: F) -> F:
    """`function`, until `install` puts a replacement into the seam."""
    return _made(function)


def entrance(function: F, install: Callable[[], object]) -> F:
    """A seam that calls `install` on its first call: the place where flags are declared."""
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
    """The state of the seam on a function; None without a seam."""
    return getattr(function, MARKER, None)


def definition(tree: ast.Module, name: str) -> ast.FunctionDef | None:
    """The (last) definition of a function, or of Class.function, in a module's source."""
    body: list[ast.stmt] = tree.body
    *classes, function = name.split(".")
    for one in classes:
        body = next((n.body for n in body if isinstance(n, ast.ClassDef) and n.name == one), [])
    found = [n for n in body if isinstance(n, ast.FunctionDef) and n.name == function]
    return found[-1] if found else None


def marked(source: str, place: SeamPlace) -> bool:
    """Whether this source of the module has the seam at that place."""
    found = definition(ast.parse(source), place.name)
    names = [ast.unparse(d) for d in found.decorator_list] if found else []
    return names[:1] == [place.decorator]  # outermost, or it would not be what Megatron calls
