# SPDX-License-Identifier: Apache-2.0
"""How an option of a run is declared: a field of a class of options, with its meaning and its flag.

`OptionSet` is the base of all classes of options: those of the spine (`spine_options.SpineOptions`)
and one per plugin that has some. `config.BurstConfig` has the fields of all of them. The command
line, the arguments of recipes and the table in the documentation are made from these fields.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    get_args,
    get_origin,
    get_type_hints,
)

from .layout import check_fraction
from .units import size_of

Auto = Literal["auto"]


class Option(NamedTuple):
    """The metadata of one option; `Annotated` in the type of its field.

    Attributes:
        meaning: what the option does, for help texts and the documentation.
        flag: its flag, if that is not `--burst-<name>`.
        names: the values that it may have, if its type does not list them.
        text: what a value is that is a free text: a size such as 1.5TB, the path of a file, or the
            name of a function.
        alone: whether the option has an effect without `--context-parallel-algo`.
        excludes: other options with which it was not tested, by their fields.
    """

    meaning: str
    flag: str = ""
    names: tuple[str, ...] = ()
    text: Literal["SIZE", "FILE", "MODULE:NAME"] = "SIZE"
    alone: bool = False
    excludes: tuple[str, ...] = ()


class OptionField(NamedTuple):
    """One field of a class of options, as its type and its `Option` declare it.

    Attributes:
        name: of the field.
        flag: on the command line.
        option: its metadata.
        kind: int or float if the value may be a number, else str.
        names: the texts that it may be; empty if any.
        optional: whether it may be None.
        default: its default value.
    """

    name: str
    flag: str
    option: Option
    kind: type
    names: tuple[str, ...]
    optional: bool
    default: Any

    @property
    def dest(self) -> str:
        """Its attribute in parsed arguments."""
        return self.flag.removeprefix("--").replace("-", "_")

    def check(self, value: Any) -> None:
        """Raise ValueError, with the field and its flag, unless `value` may be its value."""
        title = f"{self.name} ({self.flag})"
        if (value is None and self.optional) or (self.names and value in self.names):
            return
        if self.names and self.kind is str:
            shown = ", ".join(("None", *self.names) if self.optional else self.names)
            raise ValueError(f"{title} must be one of {shown}, got {value!r}")
        other = f" or {' or '.join(self.names)}" if self.names else ""
        if self.kind is float:
            check_fraction(title, value, other)
        elif self.kind is int:
            if type(value) is not int or value < 1:
                raise ValueError(f"{title} must be an integer from 1 on{other}, got {value!r}")
        elif self.option.text == "SIZE":
            size_of(value, title)
        elif not (isinstance(value, str) and value):
            raise ValueError(f"{title} must be the path of a file, got {value!r}")
        elif self.option.text == "MODULE:NAME" and not re.fullmatch(r"[\w.]+:[\w.]+", value):
            raise ValueError(f"{title} must be MODULE:NAME of a function, got {value!r}")


@dataclass(frozen=True)
class OptionSet:
    """The base of all classes of options.

    Each field has a type `Annotated[TYPE, Option(...)]` and a default. Values are checked and never
    changed: "auto" is resolved when a plan is made.

    Raises:
        ValueError: for a value that a field cannot have; the message has the field and its flag.
    """

    FIELDS: ClassVar[Mapping[str, OptionField]] = {}  # by name, in their order

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        hints = get_type_hints(cls, include_extras=True)
        cls.FIELDS = {
            name: _option_field(name, getattr(cls, name), *get_args(hint))
            for name, hint in hints.items()
            if get_origin(hint) is Annotated
        }

    def __post_init__(self) -> None:
        for name, field in self.FIELDS.items():
            field.check(getattr(self, name))


def _option_field(name: str, default: Any, hint: Any, option: Option) -> OptionField:
    types = (hint, *get_args(hint))
    return OptionField(
        name=name,
        flag=option.flag or f"--burst-{name.replace('_', '-')}",
        option=option,
        kind=next((kind for kind in (int, float) if kind in types), str),
        names=option.names or tuple(_literals(hint)),
        optional=type(None) in get_args(hint),
        default=default,
    )


def _literals(hint: Any) -> list[str]:
    """The strings of a Literal, also of one within a union."""
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return [name for part in get_args(hint) for name in _literals(part)]
