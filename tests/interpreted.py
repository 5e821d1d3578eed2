"""Scripts that run Triton kernels through Triton's interpreter: one process, one JSON line."""

import json
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def run(script, timeout):
    """What tests/`script` prints; TRITON_INTERPRET is read when Triton is imported."""
    done = subprocess.run(
        [sys.executable, str(TESTS / script)],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(TESTS.parent)},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)
