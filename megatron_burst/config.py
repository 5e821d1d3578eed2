# SPDX-License-Identifier: Apache-2.0
"""`BurstConfig`: all options of a training run, from `SpineOptions` and all installed plugins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import registry
from .option_table import Auto, OptionField
from .spine_options import OFF, SpineOptions

__all__ = ["FIELDS", "OFF", "Auto", "BurstConfig", "flag_of"]

_SUMMARY = "Options of a training run, for `mb.megatron.configure`; each has a command-line flag."
_RAISES = """    Raises:
        ValueError: An option has an unsupported value. The message names the option and flag.
"""

if TYPE_CHECKING:
    # For type checkers: only plugin code reads options of plugins, and it annotates its own class.
    BurstConfig = SpineOptions
else:
    # Fields of `SpineOptions` come first, then those of plugins in alphabetical order of plugins.
    _BASES = (*reversed(registry.option_classes()), SpineOptions)
    BurstConfig = dataclass(frozen=True)(type("BurstConfig", _BASES, {"__module__": __name__}))

FIELDS: Mapping[str, OptionField] = BurstConfig.FIELDS
BurstConfig.__doc__ = "\n\n".join(
    [
        _SUMMARY,
        "\n".join(
            [
                "    Args:",
                *(
                    f"        {field.name}: {field.option.meaning}. Flag: `{field.flag}`."
                    for field in FIELDS.values()
                ),
            ]
        ),
        _RAISES,
    ]
)


def flag_of(name: str) -> str:
    """Return the command-line flag of the option `name`."""
    return FIELDS[name].flag
