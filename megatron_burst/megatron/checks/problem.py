"""A problem (a setting that cannot be honoured), and one error that reports all problems of a run.

The error ends in the flags to add and to remove, ready to be pasted into a command.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """A setting that cannot be honoured, why, and the flags that fix it.

    reason: one line; it says what to do if no flag fixes the problem. add: flags with values, to
    add or to use instead of those given. remove: names of flags to leave out.
    """

    reason: str
    add: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [self.reason]
        if self.add:
            parts.append(f"add {' '.join(self.add)}")
        if self.remove:
            parts.append(f"remove {' '.join(self.remove)}")
        return "; ".join(parts)


class Refused(ValueError):
    """The error for all problems of a run; `problems` has them one by one."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(dict.fromkeys(problems))
        super().__init__(report(self.problems))


def refuse(problems: Iterable[Problem]) -> None:
    """Raise `Refused`, a `ValueError`, if there are problems."""
    found = list(problems)
    if found:
        raise Refused(found)


def report(problems: tuple[Problem, ...]) -> str:
    """One line for one problem; for several, a block that ends in the flags to add and remove."""
    if len(problems) == 1:
        return str(problems[0])
    lines = [f"{len(problems)} settings cannot be honoured:"]
    lines += [f"  - {problem.reason}" for problem in problems]
    for word, flags in (
        ("add:   ", [flag for problem in problems for flag in problem.add]),
        ("remove:", [flag for problem in problems for flag in problem.remove]),
    ):
        if flags:
            lines.append(f"  {word} {' '.join(dict.fromkeys(flags))}")
    return "\n".join(lines)
