"""Compilation of the CUDA code for each architecture, with registers and spills; no GPU required.

    python csrc/check_cuda.py [--arch 80 90a 100] [--nvcc NVCC]

ptxas reports registers and spilled bytes. The exit status is 1 if a kernel spills, or if the
compiler reports a warning or an error.
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
    """Resources of one kernel, as ptxas reports them."""

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
        print("there is no nvcc on the PATH; set --nvcc", file=sys.stderr)
        return 2
    cases = [(args.nvcc, file, arch) for file in sorted(HERE.glob("*.cu")) for arch in args.arch]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        kernels = [kernel for part in pool.map(compiled, cases) for kernel in part]
    show(kernels, args.arch)
    return int(any(kernel.spilled for kernel in kernels))


def compiled(case: tuple[str, Path, str]) -> list[Kernel]:
    """Compile one file for one architecture, and return its kernels."""
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
    """Parse the output of ptxas."""
    parts = ENTRY.split(text)[1:]
    kernels = []
    for name, lines in zip(parts[::2], parts[1::2], strict=True):
        spills, registers = SPILL.search(lines), REGISTERS.search(lines)
        assert spills is not None, f"ptxas reports no spills: {lines}"
        assert registers is not None, f"ptxas reports no registers: {lines}"
        spilled = sum(map(int, spills.groups()))
        kernels.append(Kernel(name, arch, int(registers.group(1)), spilled))
    return kernels


def show(kernels: list[Kernel], architectures: list[str]) -> None:
    """Print a table with one line per kernel: registers and spilled bytes by architecture."""
    names = {kernel.name for kernel in kernels}
    plain = dict(zip(names, demangled(list(names)), strict=True))
    width = max(map(len, plain.values()))
    print(f"{'registers':{width}}", *(f"sm_{arch:<6}" for arch in architectures))
    for name in sorted(names, key=plain.__getitem__):
        by_arch = {k.arch: k for k in kernels if k.name == name}
        cells = [f"{k.registers}{f' ({k.spilled} B spilled)' * bool(k.spilled)}" for k in
                 (by_arch[arch] for arch in architectures)]  # fmt: skip
        print(f"{plain[name]:{width}}", *(f"{cell:<9}" for cell in cells))
    most, spills = max(k.registers for k in kernels), sum(k.spilled for k in kernels)
    print(f"{len(kernels)} kernels compiled, at most {most} registers, {spills} bytes spilled")


def demangled(names: list[str]) -> list[str]:
    """Return the readable names of kernels if c++filt exists, else the names."""
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
