# SPDX-License-Identifier: Apache-2.0
"""Errors of argument parsers as one line that names the nearest known word.

argparse prints the usage before an error. That of Megatron-LM has 1,600 lines.
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
    """The most similar of `words`, preferably one with the same letters; None without any."""
    words = list(words)
    near = difflib.get_close_matches(word, words, max(1, len(words)), cutoff=0.7)
    return max(near, key=lambda other: sorted(other) == sorted(word), default=None)


def suggestion(word: str, words: Iterable[str]) -> str:
    """A question that names the nearest of `words`, to be appended to an error; or nothing."""
    near = nearest(word, words)
    return "" if near is None else f"; did you mean {near}?"


def unrecognized(parser: argparse.ArgumentParser, words: Sequence[str]) -> str:
    """The error for words of a command line that `parser` does not have."""
    flag = next((word.partition("=")[0] for word in words if word.startswith("-")), None)
    near = "" if flag is None else suggestion(flag, parser._option_string_actions)
    return f"unrecognized arguments: {' '.join(words)}{near}"


@contextmanager
def one_line_errors(prefix: str) -> Iterator[None]:
    """A context in which every parser of a program reports an error as one line.

    The ranks of a launcher report the same error once. The exit status is 2, as always. A program
    that accepts unknown arguments (`parse_known_args`), or handles errors itself
    (`exit_on_error=False`), still does.
    """
    stock = argparse.ArgumentParser.parse_args, argparse.ArgumentParser.error

    def parse_args(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        if not self.exit_on_error:
            return stock[0](self, args, namespace)
        known, rest = self.parse_known_args(args, namespace)
        if rest:
            self.error(unrecognized(self, rest))
        return known

    def error(self: argparse.ArgumentParser, message: str) -> NoReturn:
        report(prefix, ValueError(f"{self.prog}: {message} {HELP}"))
        raise SystemExit(2)

    argparse.ArgumentParser.parse_args, argparse.ArgumentParser.error = parse_args, error  # type: ignore[method-assign]
    try:
        yield
    finally:
        argparse.ArgumentParser.parse_args, argparse.ArgumentParser.error = stock  # type: ignore[method-assign]
