"""Record the parameters of the functions of linear attention packages, release by release.

    cd tests/linear_attention; python linear_signatures.py FLA MAMBA > linear_signatures.json

FLA and MAMBA are git directories with the tags of fla-org/flash-linear-attention and
state-spaces/mamba. The script reads the sources of the functions that
`megatron_burst.linear_attention.kernels` calls. It records only the names of parameters ("=" if
there is a default) and of results. Equal releases share an entry. Releases are tags and the newest
commit. None of the code is run.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from flash_signatures import Source, git, parameters, releases

from megatron_burst.linear_attention.forms import FORMS
from megatron_burst.linear_attention.kernels.mamba import FUNCTION


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("fla")
    parser.add_argument("mamba")
    arguments = parser.parse_args()
    paths = {form.fla: arguments.fla for form in FORMS.values()} | {FUNCTION: arguments.mamba}
    print(json.dumps({path: record(mirror, path) for path, mirror in paths.items()}, indent=1))
    return 0


def record(mirror: str, path: str) -> list[dict]:
    """Return the entries of the function at this dotted path, oldest release first."""
    module, _, name = path.rpartition(".")
    actual: dict[tuple[str, str], list[str]] = {}
    for release, commit in releases(mirror, Source(path="", tags="")):  # every tag
        for file in (f"{module.replace('.', '/')}.py", f"{module.replace('.', '/')}/chunk.py"):
            if git(mirror, "ls-tree", commit, file):
                text = git(mirror, "show", f"{commit}:{file}")
                shape = signature(text, name)
                if shape is not None:
                    actual.setdefault(shape, []).append(release)
    return [
        {"releases": alike, "parameters": shape, "returns": returns}
        for (shape, returns), alike in actual.items()
    ]


def signature(text: str, name: str) -> tuple[str, str] | None:
    """Return parameters and results of a function, or None if the name does not exist."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return ", ".join(parameters(node.args)), results(node)
    return None


def results(function: ast.FunctionDef) -> str:
    """Return the result names of the last statement; of a call, the name of the callee."""
    value = [node.value for node in function.body if isinstance(node, ast.Return)][-1]
    if isinstance(value, ast.Tuple):
        return ", ".join(map(ast.unparse, value.elts))
    return ast.unparse(value.func) if isinstance(value, ast.Call) else ast.unparse(value)


if __name__ == "__main__":
    sys.exit(main())
