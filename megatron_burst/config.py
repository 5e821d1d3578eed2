# SPDX-License-Identifier: Apache-2.0
"""`BurstConfig`: the options of a run of Megatron, of the spine and of all installed plugins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import registry
from .option_table import Auto, OptionField
from .spine_options import OFF, SpineOptions

__all__ = ["FIELDS", "OFF", "Auto", "BurstConfig", "flag_of"]

_MEANING = """The options of a run, for `mb.megatron.configure`; each has a flag.

    Raises:
        ValueError: for a value that an option cannot have; the message has its name and flag.
"""

if TYPE_CHECKING:
    # The spine reads its own options. A plugin annotates its own class, which has both.
    BurstConfig = SpineOptions
else:
    # The fields of the spine come first, then those of plugins in alphabetical order.
    _BASES = (*reversed(registry.option_classes()), SpineOptions)
    BurstConfig = dataclass(frozen=True)(type("BurstConfig", _BASES, {"__module__": __name__}))

FIELDS: Mapping[str, OptionField] = BurstConfig.FIELDS
BurstConfig.__doc__ = "\n\n".join(
    [
        _MEANING,
        *(f"{field.name} (`{field.flag}`): {field.option.meaning}." for field in FIELDS.values()),
    ]
)


def flag_of(name: str) -> str:
    """The flag of an option."""
    return FIELDS[name].flag
