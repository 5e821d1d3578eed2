"""Compare what two versions of the package compute, bit by bit.

    python -m tests.fingerprint compare main HEAD      # commits, or . for this checkout
    python -m tests.fingerprint record before.json     # then compare before.json after.json

Records hashes of outputs and gradients of 300 random calls (attention, linear attention, LM head,
sparse attention) and the bytes that every rank sends. The calls are those of this checkout, for
both versions. Exit status 1 if anything differs.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SHOWN = 20  # differences of one kind


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fingerprint",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="record the package that Python imports")
    recording.add_argument("file", type=Path)
    comparing = commands.add_parser("compare", help="compare two commits or two records")
    comparing.add_argument("versions", nargs=2, metavar="COMMIT|FILE|.")
    for each in (recording, comparing):
        each.add_argument("--share", type=int, default=1, help="one call of so many; default: all")
        each.add_argument("--quickstart", action="store_true", help="also a quickstart's losses")
        each.add_argument("--parity", nargs="*", metavar="WORD",
                          help="also `make parity`, of combinations with one of these words in "
                          "their names (an hour for all)")  # fmt: skip
    given = parser.parse_args()
    if given.command == "record":
        return _record(given)
    records = [_recorded(version, given) for version in given.versions]
    return report(*records)


def _record(given: argparse.Namespace) -> int:
    from . import record

    found = record.record(given.share)
    if given.quickstart:
        found |= record.quickstart()
    if given.parity is not None:
        found |= record.parity(*given.parity)
    given.file.write_text(json.dumps(found, indent=1) + "\n")
    refused = sum("refused" in one for one in found.values())
    print(f"{given.file}: {len(found)} calls of {record.TREE}, {refused} of them refused")
    return 0


def _recorded(version: str, given: argparse.Namespace) -> dict[str, dict[str, str]]:
    """The record of a file, or of a version that is recorded now."""
    if Path(version).is_file():
        return json.loads(Path(version).read_text())
    with tempfile.TemporaryDirectory() as folder:
        tree, harness = Path(folder, "tree"), Path(folder, "harness")
        if version == ".":
            tree = ROOT
        else:
            tree.mkdir()
            archive = subprocess.run(
                ["git", "archive", version], cwd=ROOT, check=True, capture_output=True
            )
            subprocess.run(["tar", "x"], cwd=tree, input=archive.stdout, check=True)
        # Copied, so that neither tree's folder `tests` hides the harness of this checkout.
        shutil.copytree(HERE, harness / "fingerprint")
        words = ["--share", str(given.share), *["--quickstart"] * given.quickstart]
        words += [] if given.parity is None else ["--parity", *given.parity]
        file = Path(folder, "record.json")
        subprocess.run(
            [sys.executable, "-m", "fingerprint", "record", str(file), *words],
            cwd=harness, check=True,
            env=os.environ | {"PYTHONPATH": f"{harness}{os.pathsep}{tree}", "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        return json.loads(file.read_text())


def report(before: dict[str, dict[str, str]], after: dict[str, dict[str, str]]) -> int:
    """Print what differs: 1 if anything does, else 0."""
    missing = before.keys() ^ after.keys()
    different = {}
    for name in before.keys() & after.keys():
        one, other = before[name], after[name]
        if keys := [key for key in one | other if one.get(key) != other.get(key)]:
            different[name] = keys
    for name in sorted(missing)[:SHOWN]:
        print(f"{name}: only in one of the two records")
    for name in sorted(different)[:SHOWN]:
        keys = different[name]
        print(f"{name}: {len(keys)} of {len(before[name])} differ: {', '.join(keys[:4])}")
        for key in [key for key in keys if "bytes" in key or key == "refused"][:2]:
            print(f"    {key}: {before[name].get(key)} -> {after[name].get(key)}")
    refused = sum("refused" in one for one in after.values())
    print(f"{len(before.keys() & after.keys())} calls compared ({refused} of them refused), "
          f"{len(different)} differ, {len(missing)} missing")  # fmt: skip
    return 1 if different or missing else 0


if __name__ == "__main__":
    sys.exit(main())
