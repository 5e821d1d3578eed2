"""docs/: what the pages say of the drawings, of the public names, and of the words is true."""

import inspect
import re

import pytest
from documented import ROOT

import megatron_burst as mb

DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def drawn():
    """docs/make_concepts.py, imported as it imports itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DOCS))
        import make_concepts

        yield make_concepts


def test_each_page_prints_the_numbers_of_its_drawings(drawn):
    for name, lines in drawn.captions().items():
        text = (DOCS / "concepts" / f"{name}.md").read_text(encoding="utf-8")
        for line in lines:
            assert f"- {line}\n" in text, f"concepts/{name}.md must print: {line}"


def test_the_drawings_are_there_no_others_and_they_are_small(drawn):
    sizes = {file.stem: file.stat().st_size for file in (DOCS / "concepts").glob("*.svg")}
    assert set(sizes) == set(drawn.DRAWINGS)
    assert max(sizes.values()) < 200_000


def test_a_drawing_is_drawn(drawn, tmp_path):
    path = drawn.save("two-level-ring", tmp_path)
    assert path.read_text(encoding="utf-8").count("<path") > 50
    assert path.read_bytes() == drawn.save("two-level-ring", tmp_path).read_bytes()


def documented_names():
    pages = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "reference").glob("*.md"))
    # parentheses after a class keep its constructor off the page
    name = r"^\.\. auto(?:function|class):: megatron_burst\.([\w.]+)(?:\(\))?$"
    return re.findall(name, pages, re.M)


def test_the_reference_has_every_public_name_once():
    names = documented_names()
    assert len(names) == len(set(names))
    modules = {"layout", "masks", "megatron"}
    assert set(mb.__all__) - modules <= set(names)
    others = {
        "layout.check_fraction",
        "layout.document_bounds",
        "layout.integer",
        "layout.padding_documents",
    }  # for other rooms
    for module in modules:
        listed = getattr(mb, module)
        for name in listed.__all__:
            found = getattr(listed, name)
            if inspect.isclass(found) or inspect.isfunction(found):  # and no table or type alias
                assert f"{module}.{name}" in {*names, *others}


def test_a_word_of_the_glossary_has_one_meaning():
    text = (DOCS / "glossary.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", text, re.M)
    words = [word for row in rows for word in row[0].split(", ") if row[1] not in ("meaning", "-")]
    assert len(words) > 60
    assert len(words) == len(set(words))
    assert all(meaning.strip() for _, meaning, _ in rows)
