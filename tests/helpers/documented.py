"""What README.md and docs/ tell a reader to run: their Python blocks and their commands.

A Python block is fenced and says `python`; `<!-- needs: NAME -->` on the line before it names what
must be installed. Commands are the lines of indented blocks and of `sh` fences that begin with a
program of PROGRAMS, and such words between backticks in the text.
"""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
PAGES = [page for page in PAGES if "_build" not in page.parts]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
PROGRAMS = ("megatron-burst", "make", "torchrun", "python")
FENCE = re.compile(r"(?:^<!-- needs: (\S+) -->\n)?^```(\S*)\n(.*?)^```$", re.M | re.S)
INDENTED = re.compile(r"(?:(?<=\n\n)|\A)(?: {4}.*\n|\n(?= {4}))+", re.M)


class Block(NamedTuple):
    """A Python block: its page, its number on the page from 0 on, what it needs, its text."""

    page: str
    number: int
    needs: str
    text: str

    @property
    def name(self):
        return f"{self.page}-{self.number}"


def blocks(page):
    """The Python blocks of a page, by its name in NAMES."""
    found = FENCE.finditer((ROOT / page).read_text(encoding="utf-8"))
    texts = [(match[1] or "", match[3]) for match in found if match[2] == "python"]
    return [Block(page, number, *each) for number, each in enumerate(texts)]


def indented(prose):
    """The indented blocks of a text without fences."""
    return [re.sub(r"^ {4}", "", found, flags=re.M) for found in INDENTED.findall(prose)]


def python_lines(text):
    """Lines that look like Python where `blocks` does not find them."""
    others = [
        match[3] for match in FENCE.finditer(text) if match[2] not in ("python", "{eval-rst}")
    ]
    lines = "\n".join([*others, *indented(FENCE.sub("", text))]).splitlines()
    return [line for line in lines if re.match(r"import |from \S+ import |[\w, ]+ = mb\.", line)]


def commands(text):
    """Every command of a page's text, continued lines joined and comments left out."""
    fenced = [match[3] for match in FENCE.finditer(text) if match[2] in ("sh", "bash", "console")]
    prose = FENCE.sub("", text)
    lines = "\n".join([*fenced, *indented(prose)]).replace("\\\n", " ").splitlines()
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", INDENTED.sub("", prose))]
    for line in [*lines, *spans]:
        line = re.sub(r"\s#.*", "", line.removeprefix("$ ")).strip()
        first, _, rest = line.partition(" ")
        told = re.match(r"\w+: ", rest)  # what a program printed
        if first in PROGRAMS and rest and not told:
            yield line
