# SPDX-License-Identifier: Apache-2.0
"""The command line `megatron-burst`: parser, sub-commands (also of plugins) and error messages.

Each sub-command is a module with `add_arguments(parser)` and `run(arguments)`. Only the module of
the typed command is imported. `run` raises ValueError for bad input, which is printed as one line
with exit status 2. It returns an exit status, or None for 0.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from .. import __version__, registry
from ..registry import Command
from .errors import raised_here
from .parsers import HELP, suggestion, unrecognized
from .ranks import report

COMMANDS = {
    "pretrain": Command(
        "megatron_burst.cli.pretrain", "run a Megatron-LM script with the flags of BurstAttention"
    ),
    "recipe": Command("megatron_burst.cli.recipe", "train a Megatron-Bridge recipe"),
    "doctor": Command(
        "megatron_burst.cli.doctor", "check this installation and your Megatron command"
    ),
    "patch": Command(
        "megatron_burst.cli.patch", "check whether a Megatron tree is patched, or can be"
    ),
}


def commands() -> dict[str, Command]:
    """Return the module and help text of each sub-command (also of plugins), by name."""
    return COMMANDS | registry.commands()


# Required packages, whose import name is also the name for pip.
REQUIRED = ("torch", "numpy", "rich", "typing_extensions", "tomli")


class _Parser(argparse.ArgumentParser):
    def parse_known_args(self, *args: Any, **named: Any) -> Any:
        """Parse arguments and refuse unknown ones, so that the error names the sub-command."""
        arguments, unknown = super().parse_known_args(*args, **named)
        if unknown:
            self.error(unrecognized(self, unknown))
        return arguments, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            near = suggestion(str(value), map(str, action.choices or ()))
            if not near:
                raise
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}{near}") from error

    def error(self, message: str) -> NoReturn:
        """Print the message without the usage, which is long."""
        print(f"{self.prog}: error: {message} {HELP}", file=sys.stderr)
        raise SystemExit(2)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sub-command that `argv` names.

    Args:
        argv: Arguments without the program name. Default: the arguments of the process.

    Returns:
        The sub-command's exit status, 0 if it returns None; 2 for bad input.
    """
    try:
        return _main(sys.argv[1:] if argv is None else list(argv))
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in REQUIRED or not raised_here(error):
            raise
        print(f"megatron-burst needs {name}: pip install {name}", file=sys.stderr)
        return 2


def _main(argv: list[str]) -> int:
    parser = _Parser(prog="megatron-burst", description="BurstAttention for Megatron.")
    parser.add_argument("--version", action="version", version=f"megatron-burst {__version__}")
    subs = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)
    named, run = next((word for word in argv if not word.startswith("-")), None), None
    for name, (module, text) in commands().items():
        description = f"{text[0].upper()}{text[1:]}."
        sub = subs.add_parser(name, help=text, description=description)
        if name == named:
            command = importlib.import_module(module)
            command.add_arguments(sub)
            run = command.run
    if not argv:
        parser.print_help()
        return 0
    arguments = parser.parse_args(argv)
    assert run is not None  # the parser exits for unknown commands
    try:
        status = run(arguments)
        sys.stdout.flush()
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError):  # `megatron-burst show ... | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        report(f"megatron-burst {named}", error)
        return 2
    return status or 0
