"""The command line `megatron-burst`: one table of sub-commands, each a module imported when named.

Owns how a command is found and how its failures reach the terminal: bad input is one plain line
and exit code 2, never a traceback. Knows nothing of what the commands do. A command's module has
`add_arguments(parser)` and `run(arguments)`, which raises ValueError for what a user got wrong,
and returns an exit code where there is more to say than that it ran.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple, NoReturn


class Command(NamedTuple):
    """A sub-command: its name, the module that does it, and its line in the help."""

    name: str
    module: str
    help: str


COMMANDS = (
    Command(
        "pretrain", "megatron_burst.cli.pretrain", "run a Megatron-LM script with our flags added"
    ),
    Command("recipe", "megatron_burst.cli.recipe", "train a Megatron-Bridge recipe"),
    Command("show", "megatron_burst.cli.show", "draw masks, layouts and schedules"),
    Command(
        "doctor", "megatron_burst.cli.doctor", "what is installed, what would go wrong, the fix"
    ),
    Command("patch", "megatron_burst.cli.patch", "can this Megatron tree be patched?"),
    Command(
        "trace", "megatron_burst.cli.trace", "what each rank computes, sends and waits for, when"
    ),
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line instead of the usage and a line."""
        print(f"{self.prog}: error: {message} (--help lists what there is)", file=sys.stderr)
        raise SystemExit(2)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code: its own, 0 if it has none, or 2 for bad input."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = _Parser(prog="megatron-burst", description="BurstAttention for Megatron.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)
    named, run = next((word for word in argv if not word.startswith("-")), None), None
    for command in COMMANDS:
        sub = commands.add_parser(command.name, help=command.help, description=command.help)
        if command.name == named:
            module = importlib.import_module(command.module)
            module.add_arguments(sub)
            run = module.run
    arguments = parser.parse_args(argv)
    assert run is not None  # anything else has ended in the parser
    try:
        status = run(arguments)
        sys.stdout.flush()
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError):  # `megatron-burst show ... | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        print(f"megatron-burst {named}: error: {error}", file=sys.stderr)
        return 2
    return status or 0
