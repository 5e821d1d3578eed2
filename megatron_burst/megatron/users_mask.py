# SPDX-License-Identifier: Apache-2.0
"""A mask of the user's own in Megatron: `--burst-mask module:name`.

The name is that of a callable, which gets a `MaskLayer` and a `MaskBatch` and returns the mask of
that layer for that batch: one of `mb.masks`, or an instance of a subclass of `mb.masks.Mask`. It is
called on every rank for every layer and batch, and ranks compare what it returned before they
attend. Decides what such a callable may rely on, and how a wrong one is reported.
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
    """An attention layer.

    number: from 1 on, over all pipeline stages. causal: False where Megatron asks for no mask.
    window: (left, right) tokens of `--window-size` in a windowed layer, None for no limit; None in
    a layer without a window.
    """

    number: int
    causal: bool
    window: tuple[int | None, int | None] | None


@dataclass(frozen=True)
class MaskBatch:
    """What the layer attends over.

    seq_len: tokens of the sequence, or of the pack, over all context-parallel ranks. cu_seqlens:
    the boundaries of a pack's documents, from 0 to seq_len, with padding as documents of its own;
    None for one sequence. spans: (first, stop) of what `vision.with_spans` was told, images for
    instance; None where it was not called.
    """

    seq_len: int
    cu_seqlens: tuple[int, ...] | None
    spans: tuple[tuple[int, int], ...] | None = None


def mask_function(path: str) -> Callable[..., object]:
    """The callable of `--burst-mask`. Raises `ValueError` naming the flag if there is none."""
    module, _, name = path.partition(":")
    try:
        function: Any = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
    except Exception as error:  # whatever the user's module raises
        raise ValueError(
            f"{FLAG} {path}: {type(error).__name__}: {error}; it takes MODULE:NAME, of a module "
            "that every rank can import (PYTHONPATH)"
        ) from error
    if not callable(function):
        raise ValueError(
            f"{FLAG} {path}: {type(function).__name__} is not callable; it takes a function of "
            "(layer, batch) that returns a mask"
        )
    return function


def users_mask(path: str, layer: MaskLayer, batch: MaskBatch) -> Mask:
    """The mask of a layer for a batch, as the callable of `--burst-mask` returns it.

    Raises `ValueError` naming the flag where it raises, or returns no mask that ranks can compare.
    """
    function = mask_function(path)
    what = f"{FLAG} {path} for layer {layer.number}"
    try:
        mask = function(layer, batch)
    except Exception as error:  # the other ranks are told, instead of left waiting
        raise ValueError(f"{what}: {type(error).__name__}: {error}") from error
    if not isinstance(mask, Mask):
        raise ValueError(f"{what} returned {mask!r:.100}, which is not a mask of mb.masks")
    if type(mask).__repr__ is object.__repr__:
        raise ValueError(
            f"{what} returned a {type(mask).__name__} without a __repr__ of its own, by which "
            "ranks compare masks: make it a dataclass"
        )
    return mask
