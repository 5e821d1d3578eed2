# SPDX-License-Identifier: Apache-2.0
"""Decorator in a patched Megatron that calls `install` before Megatron declares its flags."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from .. import seam
from .install import install

F = TypeVar("F", bound=Callable[..., Any])


def entrance(function: F) -> F:
    """Decorate `function` with a seam (see module `seam`) whose first call calls `install`."""
    return seam.entrance(function, install)
