"""What a module of this benchmark hands in: one table of predictions beside what others found.

Every module that owns a table has `run(fit: bool) -> Section`: with `fit` it fits its constants
anew, otherwise it takes those that it states. Decides how errors are summed up and how a section
is written as Markdown; what is in it, its module decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.advise.fitting import Errors, errors
from benchmarks.report import markdown


class Point(NamedTuple):
    """One cell of a table: what was published or measured, and what is predicted, in one unit."""

    label: str
    published: float
    predicted: float

    @property
    def error(self) -> float:
        """Predicted over published, less one."""
        return self.predicted / self.published - 1


class Figure(NamedTuple):
    """One number that sums up a section: what it is, its value, and the target it has if any.

    met: whether the target is met; None where there is none.
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
    """One table with its words and figures.

    name: its marker on the page; intro: paragraphs before the table; columns, rows: the table as
    text; constants: lines of fitted or stated constants, with units; notes: paragraphs after the
    table; shown: the rows that the page prints (all are printed by the command), None for all of
    them.
    """

    name: str
    title: str
    intro: Sequence[str] = ()
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    figures: Sequence[Figure] = ()
    constants: Sequence[str] = ()
    notes: Sequence[str] = ()
    shown: int | None = None

    def markdown(self, everything: bool = False) -> str:
        """The section as it stands on the page, without its heading; everything: with all rows."""
        blocks = [*self.intro]
        if self.figures:
            blocks.append("\n".join(f"- {figure}" for figure in self.figures))
        if self.constants:
            blocks.append("Constants:\n\n" + "\n".join(f"- {line}" for line in self.constants))
        if self.rows:
            rows = self.rows if everything else self.rows[: self.shown]
            blocks.append(markdown(self.columns, rows))
        return "\n\n".join([*blocks, *self.notes])


def spread(points: Sequence[Point]) -> Errors:
    """How far the predictions are off."""
    return errors([point.predicted for point in points], [point.published for point in points])


def rows_of(points: Sequence[Point], digits: str = ".4g") -> list[list[str]]:
    """Rows of label, published, predicted and error."""
    return [
        [p.label, f"{p.published:{digits}}", f"{p.predicted:{digits}}", f"{p.error:+.1%}"]
        for p in points
    ]
