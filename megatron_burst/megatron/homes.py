# SPDX-License-Identifier: Apache-2.0
"""Where Megatron keeps modules that move between packages: layers that carry a state, and sparse
attention.

A Megatron in which they have moved costs one line of `PACKAGES`. The module of a class is asked for
by the last part of its name, which is the same in every package.
"""

from __future__ import annotations

import importlib
from typing import Any

# The first that has a module counts.
PACKAGES = (
    "megatron.core.ssm",
    "megatron.core.transformer.experimental_attention_variant",
)


def find(name: str) -> Any:
    """The module `name` of whichever of `PACKAGES` has it; None without one."""
    for package in PACKAGES:
        path = f"{package}.{name}"
        try:
            return importlib.import_module(path)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{path}.".startswith(f"{error.name}."):
                raise  # the module is there, and something that it imports is not
    return None


def module(name: str) -> Any:
    """The module `name` of whichever of `PACKAGES` has it.

    Raises `RuntimeError` naming Megatron's version and the packages where none has it.
    """
    found = find(name)
    if found is None:
        import megatron.core

        raise RuntimeError(
            f"Megatron-Core {megatron.core.__version__} has no module {name} in "
            f"{' or '.join(PACKAGES)}; this version of megatron_burst does not support it"
        )
    return found
