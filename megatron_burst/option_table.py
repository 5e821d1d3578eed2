# SPDX-License-Identifier: Apache-2.0
"""Declaration of the options of a training run: dataclass fields with help texts and flags.

`OptionSet` is the base of all option classes: `spine_options.SpineOptions` and one class per plugin
that has options. `config.BurstConfig` has the fields of all of them. Flags, recipe arguments and
the table in the documentation are generated from these fields.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
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
    """Metadata of one option, in the `Annotated` type of its field.

    Attributes:
        meaning: Help text and documentation of the option.
        flag: Command-line flag; empty means `--burst-<name>`.
        names: Valid strings; empty if the type of the field lists them.
        text: Kind of string, if there is no list of valid strings: "SIZE" such as 1.5TB, "FILE" (a
            path) or "MODULE:NAME" (a function).
        alone: True if the option has an effect without `--context-parallel-algo`.
        excludes: Names of other options that were not tested together with this option.
    """

    meaning: str
    flag: str = ""
    names: tuple[str, ...] = ()
    text: Literal["SIZE", "FILE", "MODULE:NAME"] = "SIZE"
    alone: bool = False
    excludes: tuple[str, ...] = ()


class OptionField(NamedTuple):
    """One field of an option class, parsed from its `Annotated` type.

    Attributes:
        name: Name of the field.
        flag: Flag on the command line, with leading dashes.
        option: Metadata of the option.
        kind: int or float if the value may be a number, otherwise str.
        names: Valid strings. If empty, an option of kind str accepts any string of the kind
            `option.text`; options of kind int and float accept no string.
        optional: True if the value may be None.
        default: Default value.
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
        """Return the name of the attribute in parsed arguments."""
        return self.flag.removeprefix("--").replace("-", "_")

    @property
    def metavar(self) -> str:
        """Return the possible values, as a help text shows them."""
        if self.kind is str and self.names:
            return "{" + ",".join(self.names) + "}"
        letter = {str: self.option.text, int: "N", float: "F"}[self.kind]
        return "|".join([letter, *self.names])

    @property
    def reader(self) -> Callable[[str], Any]:
        """Return the function that converts a word of a command line to a value."""

        def read(word: str) -> Any:
            return word if word in self.names else self.kind(word)

        read.__name__ = " or ".join([self.kind.__name__, *self.names])  # for argparse's errors
        return read

    def check(self, value: Any) -> None:
        """Check `value` against `kind`, `names` and `optional`.

        Raises:
            ValueError: The value is not valid. The message names the field and its flag.
        """
        title = f"{self.name} ({self.flag})"
        if (value is None and self.optional) or (self.names and value in self.names):
            return
        if self.names and self.kind is str:
            shown = ", ".join(("None", *self.names) if self.optional else self.names)
            raise ValueError(f"{title} must be one of {shown}, got {value!r}")
        alternatives = f" or {' or '.join(self.names)}" if self.names else ""
        if self.kind is float:
            check_fraction(title, value, alternatives)
        elif self.kind is int:
            if type(value) is not int or value < 1:
                raise ValueError(f"{title} must be an integer >= 1{alternatives}, got {value!r}")
        elif self.option.text == "SIZE":
            size_of(value, title)
        elif self.option.text == "MODULE:NAME":
            if not (isinstance(value, str) and re.fullmatch(r"[\w.]+:[\w.]+", value)):
                raise ValueError(f"{title} must be MODULE:NAME of a function, got {value!r}")
        elif not (isinstance(value, str) and value):
            raise ValueError(f"{title} must be the path of a file, got {value!r}")


@dataclass(frozen=True)
class OptionSet:
    """Base class of all option classes.

    Each field has a type `Annotated[TYPE, Option(...)]` and a default. Values are checked but never
    changed. "auto" is resolved later: for the layout when a model is configured, for other options
    when a plan is made.

    Raises:
        ValueError: A field has an unsupported value. The message names the field and its flag.
    """

    FIELDS: ClassVar[Mapping[str, OptionField]] = {}  # by name, in the order of declaration

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
    if bool in types:
        raise TypeError(f'option {name} has type bool; use Literal["off", "on"]')
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
    """Return the strings of a type hint that is a Literal or a union with a Literal."""
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return [name for part in get_args(hint) for name in _literals(part)]
