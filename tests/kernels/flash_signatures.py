"""Which parameters the functions of the FlashAttention packages have, release by release.

    python tests/kernels/flash_signatures.py MIRROR > tests/kernels/flash_signatures.json

MIRROR: a git directory with the tags of Dao-AILab/flash-attention. Reads the sources of the
functions that `megatron_burst.kernels.flash_packages` calls, and records names of parameters ("="
where there is a default) and of results, of FlashAttention 4 also the fields of its lists of blocks
and a function beside them, nothing else; releases that are alike share an entry.
Releases are tags and the newest commit; of FlashAttention 3, which has no tags of its own, also the
commits of the main branch that changed its file since it had a backward. Runs none of the code.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from megatron_burst.kernels.flash_packages import LISTS, PACKAGES, SUBTILES


class Source(NamedTuple):
    """Where a package's functions and its lists of blocks are, and the pattern of its tags."""

    path: str
    tags: str
    commits: bool = False
    lists: str | None = None


NEW = r"v2\.([5-9]|\d\d)\."
SOURCES = {
    "flash3": Source("hopper/flash_attn_interface.py", r"v2\.([6-9]|\d\d)\.", commits=True),
    "flash4": Source(
        "flash_attn/cute/interface.py", rf"fa4-v|{NEW}", lists="flash_attn/cute/block_sparsity.py"
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mirror")
    mirror = parser.parse_args().mirror
    print(json.dumps({name: record(mirror, name) for name in PACKAGES}, indent=1))
    return 0


def record(mirror: str, name: str) -> list[dict]:
    """The entries of a package, oldest release first."""
    source, package = SOURCES[name], PACKAGES[name]
    names = {"forward": package.forward.name, "backward": package.backward.name}
    shapes: dict[str, dict[str, str]] = {}  # of files: releases often share one
    found: dict[tuple, list[str]] = {}
    for release, commit in releases(mirror, source):
        for line in git(mirror, "ls-tree", commit, source.path).splitlines():  # one or none
            blob = line.split()[2]
            if blob not in shapes:
                shapes[blob] = shape(git(mirror, "cat-file", "-p", blob), names)
            if shapes[blob]:
                whole = shapes[blob] | (lists(mirror, commit, source.lists) if source.lists else {})
                found.setdefault(tuple(whole.items()), []).append(release)
    return [{"releases": alike, **dict(items)} for items, alike in found.items()]


def lists(mirror: str, commit: str, path: str) -> dict[str, str]:
    """Fields of the type of lists of blocks, and the function that we look for beside it."""
    if not git(mirror, "ls-tree", commit, path):
        return {"lists": "", "beside": ""}
    body = ast.parse(git(mirror, "show", f"{commit}:{path}")).body
    named = {node.name: node for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    fields = [node for node in named[LISTS].body if isinstance(node, ast.AnnAssign)]
    names = [ast.unparse(one.target) + "=" * (one.value is not None) for one in fields]
    return {"lists": ", ".join(names), "beside": SUBTILES if SUBTILES in named else ""}


def releases(mirror: str, source: Source) -> list[tuple[str, str]]:
    """(name, commit), by date."""
    form = "--format=%(creatordate:unix) %(refname:short) %(refname)"
    found = [line.split() for line in git(mirror, "for-each-ref", form, "refs/tags").splitlines()]
    found = [(int(at), name, ref) for at, name, ref in found if re.match(source.tags, name)]
    if source.commits:
        lines = git(mirror, "log", "--first-parent", "--format=%ct %cs %h", "--", source.path)
        for at, day, commit in (line.split() for line in lines.splitlines()):
            found.append((int(at), f"main {day} {commit}", commit))
    at, day, commit = git(mirror, "log", "-1", "--format=%ct %cs %h").split()
    found.append((int(at), f"main {day} {commit}", commit))
    return [(name, commit) for _, name, commit in sorted(set(found))]


def shape(text: str, names: dict[str, str]) -> dict[str, str]:
    """Parameters of both functions and results of forward; empty if there is no such function."""
    body = ast.parse(text).body
    functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
    if any(name not in functions for name in names.values()):
        return {}
    parts = {kind: ", ".join(parameters(functions[name].args)) for kind, name in names.items()}
    forward = functions[names["forward"]].body
    last = [node.value for node in forward if isinstance(node, ast.Return)][-1]
    values = last.elts if isinstance(last, ast.Tuple) else filter(None, [last])
    return {**parts, "results": ", ".join(map(ast.unparse, values))}


def parameters(arguments: ast.arguments) -> list[str]:
    """Names, with "=" where there is a default, and "/", "*", "*name", "**name" as in Python."""
    named = [*arguments.posonlyargs, *arguments.args]
    first = len(named) - len(arguments.defaults)
    found = [one.arg + "=" * (i >= first) for i, one in enumerate(named)]
    if arguments.posonlyargs:
        found.insert(len(arguments.posonlyargs), "/")
    if arguments.vararg or arguments.kwonlyargs:
        found.append("*" + (arguments.vararg.arg if arguments.vararg else ""))
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    found += [one.arg + "=" * (default is not None) for one, default in pairs]
    return found + ([f"**{arguments.kwarg.arg}"] if arguments.kwarg else [])


def git(mirror: str, *command: str) -> str:
    """What git prints."""
    whole = ["git", f"--git-dir={mirror}", *command]
    return subprocess.run(whole, capture_output=True, text=True, timeout=120, check=True).stdout


if __name__ == "__main__":
    sys.exit(main())
