# SPDX-License-Identifier: Apache-2.0
"""`megatron-burst patch MEGATRON`: report whether a Megatron source tree is or can be patched.

Each patch series of `megatron_burst/patches` is tried on a copy of the files that it changes: git
applies the patches, and then every function in `seam.PLACES` must have its decorator. The tree
itself is never changed and need not be a git repository.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from ..seam import PLACES, SeamPlace, marked

SERIES = Path(__file__).parents[1] / "patches"
PATCHED, PATCHABLE, NEITHER = 0, 1, 2


class PatchAttempt(NamedTuple):
    """Result of trying one patch on one source tree.

    Attributes:
        patch: Path of the patch file.
        applied: True if the tree already has the patch.
        refusal: Reason why the patch does not apply; None if it applies or is already applied.
    """

    patch: Path
    applied: bool
    refusal: str | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `patch`."""
    add = parser.add_argument
    text = "a Megatron-LM tree, or any folder that contains megatron/core"
    add("tree", metavar="MEGATRON", type=Path, nargs="?", help=text)
    add("--check", metavar="MEGATRON", type=Path, help="same as MEGATRON (deprecated)")
    parser.epilog = "Exit status: 0 patched, 1 patchable, 2 neither."


def run(arguments: argparse.Namespace) -> int:
    """Print whether the tree is or can be patched, and return the exit status.

    Raises:
        ValueError: The command names no tree or two trees, or the tree is not Megatron.
    """
    trees = [tree for tree in (arguments.tree, arguments.check) if tree is not None]
    if len(trees) != 1:
        raise ValueError("pass one MEGATRON, the folder that contains megatron/core")
    status, lines = check(trees[0])
    print("\n".join(lines))
    return status


def check(tree: Path) -> tuple[int, list[str]]:
    """Try all patch series on a source tree, and describe the series that fits best.

    Args:
        tree: Folder that contains megatron/core.

    Returns:
        Exit status and lines to print.

    Raises:
        ValueError: `tree` is not Megatron.
    """
    if not (tree / "megatron" / "core" / "package_info.py").is_file():
        raise ValueError(
            f"{tree} has no megatron/core/package_info.py; pass the folder that contains the "
            "folder megatron"
        )
    attempts = [
        [_try(tree, patch) for patch in sorted(series.glob("*.patch"))]
        for series in sorted(SERIES.iterdir())
    ]
    version = version_of(tree)

    def refusals(series_attempts: list[PatchAttempt]) -> tuple[int, bool]:
        """Return a sort key: number of refused patches; True if made for another version."""
        made_for = series_attempts[0].patch.parent.name.split("-")[0]
        return sum(
            attempt.refusal is not None for attempt in series_attempts
        ), not version.startswith(made_for)

    best = min(attempts, key=refusals)
    name = best[0].patch.parent.name
    if all(attempt.applied for attempt in best):
        return PATCHED, [f"patched: Megatron-Core {version} at {tree}"]
    refused = [attempt for attempt in best if attempt.refusal]
    if refused:
        lines = [f"not patchable: Megatron-Core {version} at {tree}; series {name} does not apply:"]
        lines += [f"  {attempt.patch.name}: {attempt.refusal}" for attempt in refused]
        return NEITHER, [
            *lines,
            "the run-time hooks (megatron_burst.megatron.install) need no patch",
        ]
    missing = [shlex.quote(str(attempt.patch.resolve())) for attempt in best if not attempt.applied]
    if len(missing) == len(best):
        missing = [shlex.quote(str(best[0].patch.parent.resolve())) + "/*.patch"]
    shown = " ".join(missing)
    lines = [f"patchable: Megatron-Core {version} at {tree} with series {name}; apply it with"]
    return PATCHABLE, [*lines, f"  cd {shlex.quote(str(tree))} && git apply " + shown]


def _try(tree: Path, patch: Path) -> PatchAttempt:
    purpose = patch.stem.split("-", 1)[1]
    places = [place for place in PLACES if place.purpose == purpose]
    if not _without_seam(tree, places):
        return PatchAttempt(patch, True, None)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for file in {place.file for place in places}:
            if (tree / file).is_file():
                (copy / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(tree / file, copy / file)
        refusal = _apply(patch, copy)
        left = _without_seam(copy, places)
    if refusal is None and left:  # git found the context of the hunk in another function
        refusal = f"{left[0].file}: the hunk for {left[0].name} fits another function"
    return PatchAttempt(patch, False, refusal)


def _apply(patch: Path, folder: Path) -> str | None:
    """Apply a patch in a folder; return git's error message, or None if the patch applies."""
    try:
        # Inside a subfolder of another repository, git apply would silently skip all files.
        subprocess.run(["git", "init", "--quiet", folder], check=True, capture_output=True)
        done = subprocess.run(
            ["git", "apply", str(patch.resolve())], cwd=folder, capture_output=True, text=True
        )
    except FileNotFoundError as error:
        raise ValueError("git is not installed, but needed to try patches; install git") from error
    errors = re.findall(r"^error: (.*)$", done.stderr, re.MULTILINE)
    return None if done.returncode == 0 else "; ".join(errors) or done.stderr.strip()


def _without_seam(tree: Path, places: list[SeamPlace]) -> list[SeamPlace]:
    return [place for place in places if not _has_seam(tree / place.file, place)]


def _has_seam(file: Path, place: SeamPlace) -> bool:
    try:
        return file.is_file() and marked(file.read_text(encoding="utf-8"), place)
    except (SyntaxError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be parsed as Python: {error}") from error


def version_of(tree: Path) -> str:
    """Return the Megatron-Core version that a source tree's package_info.py has."""
    text = (tree / "megatron" / "core" / "package_info.py").read_text(encoding="utf-8")
    parts = dict(re.findall(r"^(MAJOR|MINOR|PATCH|PRE_RELEASE) = ['\"]?([^'\"\n]*)", text, re.M))
    return ".".join(parts.get(key, "?") for key in ("MAJOR", "MINOR", "PATCH")) + parts.get(
        "PRE_RELEASE", ""
    )
