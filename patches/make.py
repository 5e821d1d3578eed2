"""Writer of the patch series for a Megatron-LM tree: `python patches/make.py TREE FOLDER`.

The patches add a decorator to each function of `megatron_burst.seam.PLACES`, one patch per purpose,
with one line of context. The script raises `ValueError` if the tree lacks a function. It does not
change TREE.
"""

from __future__ import annotations

import ast
import difflib
import sys
from pathlib import Path

from megatron_burst.seam import PLACES, SeamPlace, definition

HOMES = {"seam": "megatron_burst.seam", "entrance": "megatron_burst.megatron.entrance"}

SUBJECTS = {
    "core-attention": "Let megatron_burst choose the core attention of a layer",
    "slicing": "Let megatron_burst cut batches and rotary embeddings for context parallelism",
    "recompute": "Let megatron_burst keep attention results between forward and recompute",
    "lm-head": "Let megatron_burst compute the LM head's losses, and count MTP tokens",
    "flags": "Let megatron_burst add its flags and put them on the configuration",
}


def with_seams(source: str, places: list[SeamPlace]) -> str:
    """Return the source of a module with a decorator on each function, and with their import.

    Raises:
        ValueError: The module does not have one of the functions.
    """
    lines, tree = source.splitlines(keepends=True), ast.parse(source)
    inserted: dict[int, str] = {}
    for place in places:
        node = definition(tree, place.name)
        if node is None:
            raise ValueError(f"{place.file} has no {place.name}")
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
        inserted[first] = " " * node.col_offset + f"@{place.decorator}\n"
    imports = [n for n in tree.body if isinstance(n, (ast.Import, ast.ImportFrom))]
    first_import = next(
        n for n in imports if ast.unparse(n).split()[1].split(".")[0] in ("torch", "megatron")
    )
    (decorator,) = {place.decorator for place in places}
    inserted[first_import.lineno - 1] = f"from {HOMES[decorator]} import {decorator}\n"
    return "".join(inserted.get(i, "") + line for i, line in enumerate(lines))


def series(tree: Path) -> dict[str, str]:
    """Return the patches for a tree, by file name."""
    patches = {}
    for number, (purpose, subject) in enumerate(SUBJECTS.items(), start=1):
        diff = ""
        for file in dict.fromkeys(p.file for p in PLACES if p.purpose == purpose):
            places = [p for p in PLACES if p.purpose == purpose and p.file == file]
            old = (tree / file).read_text()
            diff += "".join(
                difflib.unified_diff(
                    old.splitlines(keepends=True),
                    with_seams(old, places).splitlines(keepends=True),
                    f"a/{file}",
                    f"b/{file}",
                    n=1,
                )
            )
        patches[f"{number:04}-{purpose}.patch"] = f"{subject}\n\n---\n{diff}"
    return patches


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python patches/make.py TREE FOLDER")
    source, target = map(Path, sys.argv[1:])
    target.mkdir(parents=True, exist_ok=True)
    for name, text in series(source).items():
        (target / name).write_text(text)
