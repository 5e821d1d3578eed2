"""Filling the seams of a Megatron that has the patches of `patches/`.

A seam marks a function that the plugin changes. If the imported Megatron has one, `install` puts
its replacement into the seam; otherwise it replaces the function at run time. A tree may therefore
have only part of the patches.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from megatron_burst.megatron.patching import registry
from megatron_burst.seam import PLACES, Place, Seam, inside


class Found(NamedTuple):
    """A seam of the imported Megatron: owner (a module or a class), name, function, state."""

    owner: Any
    name: str
    call: Callable[..., Any]
    seam: Seam


def patched_places() -> list[Place]:
    """The places that have a seam in this Megatron; all of `seam.PLACES` in a patched tree."""
    return [place for place, _ in _seams()]


@contextmanager
def opened(patches: registry.PatchSet, purpose: str | None = None) -> Iterator[None]:
    """Inside, functions with a seam are exposed without it, so that they can be replaced as usual.

    On exit each replacement moves into its seam, and the seam is back in place. purpose: only the
    seams of that patch of the series; None for all. Removing ``patches`` empties the seams. A
    tree without seams is left alone.
    """
    found = [one for place, one in _seams() if purpose in (None, place.purpose)]
    patches.on_undo(lambda: _close(found, empty=True))
    for one in found:
        setattr(one.owner, one.name, one.seam.bare)
    yield
    _close(found, empty=False)


def _close(found: list[Found], empty: bool) -> None:
    """Put the seams back in place, around whatever replaced their functions."""
    for owner, name, call, seam in found:
        now = inspect.getattr_static(owner, name)
        seam.inner = None if empty or now is seam.bare else now
        setattr(owner, name, call)
        if inspect.ismodule(owner):  # a module imported in between may hold either of the others
            registry.rename_everywhere(name, now, call)
            registry.rename_everywhere(name, seam.bare, call)


def _seams() -> list[tuple[Place, Found]]:
    """The seams of this Megatron, except those in modules of megatron.training not yet imported.

    Code that replaces functions of megatron.training imports it first. A script on Megatron-Core
    alone does not need megatron.training, so it is not imported here.
    """
    places = [p for p in PLACES if p.module.startswith("megatron.core") or p.module in sys.modules]
    return [(place, one) for place in places if (one := _find(place)) is not None]


def _find(place: Place) -> Found | None:
    owner: Any = importlib.import_module(place.module)
    *classes, name = place.name.split(".")
    for one in classes:
        owner = getattr(owner, one, None)
    call = inspect.getattr_static(owner, name, None)
    seam = inside(call)
    return Found(owner, name, call, seam) if seam is not None else None
