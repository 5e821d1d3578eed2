"""Seconds by part: what a layer, a stage or a step spends its time on."""

from __future__ import annotations

from collections.abc import Mapping


class Parts(dict[str, float]):
    """Part -> seconds; what was never added takes none."""

    def __missing__(self, name: str) -> float:
        return 0.0

    def add(self, others: Mapping[str, float], times: float = 1.0) -> None:
        """Add others' parts, each so many times."""
        for name, seconds in others.items():
            self[name] += times * seconds

    @property
    def total(self) -> float:
        """Seconds of all parts."""
        return sum(self.values())

    @property
    def largest(self) -> str:
        """The part that takes most; "" where there is none."""
        return max(self, key=self.__getitem__, default="")

    def taken(self) -> Parts:
        """Without the parts that take no time."""
        return Parts({name: seconds for name, seconds in self.items() if seconds > 0})
