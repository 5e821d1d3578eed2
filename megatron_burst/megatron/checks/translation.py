"""Errors that come after a configuration was checked, in the words of those who wrote it.

Scripts have flags, recipes have settings. Owns: which of the two a model of this process was built
from. What is found wrong while it is built or trained is told by `error`. Must not know: recipes.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_burst.megatron.patching import registry

_WORDS = "words"


def speak_of(words: Callable[[str], str] | None) -> None:
    """From now on, until `uninstall`, tell errors as ``words(text about flags)``; None as is."""
    patches = registry.installed("burst")
    if patches is not None:
        patches.notes[_WORDS] = words


def error(text: str) -> ValueError:
    """What to raise, from a text that names flags."""
    patches = registry.installed("burst")
    words = patches.notes.get(_WORDS) if patches else None
    return ValueError(text if words is None else words(text))
