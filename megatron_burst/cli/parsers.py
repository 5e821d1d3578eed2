# SPDX-License-Identifier: Apache-2.0
"""Errors of argument parsers as one line that suggests the nearest known word.

argparse prints the usage before an error; Megatron-LM's usage has 1,600 lines.
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
    """Return the most similar of `words`, preferably one with the same letters, or None."""
    words = list(words)
    near = difflib.get_close_matches(word, words, max(1, len(words)), cutoff=0.7)
    return max(near, key=lambda candidate: sorted(candidate) == sorted(word), default=None)


def suggestion(word: str, words: Iterable[str]) -> str:
    """Return a question with the nearest of `words`, to append to an error; empty without any."""
    near = nearest(word, words)
    return "" if near is None else f"; did you mean {near}?"


def unrecognized(parser: argparse.ArgumentParser, words: Sequence[str]) -> str:
    """Return the error message for words that `parser` does not have."""
    flag = next((word.partition("=")[0] for word in words if word.startswith("-")), None)
    near = "" if flag is None else suggestion(flag, parser._option_string_actions)
    return f"unrecognized arguments: {' '.join(words)}{near}"


@contextmanager
def one_line_errors(prefix: str) -> Iterator[None]:
    """Return a context in which every parser of a program reports an error as one line.

    The ranks of a launcher report the same error once. The exit status is 2. A program that accepts
    unknown arguments (`parse_known_args`), or handles errors itself (`exit_on_error=False`), still
    does.

    Args:
        prefix: Name of the command, for the message.
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
