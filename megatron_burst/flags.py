# SPDX-License-Identifier: Apache-2.0
"""The flags of a run: those of `BurstConfig`, added to a parser and read from its arguments.

Owns how parsed arguments become a `BurstConfig`, and which defaults follow from other flags. Values
are checked by `BurstConfig`, so a wrong one is the same ValueError wherever it comes from.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from .config import FIELDS, OFF, BurstConfig
from .option_table import OptionField

GROUP = "megatron-burst"


class Flag(NamedTuple):
    """One flag: the field of `BurstConfig` it sets, its name, type, values shown, and help."""

    field: str
    name: str
    type: Callable[[str], Any]
    values: str
    help: str

    @property
    def dest(self) -> str:
        """Its attribute among parsed arguments."""
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
    """What turns a word of the command line into a value: one of `names`, or of `kind`."""

    def read(word: str) -> Any:
        return word if word in names else kind(word)

    read.__name__ = " or ".join([kind.__name__, *names])  # argparse's errors say it
    return read


FLAGS = tuple(map(_flag, FIELDS.values()))
# Flags that have an effect without --context-parallel-algo.
ALONE = tuple(field.flag for field in FIELDS.values() if field.option.alone)


def add_flags(parser: argparse.ArgumentParser, *, algorithm: str) -> None:
    """Add all flags to `parser`, in a group of their own; `algorithm` if none is asked for.

    Raises `ValueError` when the parser has one of them already.
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
                f"{flag.name} is a flag of this program already; megatron_burst cannot add its own"
            ) from error


def default(field: str) -> Any:
    """What a field is when its flag is not given; None for the layout, which `settle` decides."""
    if field == "layout":
        return None
    return FIELDS[field].default


def settle(args: Any) -> None:
    """Give `args` each flag that it lacks and the layout that follows from the others.

    Arguments that never saw `add_flags` (those of a checkpoint) leave the attention alone.
    """
    for flag in FLAGS:
        if not hasattr(args, flag.dest):
            setattr(args, flag.dest, OFF if flag.field == "algorithm" else default(flag.field))
    if args.burst_layout is None:
        split = getattr(args, "context_parallel_size", 1) != 1
        pack = args.burst_pack if split else "off"
        args.burst_layout = layout_for(args.context_parallel_algo, args.burst_attention_store, pack)


def layout_for(algorithm: Any, store: Any, pack: Any = "off") -> str:
    """The layout that follows from other choices: balanced for documents that are packed anew,
    whose lengths zigzag within documents cannot cut; striped where it alone balances the
    recompute.
    """
    if pack == "documents" and algorithm != OFF:
        return "balanced"
    partial = isinstance(store, (int, float)) and 0 < store < 1
    return "striped" if partial and algorithm != OFF else "zigzag"


def burst_config(args: Any) -> BurstConfig:
    """The choices that settled arguments state. Raises `ValueError` naming the flag."""
    return BurstConfig(**{flag.field: getattr(args, flag.dest) for flag in FLAGS})


def choices(args: Any) -> tuple[BurstConfig, list[str]]:
    """The choices that settled arguments state, and all that is wrong with them; a wrong one gives
    way to its default.
    """
    fields, wrong = {flag.field: getattr(args, flag.dest) for flag in FLAGS}, []
    while True:
        try:
            return BurstConfig(**fields), wrong
        except ValueError as error:
            wrong.append(words := str(error))
            named = [flag for flag in FLAGS if flag.name in words and flag.field in fields]
            del fields[min(named, key=lambda flag: words.index(flag.name)).field]


def stated(args: Any) -> dict[str, Any]:
    """Flag -> value, of settled arguments."""
    return {flag.name: getattr(args, flag.dest) for flag in FLAGS}


def given(argv: Sequence[str], *names: str) -> Iterator[str]:
    """Which of `names` (all flags of this module, if none are named) a command line has."""
    words = {word.split("=", 1)[0] for word in argv}
    return (name for name in names or [flag.name for flag in FLAGS] if name in words)


def table() -> str:
    """All flags as a table in Markdown, for the site."""
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
