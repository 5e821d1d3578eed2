"""A setting that cannot be honoured, and the one error for all that a run has.

Owns: how problems are told, ready to paste. Must not know: which settings there are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """What was asked for and why it cannot be, with the flags that settle it.

    reason: one line. add: flags with their values, to be added or to replace what was given;
    remove: names of flags to leave out. Where no flag settles it, ``reason`` says what to do.
    """

    reason: str
    add: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()

    def __str__(self) -> str:
        fixes = [f"add {' '.join(self.add)}"] * bool(self.add)
        fixes += [f"remove {' '.join(self.remove)}"] * bool(self.remove)
        return "; ".join([self.reason, *fixes])


class Refused(ValueError):
    """The problems of a run, all of them; ``problems`` has them one by one."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(dict.fromkeys(problems))
        super().__init__(told(self.problems))


def refuse(problems: Iterable[Problem]) -> None:
    """Raise `Refused`, a ``ValueError``, if there are any."""
    found = list(problems)
    if found:
        raise Refused(found)


def told(problems: tuple[Problem, ...]) -> str:
    """A line for one problem; for several a block that ends in the flags to add and to remove."""
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
