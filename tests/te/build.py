"""An environment with Transformer Engine, built without a GPU, for the tests beside this file.

    python3.12 tests/te/build.py FOLDER     # `make test-te` does this

`transformer_engine_torch` has no wheel that fits: it is compiled here, in about two minutes of one
core. A file in the folder records that the build is complete, and what was built. The folder can be
removed at any time. If a requirement is missing, the reason is printed and the exit status is 77:
the caller then skips the tests.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SKIP = 77
PYTHON = (3, 12)  # the first with a Megatron-Core that has megatron.training
CUDA = "13"  # of the library's wheel, torch and the toolkit
OURS = ("-e", f"{ROOT}[megatron]", "pytest>=8", "pytest-xdist>=3.8", "hypothesis>=6.100")
TRAINING = ("tensorboard", "matplotlib>=3.8")
BUILD = ("setuptools>=69", "wheel", "ninja", "pybind11", "cmake")
PACKAGES = ("torch", "transformer_engine", "transformer_engine_torch", "megatron-core")
VERSIONS = f"""
import importlib.metadata, platform, torch, transformer_engine.pytorch
found = [p + " " + importlib.metadata.version(p) for p in {PACKAGES}]
print("Python " + platform.python_version(), *found, sep=", ")
"""


class Missing(Exception):
    """Something that no package index brings."""


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="of the environment")
    parser.add_argument("--torch", default="torch", help="pip's requirement")
    args = parser.parse_args(words)
    folder = args.folder.resolve()
    stamp = folder / ".ready"
    if not stamp.exists():
        try:
            build(folder, args.torch, stamp)
        except Missing as missing:
            print(f"test-te: SKIPPED: {missing}")
            return SKIP
        except subprocess.CalledProcessError as error:
            print(f"test-te: building Transformer Engine failed: {error}", file=sys.stderr)
            return 1
    print(f"== {stamp.read_text().strip()}", flush=True)
    return 0


def build(folder, torch, stamp):
    start = time.monotonic()

    def say(what):
        passed = time.monotonic() - start
        print(f"== {passed:4.0f} s  {what}", flush=True)

    toolkit = cuda_toolkit()
    if sys.version_info[:2] < PYTHON:
        version = sys.version.split()[0]
        raise Missing(f"needs Python 3.12, this is {version}: make test-te PYTHON=python3.12")
    say(f"Transformer Engine into {folder}, once, 7 GB: installing {torch}")
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    install = [*pip, "install", "-q"]
    subprocess.run([*install, torch, *BUILD], check=True)
    check_torch(python)
    say("installing megatron-core and the library of Transformer Engine")
    subprocess.run([*install, *OURS, *TRAINING], check=True)
    # Its library loads curand, which torch no longer brings.
    theirs = ["transformer_engine", "transformer_engine_cu13", "cuda-toolkit[curand]"]
    subprocess.run([*install, *theirs], check=True)
    with tempfile.TemporaryDirectory(prefix="te-") as name:
        environment = compiling(toolkit, folder)
        source = unpack(pip, Path(name), environment)
        as_one_file(source)
        say("compiling its extension for torch: about two minutes of one core")
        command = [*pip, "install", "-v", "--no-build-isolation", str(source)]
        logged(command, environment, folder / "build.log")
    say("importing it")
    versions = subprocess.check_output([python, "-W", "ignore", "-c", VERSIONS], text=True)
    minutes = (time.monotonic() - start) / 60
    stamp.write_text(f"{versions.strip()}; built {date.today()} in {minutes:.0f} minutes\n")


def cuda_toolkit():
    """The folder with bin/nvcc and headers of CUDA 13; nvcc on the PATH may be a script."""
    named = os.environ.get("CUDA_HOME")
    nvcc = shutil.which("nvcc")
    homes = [named] if named else [nvcc and Path(nvcc).resolve().parents[1], "/usr/local/cuda"]
    others = []
    for home in (Path(home) for home in homes if home):
        if (home / "bin" / "nvcc").exists() and (home / "include" / "cuda_runtime.h").exists():
            release = nvcc_release(home)
            if release.split(".")[0] == CUDA:
                return home
            others.append(f"{home} has {release}")
    raise Missing(
        f"needs the CUDA {CUDA} toolkit, nvcc and headers{'; '.join(['', *others])}: "
        "name its folder in CUDA_HOME"
    )


def nvcc_release(home):
    """Such as "13.0"."""
    command = [str(home / "bin" / "nvcc"), "--version"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        return f"an nvcc that does not run ({error})"
    found = re.search(r"release (\d+\.\d+)", said)
    return found[1] if found else "an nvcc that does not say its release"


def check_torch(python):
    code = "import torch; print(torch.__version__, torch.version.cuda)"
    found = subprocess.check_output([python, "-W", "ignore", "-c", code], text=True)
    version, cuda = found.split()
    if cuda.split(".")[0] != CUDA:
        raise Missing(f"needs a torch with CUDA {CUDA}; pip installed {version}, CUDA {cuda}")


def compiling(toolkit, folder):
    """The environment of the compiler: CUDA's headers, and those of NVIDIA's wheels. Compile,
    whatever wheel a server may have, and without the extension for expert parallelism."""
    headers = sorted(folder.glob("lib/python*/site-packages/nvidia/*/include"))
    return os.environ | {
        "CUDA_HOME": str(toolkit),
        "CPATH": os.pathsep.join(map(str, headers)),
        "NVTE_PYTORCH_FORCE_BUILD": "TRUE",
        "NVTE_WITH_NCCL_EP": "0",
        "NVTE_BUILD_WITH_NCCL_EP": "0",
    }


def unpack(pip, folder, environment):
    """The source package of the extension, in the release that was installed of the library."""
    shown = subprocess.check_output([*pip, "show", "transformer_engine"], text=True)
    version = re.search(r"^Version: (\S+)", shown, re.M)[1]
    wanted = [f"transformer_engine_torch=={version}", "--no-deps", "--no-build-isolation"]
    wanted += ["--no-binary", ":all:", "-d", str(folder)]
    subprocess.run([*pip, "download", "-q", *wanted], check=True, env=environment)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as content:
        content.extractall(folder, filter="data")
    (source,) = [path for path in folder.iterdir() if path.is_dir()]
    return source


def as_one_file(source):
    """Join the sources: they are short, and each would read torch's headers, half a minute.

    Without optimisation: nothing of it computes on a CPU.
    """
    folder = source / "csrc"
    parts = [path.rename(path.with_suffix(".part")) for path in sorted(folder.rglob("*.cpp"))]
    (folder / "all.cpp").write_text("".join(f'#include "{part}"\n' for part in parts))
    flags = source / "build_tools" / "pytorch.py"
    text = flags.read_text()
    assert '"-O3"' in text, f"{flags} names its flags otherwise than before"
    flags.write_text(text.replace('"-O3"', '"-O0"'))


def logged(command, environment, log):
    """Run it, its output into the log; the log's end is shown if it fails."""
    with log.open("w") as kept:
        done = subprocess.run(command, env=environment, stdout=kept, stderr=subprocess.STDOUT)
    if done.returncode:
        print("".join(log.read_text().splitlines(keepends=True)[-40:]), file=sys.stderr)
        raise subprocess.CalledProcessError(done.returncode, f"pip install; see {log}")


if __name__ == "__main__":
    sys.exit(main())
