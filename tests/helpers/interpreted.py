"""Scripts that run Triton kernels through Triton's interpreter: one process, one JSON line.

`run` starts this file, which runs the script.
"""

import inspect
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

HELPERS = Path(__file__).parent
ROOT = HELPERS.parents[1]


def run(script, timeout):
    """What tests/helpers/`script` prints; TRITON_INTERPRET is read when Triton is imported."""
    done = subprocess.run(
        [sys.executable, __file__, str(HELPERS / script)],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def patch_language_once():
    """Skip patches of Triton's language that are in place.

    Triton 3.8 patches the language again at every call of a device function, which takes a fifth of
    the time of an interpreted kernel.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    def patch(function):
        modules = [x for x in function.__globals__.values() if inspect.ismodule(x)]
        languages = [module for module in modules if module in (tl, tl.core)]
        if any(tl.core.is_builtin(language.load) for language in languages):
            return patch_language(function)
        return scope()

    patch_language = interpreter._patch_lang
    scope = getattr(interpreter, "_LangPatchScope", None)
    if scope is not None:
        interpreter._patch_lang = patch


if __name__ == "__main__":
    patch_language_once()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
