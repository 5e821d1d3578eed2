"""Build of csrc/ into one library for torch 2.10 and later.

    python setup.py build_csrc           # into the package, which loads it
    python csrc/build.py --out FILE.so   # into another file

The build requires a C++20 compiler and the headers in torch's package. If nvcc exists, the library
also contains CUDA code for the given architectures; no GPU is required. This module decides the
compiler flags. It imports neither torch nor the package, and only searches for torch's folder.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parent
PACKAGE = HERE.parent / "megatron_burst"
LIBRARY = PACKAGE / "kernels" / "libcsrc.so"
ARCHITECTURES = ("80", "90a", "100")
OLDEST = (2, 10)  # the first torch whose stable ABI contains all functions that csrc/ uses
TARGET = "-DTORCH_TARGET_VERSION=0x020a000000000000"
LANGUAGE = ("-std=c++20", "-O3", TARGET)
HOST = (
    "-fPIC",
    "-fvisibility=hidden",
    "-fopenmp-simd",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wall",
    "-Wno-unknown-pragmas",
)


def main(words: Sequence[str] | None = None) -> int:
    args = arguments(words)
    try:
        build(args.out, args.cxx, args.nvcc, args.arch)
    except (ValueError, subprocess.CalledProcessError) as error:
        print(f"build_csrc: {error}", file=sys.stderr)
        return 1
    kinds = f"CPU and CUDA ({', '.join('sm_' + a for a in args.arch)})" if args.nvcc else "CPU"
    print(f"built {args.out} for {kinds}")
    return 0


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=LIBRARY, help="default: in the package")
    parser.add_argument("--cxx", default="c++", help="the C++ compiler")
    parser.add_argument("--nvcc", default=shutil.which("nvcc"), help="default: the one on the PATH")
    parser.add_argument(
        "--cpu", action="store_true", help="build without CUDA, even if nvcc exists"
    )
    parser.add_argument(
        "--arch", nargs="+", default=ARCHITECTURES, help="CUDA architectures, such as 80 90a 100"
    )
    args = parser.parse_args(words)
    if args.cpu:
        args.nvcc = None
    return args


def build(out: Path, cxx: str, nvcc: str | None, arch: Sequence[str] = ARCHITECTURES) -> None:
    """Compile and link; `out` is replaced only after success.

    Args:
        out: The library.
        cxx: C++ compiler.
        nvcc: CUDA compiler; None for a library without CUDA.
        arch: CUDA architectures.

    Raises:
        ValueError: The compiler or torch does not exist, or torch is too old.
        subprocess.CalledProcessError: A compiler failed; its own message is on stderr.
    """
    if shutil.which(cxx) is None:
        raise ValueError(f"there is no C++ compiler {cxx}; install g++, or set --cxx")
    torch = torch_folder()
    sources = sorted([*HERE.glob("*.cpp"), *(HERE.glob("*.cu") if nvcc else ())])
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".csrc-") as folder:
        objects = [Path(folder, source.name + ".o") for source in sources]
        commands = [
            [*compiler(source, cxx, nvcc, arch, torch), "-c", str(source), "-o", str(target)]
            for source, target in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(run, commands))
        linked = Path(folder, out.name)
        run([*linker(cxx, nvcc), *map(str, objects), "-o", str(linked), "-L", str(torch / "lib"),
             "-ltorch_cpu"])  # fmt: skip
        linked.replace(out)


def torch_folder() -> Path:
    """Return the folder of this interpreter's torch.

    Raises:
        ValueError: torch is not installed, or too old.
    """
    spec = importlib.util.find_spec("torch")
    places = spec.submodule_search_locations if spec else None
    if not places:
        raise ValueError(f"torch is not installed for {sys.executable}")
    folder = Path(next(iter(places)))
    version = metadata.version("torch")
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        raise ValueError(f"torch {version} is too old; install 2.10 or newer")
    return folder


def compiler(
    source: Path, cxx: str, nvcc: str | None, arch: Sequence[str], torch: Path
) -> list[str]:
    """Return the command that compiles a source, without input and output."""
    include = ["-isystem", str(torch / "include")]
    if source.suffix != ".cu":
        return [cxx, *LANGUAGE, *HOST, *["-DBURST_CUDA"] * bool(nvcc), *include]
    assert nvcc is not None
    host_flags = ",".join(flag for flag in HOST if flag.startswith("-f"))
    return [nvcc, *LANGUAGE, "-ccbin", cxx, "-Xcompiler", host_flags, *codes(arch), *include]


def codes(arch: Sequence[str]) -> list[str]:
    """Return flags for machine code of each architecture, and for PTX of the first."""
    machine_code = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in arch]
    return [*machine_code, f"-gencode=arch=compute_{arch[0]},code=compute_{arch[0]}"]


def linker(cxx: str, nvcc: str | None) -> list[str]:
    """Return the command that links; the library must name libtorch_cpu as a dependency."""
    if nvcc:  # static, because a torch without CUDA has no CUDA runtime
        return [nvcc, "-shared", "-ccbin", cxx, "-cudart", "static", "-Xlinker", "--no-as-needed"]
    return [cxx, "-shared", "-Wl,--no-as-needed"]


def run(command: list[str]) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    sys.exit(main())
