"""Entry point for tools that call setup.py; pyproject.toml has all settings but the library.

    python setup.py build_csrc    # compile csrc/ into the package (csrc/README.md)

The package works without the compiled library, and an installation compiles nothing.
"""

import re
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

from setuptools import Command, Distribution, setup

HERE = Path(__file__).resolve().parent


class BuildCsrc(Command):
    """Command that runs `csrc/build.py` with its defaults; run that file for other settings."""

    description = "compile the operators of csrc/ into the package"
    user_options: ClassVar[list] = []

    def initialize_options(self):
        pass

    def finalize_options(self):
        pass

    def run(self):
        done = subprocess.run([sys.executable, str(HERE / "csrc" / "build.py")])
        if done.returncode:
            sys.exit(done.returncode)


class Package(Distribution):
    """Distribution in pure Python, or for this platform if the library has been built."""

    def has_ext_modules(self):
        return (HERE / "megatron_burst" / "kernels" / "libcsrc.so").exists()


def readme() -> str:
    """Return README.md with absolute links, because a package index lacks the linked files."""
    project = (HERE / "pyproject.toml").read_text(encoding="utf-8")
    repository = re.search(r'^Repository = "(.+)"$', project, re.M)[1]

    def absolute(link: re.Match) -> str:
        return f"{link[1]}{repository}/{'raw' if link[1].startswith('!') else 'blob'}/main/"

    text = (HERE / "README.md").read_text(encoding="utf-8")
    return re.sub(r"(!?\[[^\]]*\]\()(?!https?://|#)", absolute, text)


setup(
    cmdclass={"build_csrc": BuildCsrc},
    distclass=Package,
    long_description=readme(),
    long_description_content_type="text/markdown",
)
