# SPDX-License-Identifier: Apache-2.0
"""One-line error messages of argument parsers, with a suggestion for misspelled arguments.

By default, argparse prints the usage before an error; the usage of Megatron-LM has 1,600 lines.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from .ranks import report

HELP = "(--help lists the options)"


def nearest(word: str, words: Iterable[str]) -> str | None:
    """Return the word most similar to `word`, preferably an anagram; None if none is similar."""
    words = list(words)
    near = difflib.get_close_matches(word, words, max(1, len(words)), cutoff=0.7)
    return max(near, key=lambda candidate: sorted(candidate) == sorted(word), default=None)


def suggestion(word: str, words: Iterable[str]) -> str:
    """Return "; did you mean ...?" with the most similar of `words`; empty if none is similar."""
    near = nearest(word, words)
    return "" if near is None else f"; did you mean {near}?"


def unrecognized(parser: argparse.ArgumentParser, words: Sequence[str]) -> str:
    """Return an error message for arguments that `parser` does not accept, with a suggestion."""
    flag = next((word.partition("=")[0] for word in words if word.startswith("-")), None)
    near = "" if flag is None else suggestion(flag, parser._option_string_actions)
    return f"unrecognized arguments: {' '.join(words)}{near}"


@contextmanager
def one_line_errors(prefix: str) -> Iterator[None]:
    """Return a context manager in which every argparse parser prints an error as one line.

    If all ranks have the same error, only rank 0 prints it. The exit status is 2.
    Parsers that accept unknown arguments (`parse_known_args`), or have `exit_on_error=False`, do
    not change.

    Args:
        prefix: Name of the command, with which the message begins.
    """
    stock = argparse.ArgumentParser.parse_args, argparse.ArgumentParser.error

    def parse_args(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        if not self.exit_on_error:
            return stock[0](self, args, namespace)
        arguments, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(unrecognized(self, unknown))
        return arguments

    def error(self: argparse.ArgumentParser, message: str) -> NoReturn:
        report(prefix, ValueError(f"{self.prog}: {message} {HELP}"))
        raise SystemExit(2)

    argparse.ArgumentParser.parse_args, argparse.ArgumentParser.error = parse_args, error  # type: ignore[method-assign]
    try:
        yield
    finally:
        argparse.ArgumentParser.parse_args, argparse.ArgumentParser.error = stock  # type: ignore[method-assign]
