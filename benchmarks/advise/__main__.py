"""`python -m benchmarks.advise`: published and measured tables beside what is predicted.

Prints every table with its errors, and writes docs/advise-accuracy.md between its markers. `--fit`
fits the constants anew first; without it those that the modules state are taken. `--sections
speed` measures how long advice takes.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.report import DOCS, write_section

from . import example
from .section import Figure, Section

# In the order of the page; each is a module with `run(fit) -> Section`.
SECTIONS = (
    "not_fitted", "kernel_rates", "attention_fit", "burstengine_attention", "loongtrain_steps",
    "burstengine_steps", "burstengine_memory", "fpdt", "emulated", "contradictions",
)  # fmt: skip
SPEED = "speed"  # measured, and takes minutes: only where it is asked for
PAGE, GUIDE = "advise-accuracy.md", "advise.md"
SUMMARY = "summary"
Run = Callable[[bool], Section]


def runner(name: str) -> Run:
    """`run` of a section's module."""
    return importlib.import_module(f"benchmarks.advise.{name}").run


def made(names: Sequence[str], fit: bool) -> list[Section]:
    """All sections; progress on standard error."""
    found = []
    for index, name in enumerate(names, 1):
        print(f"[{index}/{len(names)}] {name} ...", end=" ", file=sys.stderr, flush=True)
        begin = time.perf_counter()
        found.append(runner(name)(fit))
        print(f"{time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)
    return found


def summary(sections: Sequence[Section]) -> str:
    """One line per figure that has a target, and how many are met."""
    figures = [(s.title, f) for s in sections for f in s.figures if f.met is not None]
    met = sum(bool(figure.met) for _, figure in figures)
    lines = [f"- {title}: {_line(figure)}" for title, figure in figures]
    return "\n".join([f"{met} of {len(figures)} targets are met.", "", *lines])


def _line(figure: Figure) -> str:
    verdict = "met" if figure.met else "**missed**"
    return f"{figure.what}: {figure.value}; target {figure.target}: {verdict}"


def write(sections: Sequence[Section], folder: Path) -> None:
    """Write the generated parts of the page, each between its markers."""
    page = folder / PAGE
    for section in sections:
        text = f"## {section.title}\n\n{section.markdown()}"
        write_section(page, section.name.replace("-", "_"), text)
    if len(sections) == len(SECTIONS):
        write_section(page, SUMMARY, summary(sections))
        write_section(folder / GUIDE, "output", example.output())


def main(words: Sequence[str] | None = None) -> int:
    """The command; 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.advise", description=__doc__)
    parser.add_argument("--fit", action="store_true", help="fit all constants anew (minutes)")
    parser.add_argument("--sections", nargs="+", choices=(*SECTIONS, SPEED), default=list(SECTIONS))
    parser.add_argument("--out", type=Path, default=DOCS, help="folder of what is written")
    args = parser.parse_args(words)
    sections = made(args.sections, args.fit)
    for section in sections:
        print(f"\n## {section.title}\n\n{section.markdown(everything=True)}")
    print(f"\n{summary(sections)}")
    write(sections, args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
