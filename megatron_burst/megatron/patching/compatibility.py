"""Checks that a Megatron function still has the parameters that its replacement relies on.

There is an oldest supported version but no newest one: each patch checks the function it replaces,
and the error names Megatron's version and the function. Megatron-Core is imported inside the
functions, because the command line and recipes import this module before they need Megatron.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

OLDEST = (0, 16)  # of Megatron-Core: no older version was ever tested


def core_version() -> tuple[int, ...]:
    """Major and minor version of Megatron-Core."""
    import megatron.core

    return tuple(int(part) for part in megatron.core.__version__.split(".")[:2])


def check_version() -> None:
    """Raise ``RuntimeError`` for a Megatron-Core older than `OLDEST`."""
    import megatron.core

    if core_version() < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise RuntimeError(
            f"Megatron-Core {megatron.core.__version__} is older than {oldest}, the oldest that "
            "megatron_burst works with; upgrade megatron-core"
        )


def require_parameters(function: Callable, names: Sequence[str], symbol: str) -> None:
    """Raise ``RuntimeError`` unless ``function`` takes (at least) the parameters ``names``."""
    import megatron.core

    found = list(inspect.signature(function).parameters)
    missing = [name for name in names if name not in found]
    if missing:
        raise RuntimeError(
            f"Megatron-Core {megatron.core.__version__}: {symbol} takes {found}, without "
            f"{missing}; this version of megatron_burst does not support it"
        )


def require_function(home: Any, name: str, parameters: Sequence[str]) -> Callable:
    """The function ``name`` of a module of Megatron, if it takes ``parameters``.

    Raises ``RuntimeError`` naming Megatron's version and the symbol otherwise.
    """
    import megatron.core

    symbol = f"{home.__name__.removeprefix('megatron.')}.{name}"
    found = getattr(home, name, None)
    if found is None:
        raise RuntimeError(
            f"Megatron-Core {megatron.core.__version__} has no {symbol}; this version of "
            "megatron_burst does not support it"
        )
    require_parameters(found, parameters, symbol)
    return found
