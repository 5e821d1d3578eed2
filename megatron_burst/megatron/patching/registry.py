"""The registry of what has been replaced inside Megatron and torch, and how to restore it.

This is one of the two pieces of process-wide state of the package. A set of patches is applied
completely or not at all, and removed completely.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

_installed: dict[str, PatchSet] = {}


@dataclass
class PatchSet:
    """A named group of replacements that are undone together.

    ``notes`` holds the state that these replacements share while they are installed.
    """

    name: str
    notes: dict[str, Any] = field(default_factory=dict)
    _undo: list[Callable[[], object]] = field(default_factory=list)

    def replace(self, owner: object, attribute: str, value: object) -> object:
        """Set ``owner.attribute`` and return its old value; ``AttributeError`` if it had none."""
        previous = inspect.getattr_static(owner, attribute)
        setattr(owner, attribute, value)
        self._undo.append(lambda: setattr(owner, attribute, previous))
        return previous

    def replace_function(self, home: object, name: str, value: Callable) -> None:
        """Replace a module-level function in its home module and wherever it was from-imported.

        Modules imported later take the replacement from the home module, so undoing looks at
        every loaded module again.
        """
        original = getattr(home, name)
        rename_everywhere(name, original, value)
        self._undo.append(lambda: rename_everywhere(name, value, original))

    def on_undo(self, action: Callable[[], object]) -> None:
        """Run ``action`` when the set is removed."""
        self._undo.append(action)

    def undo(self) -> None:
        """Restore everything, newest first."""
        while self._undo:
            self._undo.pop()()


def rename_everywhere(name: str, old: object, new: object) -> None:
    """Bind ``name`` to ``new`` in every loaded module where it is bound to ``old``."""
    for module in list(sys.modules.values()):
        namespace = getattr(module, "__dict__", None)
        # Read the dict, not the attribute: reading an attribute of a lazy module may import it.
        if namespace is not None and namespace.get(name) is old:
            setattr(module, name, new)


@contextmanager
def patching(name: str) -> Iterator[PatchSet]:
    """Collect replacements into a new set; an exception inside undoes all of them."""
    patches = PatchSet(name)
    try:
        yield patches
    except BaseException:
        patches.undo()
        raise
    _installed[name] = patches


def installed(name: str) -> PatchSet | None:
    """The set of that name, or None."""
    return _installed.get(name)


def remove(name: str) -> bool:
    """Undo the set of that name; False when it was not installed."""
    patches = _installed.pop(name, None)
    if patches is None:
        return False
    patches.undo()
    return True
