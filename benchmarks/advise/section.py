"""Result of one module of this benchmark: predictions for one published or measured table.

Every module that owns a table has `run(fit: bool) -> Section`. With `fit` it fits its constants
again, otherwise it uses the stored constants. This module decides how errors are summarized and how
a section is printed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.advise.fitting import Errors, errors
from benchmarks.report import markdown


class Point(NamedTuple):
    """One cell of a table: published or measured number, and predicted number, in the same unit."""

    label: str
    published: float
    predicted: float

    @property
    def error(self) -> float:
        """Predicted / published, minus one."""
        return self.predicted / self.published - 1


class Figure(NamedTuple):
    """One number that summarizes a section.

    Attributes:
        what: Name of the number.
        value: The number as text.
        target: Its target as text, empty if it has none.
        met: True if the target is met, None if there is none.
    """

    what: str
    value: str
    target: str = ""
    met: bool | None = None

    def __str__(self) -> str:
        verdict = {None: "", True: ": met", False: ": missed"}[self.met]
        target = f" (target: {self.target}{verdict})" if self.target else ""
        return f"**{self.what}**: {self.value}{target}"


@dataclass(frozen=True)
class Section:
    """Predictions for one published or measured table.

    Attributes:
        name: Key in the data file.
        title: Name of the table.
        intro: Units, shapes and assumptions, as sentences.
        columns: Column names of `rows`.
        rows: One row of text per prediction.
        figures: Numbers that summarize the section.
        constants: Fitted or stated constants with units.
        notes: Causes of large errors, as sentences.
    """

    name: str
    title: str
    intro: Sequence[str] = ()
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    figures: Sequence[Figure] = ()
    constants: Sequence[str] = ()
    notes: Sequence[str] = ()

    def markdown(self) -> str:
        """Return the whole section as Markdown, without its heading."""
        blocks = [*self.intro]
        if self.figures:
            blocks.append("\n".join(f"- {figure}" for figure in self.figures))
        if self.constants:
            blocks.append("Constants:\n\n" + "\n".join(f"- {line}" for line in self.constants))
        if self.rows:
            blocks.append(markdown(self.columns, self.rows))
        return "\n\n".join([*blocks, *self.notes])


def spread(points: Sequence[Point]) -> Errors:
    """Return the errors of the predictions."""
    return errors([point.predicted for point in points], [point.published for point in points])


def rows_of(points: Sequence[Point], digits: str = ".4g") -> list[list[str]]:
    """Return rows of label, published, predicted and error."""
    return [
        [p.label, f"{p.published:{digits}}", f"{p.predicted:{digits}}", f"{p.error:+.1%}"]
        for p in points
    ]
