"""Published tables as rows of text."""

from __future__ import annotations

import csv
from pathlib import Path

FOLDER = Path(__file__).parent / "published"
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.csv")))


def table(name: str) -> list[dict[str, str]]:
    """Return the rows of one table by column, without comments."""
    lines = (FOLDER / f"{name}.csv").read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))
