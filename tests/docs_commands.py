"""The commands of docs/quickstart.md, run as a stranger would: in an environment of their own.

`make test-docs MEGATRON=path`, with a checkout of Megatron-LM: makes a virtual environment,
installs `.[megatron]` and nothing else, runs every training command of the page in a copy of the
checkout, and compares the losses they print with the page's table. Takes minutes and several GB,
most of it torch; without a checkout it says that it was skipped.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "quickstart.md"
LIMIT = 1800  # seconds for one command, on a busy machine
DIFFERENCE = 1e-4  # of a loss, relative: another torch rounds otherwise


def commands(page):
    """(lines that set variables, [command, ...]) of the indented blocks that speak of $COMMON."""
    blocks = re.findall(r"(?:^ {4}.*\n|^\n)+", page, re.M)
    lines = "".join(block for block in blocks if "COMMON" in block).replace("\\\n", " ")
    runs = [line.strip() for line in lines.splitlines() if line.strip().startswith("torchrun")]
    settings = lines[: lines.index("torchrun")]
    assert "COMMON=" in settings
    return settings, runs


def losses(page):
    """A list for each column of the page's table: the losses of iterations 1, 2, ..."""
    rows = re.findall(r"^\| \d+ \|(.*)\|$", page, re.M)
    return list(zip(*[re.findall(r"\d\.\d{6}", row) for row in rows], strict=True))


def environment(folder):
    """A new virtual environment with the package and its extra; its folder of executables."""
    print(f"== installing .[megatron] into {folder} (minutes: torch is large)", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    install = ["-m", "pip", "install", "--disable-pip-version-check", "-q", f"{ROOT}[megatron]"]
    subprocess.run([folder / "bin" / "python", *install], check=True)
    return folder / "bin"


def wrong(command, settings, expected, checkout, executables):
    """What is wrong with a run of this command, or nothing."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    path = f"{executables}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", f"{settings}\n{command}"],
        cwd=checkout, env=inherited | {"PATH": path}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT,
    )  # fmt: skip
    if done.returncode:
        return f"exit status {done.returncode}\n{done.stdout[-4000:]}"
    found = re.findall(r"iteration +\d+/.*?lm loss: ([\d.E+-]+)", done.stdout)
    told = [f"{float(loss):.6f}" for loss in found]
    if len(found) != len(expected) or any(
        abs(float(a) - float(b)) > DIFFERENCE * float(b)
        for a, b in zip(found, expected)  # noqa: B905
    ):
        return f"losses {', '.join(told)}; the page has {', '.join(expected)}"
    return None


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megatron", default="", help="a checkout of Megatron-LM")
    parser.add_argument("--venv", type=Path, help="made there, and kept; default: a temporary one")
    asked = parser.parse_args(argv)
    script = Path(asked.megatron, "pretrain_gpt.py")
    if not asked.megatron:
        print("test-docs: SKIPPED: needs a checkout of Megatron-LM: make test-docs MEGATRON=path")
        return 0
    if not script.exists():
        print(f"test-docs: MEGATRON={asked.megatron} has no {script.name}", file=sys.stderr)
        return 2
    page, failed = PAGE.read_text(), 0
    settings, runs = commands(page)
    with tempfile.TemporaryDirectory(prefix="docs-") as name:
        checkout = Path(name, "Megatron-LM")  # a copy: helpers are compiled into it
        ignored = shutil.ignore_patterns(".git", "*.so", "__pycache__")
        shutil.copytree(script.parent, checkout, ignore=ignored)
        venv = asked.venv.resolve() if asked.venv else Path(name, "venv")
        executables = environment(venv)
        for command, expected in zip(runs, losses(page), strict=True):
            fault = wrong(command, settings, expected, checkout, executables)
            print(f"{'FAILED' if fault else 'ok':8}{command}", flush=True)
            if fault:
                print(fault)
                failed += 1
    print(f"{len(runs) - failed} of {len(runs)} commands of {PAGE.name} ran and printed its losses")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
