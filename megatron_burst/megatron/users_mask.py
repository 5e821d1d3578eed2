# SPDX-License-Identifier: Apache-2.0
"""Mask functions of the user in Megatron: `--burst-mask MODULE:NAME`.

NAME is a callable. Its arguments are a `MaskLayer` and a `MaskBatch`, and it returns the mask of
that layer for that batch: a mask of `mb.masks`, or an instance of a subclass of `mb.masks.Mask`.
Every rank calls the function for every layer and batch. Ranks compare the returned masks before
they compute attention. This module defines the arguments of the callable and checks the callable.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..config import flag_of
from ..masks import Mask

FLAG = flag_of("mask")


@dataclass(frozen=True)
class MaskLayer:
    """An attention layer, as an argument of the user's mask function.

    Attributes:
        number: Layer number, from 1, over all pipeline stages.
        causal: Whether Megatron's mask of the layer is causal; False for no mask.
        window: (left, right) tokens of `--window-size`; None if the layer has no window. A side
            without a limit is None.
    """

    number: int
    causal: bool
    window: tuple[int | None, int | None] | None


@dataclass(frozen=True)
class MaskBatch:
    """A batch, as an argument of the user's mask function.

    Attributes:
        seq_len: Tokens of the sequence, or of the pack, over all context-parallel ranks.
        cu_seqlens: The boundaries of a pack's documents, from 0 to seq_len, with padding as
            separate documents; None if the batch is not packed.
        spans: (first, stop) of each span passed to `vision.with_spans`, for example of images;
            None if `with_spans` was not called.
    """

    seq_len: int
    cu_seqlens: tuple[int, ...] | None
    spans: tuple[tuple[int, int], ...] | None = None


def mask_function(path: str) -> Callable[..., object]:
    """Return the callable of `--burst-mask`.

    Args:
        path: MODULE:NAME.

    Raises:
        ValueError: The module or the name cannot be imported, or is not callable.
    """
    module, _, name = path.partition(":")
    try:
        function: Any = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
    except Exception as error:  # whatever the user's module raises
        raise ValueError(
            f"{FLAG} {path}: {type(error).__name__}: {error}; it must be MODULE:NAME, with a "
            "module that every rank can import (PYTHONPATH)"
        ) from error
    if not callable(function):
        raise ValueError(
            f"{FLAG} {path}: {type(function).__name__} is not callable; it must be a function of "
            "(layer, batch) that returns a mask"
        )
    return function


def users_mask(path: str, layer: MaskLayer, batch: MaskBatch) -> Mask:
    """Call the function of `--burst-mask` for a layer and a batch, and return its mask.

    Args:
        path: MODULE:NAME of the function.
        layer: the layer.
        batch: the batch.

    Raises:
        ValueError: The function raised, or did not return a mask that ranks can compare.
    """
    function = mask_function(path)
    caller = f"{FLAG} {path} for layer {layer.number}"
    try:
        mask = function(layer, batch)
    except Exception as error:  # the caller raises a ValueError on all ranks, so no rank waits
        raise ValueError(f"{caller}: {type(error).__name__}: {error}") from error
    if not isinstance(mask, Mask):
        raise ValueError(f"{caller} returned {mask!r:.100}, which is not a mask of mb.masks")
    if type(mask).__repr__ is object.__repr__:
        raise ValueError(
            f"{caller} returned a {type(mask).__name__} without its own __repr__, which ranks "
            "compare: make it a dataclass"
        )
    return mask
