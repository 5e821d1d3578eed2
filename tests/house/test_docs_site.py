"""docs/: what the pages say of the drawings, of the public names, and of the words is true."""

import inspect
import re

import pytest
from documented import FENCE, NAMES, ROOT

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
    modules = {"layout", "masks", "megatron", "rl", "trees"}
    assert set(dir(mb)) - {"__version__"} - modules <= set(names)
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


def test_a_term_of_the_glossary_has_one_meaning():
    """In both tables, which have three and four columns."""
    page = (DOCS / "glossary.md").read_text("utf-8")
    users, code = page.split("## For maintainers")
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| (?:[^|]* \| )?([^|]+) \|$", page, re.M)
    terms = [term for row in rows for term in row[0].split(", ") if row[0] != "term"]
    assert len(terms) > 45
    assert len(terms) == len(set(terms))
    assert all(meaning.strip() for _, meaning, _ in rows)
    assert users.count("\n| ") < 30  # what a user has to know
    assert code.count("\n| ") < 30


def test_code_that_the_glossary_names_is_there():
    """Files, folders and classes of the column "in the code"."""
    code = (DOCS / "glossary.md").read_text("utf-8").split("## For maintainers")[1]
    cells = re.findall(r"^\| [^|]+ \| [^|]+ \| `([^`|]+)` \|", code, re.M)
    assert len(cells) > 8
    package = ROOT / "megatron_burst"
    texts = "".join(path.read_text("utf-8") for path in package.rglob("*.py"))
    for cell in cells:
        name = cell.rpartition(".")[2]
        there = (package / cell).exists() or re.search(rf"^\s*(class|def) {name}\b", texts, re.M)
        assert there, cell


# --- links ---------------------------------------------------------------------------------


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_the_readme_claims_what_the_page_of_gains_says():
    """The gains of the first four kinds of runs are those of the summary of docs/gain.md."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = readme.split("| run | gain |")[1].split("\n\n")[0]
    claimed = re.findall(r"^\| [^|]+ \| ((?:\d+ to )?(\d+) %) \|", table, re.M)
    page = (DOCS / "gain.md").read_text(encoding="utf-8").split("\n|")[0]
    assert len(claimed) == 4
    assert all(f"{upper} %" in page for _, upper in claimed)


def prose(text):
    """A page without its code."""
    return re.sub(r"`[^`]+`", "", FENCE.sub("", text))


def anchors(text):
    """What the headings of a page are called in links, by the rule of GitHub and MyST."""
    words = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.M)
    return {re.sub(r"[^\w\- ]", "", word.strip().lower()).replace(" ", "-") for word in words}


def broken(page, text):
    """The links of a page's text that lead to no file, heading or page of the site."""
    wrong = []
    for link in re.findall(r"\]\(([^)\s]*)\)", prose(text)):
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        held = target.read_text(encoding="utf-8") if anchor and target.is_file() else ""
        if not (link and target.exists()) or (anchor and anchor not in anchors(held)):
            wrong.append(link)
    return wrong


@pytest.mark.parametrize("name", [*NAMES, "CHANGELOG.md"])
def test_links_lead_somewhere(name):
    page = ROOT / name
    assert not broken(page, page.read_text(encoding="utf-8"))


def test_a_broken_link_is_found():
    text = "[a](no.md) [b](tiles.md#no) [](tiles.md#what-a-tile-is) `[](x)` ![](no.png) [](#e)\n# E"
    assert broken(DOCS / "index.md", text) == ["no.md", "tiles.md#no", "no.png", "#e"]
