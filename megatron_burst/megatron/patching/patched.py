"""A Megatron that has the patches of `patches/`: filling its seams instead of replacing functions.

Owns: which places of the Megatron that is imported have a seam, and that a seam ends up around
what `install` made for its function. A place without one is replaced as ever, so a tree may have
a part of the series. Must not know what the plugin does at any place.
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
    """A seam of the imported Megatron: what owns it (a module or a class), its name, itself."""

    owner: Any
    name: str
    call: Callable[..., Any]
    seam: Seam


def patched_places() -> list[Place]:
    """The places that have a seam in this Megatron; all of `seam.PLACES` in a patched tree."""
    return [place for place, _ in _seams()]


@contextmanager
def opened(patches: registry.PatchSet, purpose: str | None = None) -> Iterator[None]:
    """Inside, functions with a seam stand bare; what is then in their place goes into the seam.

    purpose: only of that patch of the series; None for all. Removing ``patches`` empties the
    seams. Nothing happens in a tree without any.
    """
    found = [one for place, one in _seams() if purpose in (None, place.purpose)]
    patches.on_undo(lambda: _close(found, empty=True))
    for one in found:
        setattr(one.owner, one.name, one.seam.bare)
    yield
    _close(found, empty=False)


def _close(found: list[Found], empty: bool) -> None:
    """Put the seams back where they were, around what is there now."""
    for owner, name, call, seam in found:
        now = inspect.getattr_static(owner, name)
        seam.inner = None if empty or now is seam.bare else now
        setattr(owner, name, call)
        if inspect.ismodule(owner):  # whoever was imported meanwhile took what stood there
            registry.rename_everywhere(name, now, call)
            registry.rename_everywhere(name, seam.bare, call)


def _seams() -> list[tuple[Place, Found]]:
    """The seams of this Megatron, but for those in parts of megatron.training not imported yet.

    Whoever replaces functions there imports it first. Nobody else should have to: a script on
    Megatron-Core alone does not need it.
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
