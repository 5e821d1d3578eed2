"""Errors of building and training a model, translated for users of recipes.

Error messages name flags of Megatron-LM. A recipe has settings instead, so it registers a function
that translates messages; `user_error` applies it.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_burst.megatron.patching import registry

_TRANSLATE = "translate errors"


def translate_with(translate: Callable[[str], str] | None) -> None:
    """Apply ``translate`` to all messages until `uninstall`; None leaves them as they are."""
    patches = registry.installed("burst")
    if patches is not None:
        patches.notes[_TRANSLATE] = translate


def user_error(text: str) -> ValueError:
    """The error to raise for a message that names flags."""
    patches = registry.installed("burst")
    translate = patches.notes.get(_TRANSLATE) if patches else None
    return ValueError(text if translate is None else translate(text))
