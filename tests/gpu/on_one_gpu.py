"""Run a script as one of several ranks that share one GPU and talk through NCCL:

torchrun --nproc-per-node 4 tests/gpu/on_one_gpu.py examples/pretrain_gpt.py ITS FLAGS
torchrun --nproc-per-node 4 tests/gpu/on_one_gpu.py -m megatron_burst ITS ARGUMENTS

It says whether ranks compute the right numbers, and nothing of speed.
"""

import os
import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from one_device import one_gpu

if __name__ == "__main__":
    os.environ["LOCAL_RANK"] = "0"
    one_gpu(int(os.environ["RANK"]))
    module = sys.argv[1] == "-m"
    sys.argv = sys.argv[1 + module :]
    if module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
        runpy.run_path(sys.argv[0], run_name="__main__")
