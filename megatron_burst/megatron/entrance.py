# SPDX-License-Identifier: Apache-2.0
"""The seam through which a patched Megatron installs the plugin when it declares its flags."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from .. import seam
from .install import install

F = TypeVar("F", bound=Callable[..., Any])


def entrance(function: F) -> F:
    """Return `function` as a seam whose first call installs the plugin."""
    return seam.entrance(function, install)
