"""Plain language: phrases that are always wrong are absent, and pages stay short.

Reads docstrings, comments and long strings of the package, and the prose of Markdown pages. Each
phrase here has a plain form that fits in every sentence; phrases that are only often wrong are left
to the reader.
"""

import ast
import io
import re
import tokenize
from typing import NamedTuple

import pytest
from documented import FENCE, PAGES, ROOT, indented

SOURCES = sorted((ROOT / "megatron_burst").rglob("*.py"))
PAGES = [*PAGES, ROOT / "CHANGELOG.md"]
README_WORDS, DOCS_WORDS, CHANGELOG_LINES, LESSONS_LINES = 1000, 45_000, 60, 80
COLUMNS = 100


class Text(NamedTuple):
    """A docstring, a comment, a long string or a line of a page."""

    place: str
    text: str
    docstring: bool = False


class Phrase(NamedTuple):
    """A regular expression that no text may contain, and its plain form."""

    pattern: str
    plain: str


PHRASES = (
    Phrase(r"\blets? go of\b", "frees, releases"),
    Phrase(r"\bgo(?:es)? by the\b", "uses, depends on"),
    Phrase(r"\b(?:nobody|somebody|whoever|anybody)\b", "no rank, a caller"),
    Phrase(r"\b[Nn]one where\b", "None if"),
    Phrase(r"\bmend(?:s|ed)?\b", "fix"),
    Phrase(r"\bat the door\b", "in validation"),
    Phrase(r"\bhas no say\b", "does not decide"),
    Phrase(r"\b(?:likewise|alike)\b", "the same, in the same way"),
    Phrase(r"\bwants? to know\b", "requires, reads"),
    Phrase(r"\bas of (?!\d|[A-Z]|now\b|today\b|version\b)", "same as in"),
    Phrase(r"(?:^|[.:;] )[Tt]hat of\b", "repeat the noun"),
    Phrase(r"(?:^|[.:;] )[Tt]hose of\b", "repeat the noun"),
    Phrase(r"[,;] where there (?:is|are) (?:none|no)\b", "if there is no"),
)
# How no docstring begins: with a verb in the imperative or a noun phrase it is understood at once.
FRAGMENT = re.compile(
    r"(?:Of|That of|Those of|What|Whether|Where|Which|How|By|With|From|To|As)\b(?! [a-z]+ed by\b)"
)
# Names that give no role.
VAGUE = {
    "each", "found", "told", "asked", "there", "mine", "answer", "said", "wanted", "came", "took",
    "theirs", "goes", "alike",
}  # fmt: skip


def docstrings(tree):
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), text


def texts_of(source, place="source"):
    """Yield the texts of a Python file."""
    tree = ast.parse(source)
    documented = {text for _, text in docstrings(tree)}
    for line, text in docstrings(tree):
        yield Text(f"{place}:{line}", text, docstring=True)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = node.value.count(" ")
            if words > 2 and node.value.strip() not in documented:
                yield Text(f"{place}:{node.lineno}", node.value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and " " in token.string[2:]:
            yield Text(f"{place}:{token.start[0]}", token.string[1:].strip())


def without_fences(page):
    """Return a page whose fenced blocks are empty lines, so that line numbers stay."""
    return FENCE.sub(lambda block: "\n" * block[0].count("\n"), page)


def prose_of(page, place="page"):
    """Yield the lines of a page that are not in a fenced block."""
    for number, line in enumerate(without_fences(page).splitlines(), 1):
        if " " in line:
            yield Text(f"{place}:{number}", line)


def odd(texts):
    """Return a line for each phrase that a text should not contain."""
    lines = []
    for text in texts:
        for phrase in PHRASES:
            if match := re.search(phrase.pattern, text.text):
                lines.append(f"{text.place}: {match.group()!r}; write: {phrase.plain}")
        if text.docstring and (match := FRAGMENT.match(text.text)):
            lines.append(f"{text.place}: begins with {match.group()!r}; begin with a verb or noun")
    return lines


def vague_names(source, place="source"):
    """Return a line for each variable, argument, function or class whose name gives no role."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        name = None
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = node.name
        if name and name.strip("_").lower() in VAGUE:
            lines.append(f"{place}:{getattr(node, 'lineno', 0)}: {name}")
    return lines


def wide_lines(page):
    """Return the wide lines of code; a block marked `text` is the output of a command."""
    fenced = [block[3] for block in FENCE.finditer(page) if block[2] != "text"]
    lines = "\n".join([*fenced, *indented(without_fences(page))]).splitlines()
    return [line for line in lines if len(line) > COLUMNS]


def of_package(check):
    lines = []
    for path in SOURCES:
        lines += check(path.read_text(encoding="utf-8"), str(path.relative_to(ROOT)))
    return lines


def test_the_package_has_no_odd_phrase():
    lines = of_package(lambda source, place: odd(texts_of(source, place)))
    assert not lines, "\n".join(lines)


def test_names_give_roles():
    lines = of_package(vague_names)
    assert not lines, "\n".join(lines)


def test_no_two_classes_of_the_package_share_a_name():
    places = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name.strip("_"), []).append(str(path.relative_to(ROOT)))
    shared = {name: files for name, files in places.items() if len(set(files)) > 1}
    assert not shared, shared


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_has_no_odd_phrase(page):
    lines = odd(prose_of(page.read_text(encoding="utf-8"), page.name))
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_code_blocks_are_narrow(page):
    assert not wide_lines(page.read_text(encoding="utf-8"))


def test_pages_are_short():
    words = {page: len(page.read_text(encoding="utf-8").split()) for page in PAGES}
    docs = sum(count for page, count in words.items() if "docs" in page.parts)
    assert words[ROOT / "README.md"] <= README_WORDS
    assert docs <= DOCS_WORDS, "shorten or remove other sentences of docs/"
    lines = {name: (ROOT / name).read_text(encoding="utf-8").count("\n")
             for name in ("CHANGELOG.md", "docs/lessons.md")}  # fmt: skip
    assert lines["CHANGELOG.md"] <= CHANGELOG_LINES
    assert lines["docs/lessons.md"] <= LESSONS_LINES


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('def f():\n    """Of a chunk."""', ["begins with 'Of'"]),
        ('"""Rows. None where there is no mask."""', ["'None where'"]),
        ("x = 1  # nobody reads it", ["'nobody'"]),
        ('raise ValueError("ranks are not told alike, as of groups")', ["'alike'", "'as of '"]),
        ('def f():\n    """Return the rows of a chunk, detached."""', []),
    ],
)
def test_odd_phrases_are_noticed(source, expected):
    lines = odd(texts_of(source))
    assert len(lines) == len(expected), lines
    assert all(part in " ".join(lines) for part in expected)


def test_code_blocks_are_not_prose():
    assert not odd(prose_of("text\n```\nnobody reads it\n```\n"))
    assert odd(prose_of("text\n```\ncode\n```\nnobody reads it\n"))


def test_wide_lines_are_noticed():
    wide = "x" * (COLUMNS + 1)
    assert wide_lines(f"{wide}\n\n```python\n{wide}\n```\n\n    {wide}\n") == [wide] * 2
    assert not wide_lines(f"```text\n{wide}\n```\n\n    {wide[1:]}\n")


def test_vague_names_are_noticed():
    assert vague_names("for each in rows:\n    pass") == ["source:1: each"]
    assert vague_names("def f(told, rows):\n    _found = told") != []
    assert not vague_names("for chunk in chunks:\n    chunk.found = 1")
