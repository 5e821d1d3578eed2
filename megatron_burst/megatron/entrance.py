"""The seam that a patched Megatron enters the plugin by: where it declares its flags."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from megatron_burst import seam
from megatron_burst.megatron.install import install

F = TypeVar("F", bound=Callable[..., Any])


def entrance(function: F) -> F:
    """`function` as a seam that installs the plugin when it is first called."""
    return seam.entrance(function, install)
