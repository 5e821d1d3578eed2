"""Compare published and measured tables with the predictions of `advise`.

`python -m benchmarks.advise` prints every table with its errors. It writes all rows to
docs/data/advise-accuracy.json and the table of targets to docs/advise-accuracy.md. `--fit` fits the
constants again; otherwise the stored constants are used.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.report import DOCS, json_record, markdown, write_section

from . import example
from .section import Figure, Section

# In the order of the page; each is a module with `run(fit) -> Section`.
SECTIONS = (
    "not_fitted", "kernel_rates", "attention_fit", "burstengine_attention", "loongtrain_steps",
    "burstengine_steps", "burstengine_memory", "fpdt", "emulated",
)  # fmt: skip
SPEED = "speed"  # measured, takes minutes: only on request
PAGE, DATA, GUIDE = "advise-accuracy.md", "data/advise-accuracy.json", "advise.md"
SUMMARY = "summary"
Runner = Callable[[bool], Section]


def runner(name: str) -> Runner:
    """Return `run` of a section's module."""
    return importlib.import_module(f"benchmarks.advise.{name}").run


def run_sections(names: Sequence[str], fit: bool) -> list[Section]:
    """Return all sections; progress is printed to standard error."""
    sections = []
    for index, name in enumerate(names, 1):
        print(f"[{index}/{len(names)}] {name} ...", end=" ", file=sys.stderr, flush=True)
        begin = time.perf_counter()
        sections.append(runner(name)(fit))
        print(f"{time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)
    return sections


def summary(sections: Sequence[Section]) -> str:
    """Return a table of all figures that have a target, and how many targets are met."""
    rows, met = [], 0
    for section in sections:
        targets = [figure for figure in section.figures if figure.met is not None]
        met += sum(bool(figure.met) for figure in targets)
        titles = [section.title, *[""] * len(targets)]
        rows += [[title, *_cells(figure)] for title, figure in zip(titles, targets, strict=False)]
    table = markdown(("table", "figure", "value", "target"), rows)
    return f"{met} of {len(rows)} targets are met.\n\n{table}"


def _cells(figure: Figure) -> list[str]:
    return [figure.what, figure.value, figure.target + ("" if figure.met else " (missed)")]


def write(sections: Sequence[Section], folder: Path) -> None:
    """Replace the sections in the data file and, if all are given, the page's table."""
    path = folder / DATA
    path.parent.mkdir(parents=True, exist_ok=True)
    stored = json.loads(path.read_text()) if path.exists() else {}
    stored |= {section.name: vars(section) for section in sections}
    records = ",\n".join(f'"{name}": {json_record(record)}' for name, record in stored.items())
    path.write_text(f"{{\n{records}\n}}\n")
    if len(sections) == len(SECTIONS):
        write_section(folder / PAGE, SUMMARY, summary(sections))
        write_section(folder / GUIDE, "output", example.output())


def main(words: Sequence[str] | None = None) -> int:
    """Run the command and return 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.advise", description=__doc__)
    parser.add_argument("--fit", action="store_true", help="fit all constants again (minutes)")
    parser.add_argument("--sections", nargs="+", choices=(*SECTIONS, SPEED), default=list(SECTIONS))
    parser.add_argument("--out", type=Path, default=DOCS, help="folder of the page")
    args = parser.parse_args(words)
    sections = run_sections(args.sections, args.fit)
    for section in sections:
        print(f"\n## {section.title}\n\n{section.markdown()}")
    print(f"\n{summary(sections)}")
    write(sections, args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
