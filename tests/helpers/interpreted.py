"""Scripts that run Triton kernels through Triton's interpreter: one process, one JSON line."""

import json
import os
import subprocess
import sys
from pathlib import Path

HELPERS = Path(__file__).parent
ROOT = HELPERS.parents[1]


def run(script, timeout):
    """What tests/helpers/`script` prints; TRITON_INTERPRET is read when Triton is imported."""
    done = subprocess.run(
        [sys.executable, str(HELPERS / script)],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)
