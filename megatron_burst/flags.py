# SPDX-License-Identifier: Apache-2.0
"""Command-line flags of a training run: the options of `BurstConfig`.

This module converts parsed arguments to a `BurstConfig` and sets defaults that depend on other
flags. `BurstConfig` checks the values, so a flag and a Python argument give the same ValueError.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from .config import FIELDS, OFF, BurstConfig
from .option_table import OptionField

GROUP = "megatron-burst"


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
    for field in FIELDS.values():
        try:
            group.add_argument(
                field.flag,
                type=field.reader,
                metavar=field.metavar,
                default=algorithm if field.name == "algorithm" else default(field.name),
                help=field.option.meaning.replace("%", "%%"),
            )
        except argparse.ArgumentError as error:
            raise ValueError(
                f"{field.flag} is a flag of this program already, so megatron_burst cannot add its "
                "flag; rename the flag of the program"
            ) from error


def default(field: str) -> Any:
    """Return the default value of a field; None for the layout (see `layout_for`)."""
    if field == "layout":
        return None
    return FIELDS[field].default


def add_defaults(args: Any) -> None:
    """Set missing attributes of `args` to default values, and choose the layout if it is None.

    With Megatron, the model may then exclude this layout (`megatron.run_options.default_layouts`).
    Arguments from an old checkpoint may lack the algorithm; it is then set to "megatron".

    Args:
        args: Parsed arguments; changed in place.
    """
    for field in FIELDS.values():
        if not hasattr(args, field.dest):
            setattr(args, field.dest, OFF if field.name == "algorithm" else default(field.name))
    if args.burst_layout is None:
        split = getattr(args, "context_parallel_size", 1) != 1
        pack = args.burst_pack if split else "off"
        args.burst_layout = layout_for(args.context_parallel_algo, args.burst_attention_store, pack)


def layout_for(algorithm: Any, store: Any, pack: Any = "off") -> str:
    """Return the default value of --burst-layout, which depends on other options.

    "balanced" balances the work of packed documents of arbitrary length. With a store between 0 and
    1, only "striped" balances the recomputation.

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
    return BurstConfig(**{name: getattr(args, field.dest) for name, field in FIELDS.items()})


def options_and_errors(args: Any) -> tuple[BurstConfig, list[str]]:
    """Return the options of a run, and an error message for each invalid value.

    Args:
        args: Arguments that `add_defaults` completed.

    Returns:
        A pair: the options, in which default values replace invalid values, and the error messages.
    """
    values, messages = {name: getattr(args, field.dest) for name, field in FIELDS.items()}, []
    for name, value in list(values.items()):
        try:
            FIELDS[name].check(value)
        except ValueError as error:
            messages.append(str(error))
            del values[name]
    while True:
        try:
            return BurstConfig(**values), messages
        except ValueError as error:
            # Options exclude each other: drop the first one in the message.
            messages.append(message := str(error))
            mentioned = [name for name in values if FIELDS[name].flag in message]
            if not mentioned:
                raise
            del values[min(mentioned, key=lambda name: message.index(FIELDS[name].flag))]


def stated(args: Any) -> dict[str, Any]:
    """Return the value of each flag in arguments that `add_defaults` completed, by flag name."""
    return {field.flag: getattr(args, field.dest) for field in FIELDS.values()}


def present(argv: Sequence[str], *names: str) -> Iterator[str]:
    """Yield the flags that a command line contains.

    Args:
        argv: Words of the command line.
        *names: Flags to look for. Default: all flags of this module.
    """
    words = {word.split("=", 1)[0] for word in argv}
    return (name for name in names or [field.flag for field in FIELDS.values()] if name in words)


def table() -> str:
    """Return all flags as a Markdown table, for the documentation."""
    rows = [
        f"| `{field.flag}` | {_shown(field)} | {field.option.meaning.replace('|', ' or ')} |"
        for field in FIELDS.values()
    ]
    return "\n".join(["| flag | values | meaning |", "|-|-|-|", *rows])


def _shown(field: OptionField) -> str:
    names = [f"`{name}`" for name in field.names]
    text = [] if names else [f"a {field.option.text.lower()}"]
    number = {int: ["N"], float: ["0 to 1"], str: text}[field.kind]
    return ", ".join([*number, *names])
