# SPDX-License-Identifier: Apache-2.0
"""Command-line flags of a training run: the options of `BurstConfig`.

This module converts parsed arguments to a `BurstConfig` and sets defaults that depend on other
flags. `BurstConfig` checks the values, so a flag and a Python argument give the same ValueError.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from .config import FIELDS, OFF, BurstConfig
from .option_table import OptionField

GROUP = "megatron-burst"


class Flag(NamedTuple):
    """One command-line flag.

    Attributes:
        field: Field of `BurstConfig` that the flag sets.
        name: Name of the flag with leading dashes.
        type: Function that converts the word on the command line to the value.
        values: Possible values, as the help text shows them.
        help: Help text.
    """

    field: str
    name: str
    type: Callable[[str], Any]
    values: str
    help: str

    @property
    def dest(self) -> str:
        """Return the name of the attribute in parsed arguments."""
        return self.name.removeprefix("--").replace("-", "_")


def _flag(field: OptionField) -> Flag:
    texts = field.kind is str
    letter = {str: field.option.text * (not field.names), int: "N", float: "F"}[field.kind]
    values = "|".join([letter, *field.names])
    if texts and field.names:
        values = "{" + ",".join(field.names) + "}"
    read = _reader(field.kind, field.names)
    return Flag(field.name, field.flag, read, values, field.option.meaning)


def _reader(kind: type, names: Sequence[str]) -> Callable[[str], Any]:
    """Return a function that converts a word to `kind`; words in `names` are not converted."""

    def read(word: str) -> Any:
        return word if word in names else kind(word)

    read.__name__ = " or ".join([kind.__name__, *names])  # shown in argparse's errors
    return read


FLAGS = tuple(map(_flag, FIELDS.values()))
# Flags that have an effect without --context-parallel-algo.
ALONE = tuple(field.flag for field in FIELDS.values() if field.option.alone)


def add_flags(parser: argparse.ArgumentParser, *, algorithm: str) -> None:
    """Add all flags to `parser`, in an argument group named `GROUP`.

    Args:
        parser: Parser of the program.
        algorithm: Default value of --context-parallel-algo.

    Raises:
        ValueError: The parser already has one of the flags.
    """
    group = parser.add_argument_group(GROUP)
    for flag in FLAGS:
        try:
            group.add_argument(
                flag.name,
                type=flag.type,
                metavar=flag.values,
                default=algorithm if flag.field == "algorithm" else default(flag.field),
                help=flag.help.replace("%", "%%"),
            )
        except argparse.ArgumentError as error:
            raise ValueError(
                f"{flag.name} is a flag of this program already, so megatron_burst cannot add its "
                "flag; rename the flag of the program"
            ) from error


def default(field: str) -> Any:
    """Return the default value of a field; None for the layout, which `add_defaults` chooses."""
    if field == "layout":
        return None
    return FIELDS[field].default


def add_defaults(args: Any) -> None:
    """Set missing attributes of `args` to default values, and choose the layout if it is None.

    Arguments from an old checkpoint may lack the algorithm; it is then set to "megatron".

    Args:
        args: Parsed arguments; changed in place.
    """
    for flag in FLAGS:
        if not hasattr(args, flag.dest):
            setattr(args, flag.dest, OFF if flag.field == "algorithm" else default(flag.field))
    if args.burst_layout is None:
        split = getattr(args, "context_parallel_size", 1) != 1
        pack = args.burst_pack if split else "off"
        args.burst_layout = layout_for(args.context_parallel_algo, args.burst_attention_store, pack)


def layout_for(algorithm: Any, store: Any, pack: Any = "off") -> str:
    """Return the default value of --burst-layout, which depends on other options.

    Packed documents require "balanced", because zigzag cannot split documents of arbitrary length.
    A store between 0 and 1 requires "striped", the only layout that balances the recomputation.

    Args:
        algorithm: Value of --context-parallel-algo.
        store: Value of --burst-attention-store, or None.
        pack: Value of --burst-pack.

    Returns:
        "balanced", "striped" or "zigzag".
    """
    if pack == "documents" and algorithm != OFF:
        return "balanced"
    partial = isinstance(store, (int, float)) and 0 < store < 1
    return "striped" if partial and algorithm != OFF else "zigzag"


def burst_config(args: Any) -> BurstConfig:
    """Return a `BurstConfig` from arguments that `add_defaults` completed.

    Raises:
        ValueError: A flag has an unsupported value. The message names the flag.
    """
    return BurstConfig(**{flag.field: getattr(args, flag.dest) for flag in FLAGS})


def options_and_errors(args: Any) -> tuple[BurstConfig, list[str]]:
    """Return the options of a run, and an error message for each invalid value.

    Args:
        args: Arguments that `add_defaults` completed.

    Returns:
        A pair: the options, in which default values replace invalid values, and the error messages.
    """
    fields, messages = {flag.field: getattr(args, flag.dest) for flag in FLAGS}, []
    for name, value in list(fields.items()):
        try:
            FIELDS[name].check(value)
        except ValueError as error:
            messages.append(str(error))
            del fields[name]
    while True:
        try:
            return BurstConfig(**fields), messages
        except ValueError as error:
            # Options exclude each other: drop the first one in the message.
            messages.append(message := str(error))
            mentioned = [flag for flag in FLAGS if flag.name in message and flag.field in fields]
            if not mentioned:
                raise
            del fields[min(mentioned, key=lambda flag: message.index(flag.name)).field]


def stated(args: Any) -> dict[str, Any]:
    """Return the value of each flag in arguments that `add_defaults` completed, by flag name."""
    return {flag.name: getattr(args, flag.dest) for flag in FLAGS}


def present(argv: Sequence[str], *names: str) -> Iterator[str]:
    """Yield the flags that a command line contains.

    Args:
        argv: Words of the command line.
        *names: Flags to look for. Default: all flags of this module.
    """
    words = {word.split("=", 1)[0] for word in argv}
    return (name for name in names or [flag.name for flag in FLAGS] if name in words)


def table() -> str:
    """Return all flags as a Markdown table, for the documentation."""
    rows = [
        f"| `{flag.name}` | {_shown(flag)} | {flag.help.replace('|', ' or ')} |" for flag in FLAGS
    ]
    return "\n".join(["| flag | values | meaning |", "|-|-|-|", *rows])


def _shown(flag: Flag) -> str:
    field = FIELDS[flag.field]
    names = [f"`{name}`" for name in field.names]
    text = [] if names else [f"a {field.option.text.lower()}"]
    number = {int: ["N"], float: ["0 to 1"], str: text}[field.kind]
    return ", ".join([*number, *names])
