"""Compile the CUDA code for each architecture and say what its kernels need; no GPU is asked.

    python csrc/check_cuda.py [--arch 80 90a 100] [--nvcc NVCC]

Registers and spilled bytes are what ptxas reports. Exit status 1 if a kernel spills, or does not
compile without a warning.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from build import ARCHITECTURES, HERE, LANGUAGE, torch_folder

ENTRY = re.compile(r"Compiling entry function '(\w+)'")
SPILL = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")
HOLDS = ("logits", "capped", "exponentials")  # in the order of softmax_gradient.h


class Kernel(NamedTuple):
    """What ptxas says of one kernel."""

    name: str
    arch: str
    registers: int
    spilled: int  # bytes, stored and loaded


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--arch", nargs="+", default=ARCHITECTURES)
    parser.add_argument("--nvcc", default=shutil.which("nvcc"))
    args = parser.parse_args()
    if args.nvcc is None:
        print("there is no nvcc on the PATH; name one with --nvcc", file=sys.stderr)
        return 2
    cases = [(args.nvcc, file, arch) for file in sorted(HERE.glob("*.cu")) for arch in args.arch]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = [kernel for kernels in pool.map(compiled, cases) for kernel in kernels]
    show(found, args.arch)
    return int(any(kernel.spilled for kernel in found))


def compiled(case: tuple[str, Path, str]) -> list[Kernel]:
    """The kernels of one file for one architecture."""
    nvcc, file, arch = case
    with tempfile.TemporaryDirectory() as folder:
        command = [nvcc, *LANGUAGE, f"-arch=sm_{arch}", "-cubin", "-Werror", "all-warnings"]
        command += ["-Xptxas", "-v", "-isystem", str(torch_folder() / "include"), str(file)]
        command += ["-o", str(Path(folder, "x.cubin"))]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return report(done.stderr, arch)


def report(text: str, arch: str) -> list[Kernel]:
    """What ptxas wrote, kernel by kernel."""
    parts = ENTRY.split(text)[1:]
    kernels = []
    for name, rest in zip(parts[::2], parts[1::2], strict=True):
        spills, registers = SPILL.search(rest), REGISTERS.search(rest)
        assert spills is not None, f"ptxas says nothing of spills: {rest}"
        assert registers is not None, f"ptxas says nothing of registers: {rest}"
        spilled = sum(map(int, spills.groups()))
        kernels.append(Kernel(name, arch, int(registers.group(1)), spilled))
    return kernels


def show(kernels: list[Kernel], architectures: list[str]) -> None:
    """A table: a line for each kernel, registers (and what it spills) for each architecture."""
    names = {kernel.name for kernel in kernels}
    plain = dict(zip(names, demangled(list(names)), strict=True))
    width = max(map(len, plain.values()))
    print(f"{'registers':{width}}", *(f"sm_{arch:<6}" for arch in architectures))
    for name in sorted(names, key=plain.__getitem__):
        mine = {k.arch: k for k in kernels if k.name == name}
        cells = [f"{k.registers}{f' ({k.spilled} B spilled)' * bool(k.spilled)}" for k in
                 (mine[arch] for arch in architectures)]  # fmt: skip
        print(f"{plain[name]:{width}}", *(f"{cell:<9}" for cell in cells))
    most, spills = max(k.registers for k in kernels), sum(k.spilled for k in kernels)
    print(f"{len(kernels)} kernels compiled, at most {most} registers, {spills} bytes spilled")


def demangled(names: list[str]) -> list[str]:
    """As a person would write them, where the tool is there that knows how."""
    if shutil.which("c++filt") is None:
        return names
    written = subprocess.run(["c++filt"], input="\n".join(names), text=True, capture_output=True)
    text = written.stdout
    for number, name in enumerate(HOLDS):
        text = text.replace(f"(burst::Holds){number}", name)
    text = re.sub(r"\(burst::.*|void |burst::|c10::", "", text)
    return text.splitlines()


if __name__ == "__main__":
    sys.exit(main())
