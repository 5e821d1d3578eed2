# SPDX-License-Identifier: Apache-2.0
"""`megatron-burst pretrain SCRIPT ...`: run an unmodified Megatron-LM script with BurstAttention.

The script runs as in `python SCRIPT ...`, after `megatron_burst.megatron.install`. All arguments
after SCRIPT are passed to the script. The folder of the script is put first on `sys.path` before
Megatron is imported, so that a script in a checkout uses the `megatron` of the checkout.
"""

from __future__ import annotations

import argparse
import importlib
import runpy
import sys
from pathlib import Path

from .. import registry
from .errors import user_errors
from .parsers import one_line_errors
from .ranks import groups_ended


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `pretrain`."""
    parser.epilog = (
        "On 8 GPUs: torchrun --nproc-per-node 8 -m megatron_burst pretrain SCRIPT ... "
        "The added flags: megatron-burst pretrain SCRIPT --help, in the group megatron-burst."
    )
    add = parser.add_argument
    add("--cpu", action="store_true", help="run on the CPU, for tests and debugging (slow)")
    add("script", metavar="SCRIPT", help="a training script, such as Megatron-LM's pretrain_gpt.py")
    add("arguments", metavar="...", nargs=argparse.REMAINDER,
        help="flags of the script and of BurstAttention")  # fmt: skip


def run(arguments: argparse.Namespace) -> None:
    """Install the hooks, then run the script.

    Raises:
        ValueError: A flag or setting is wrong.
    """
    script = Path(arguments.script)
    if not script.is_file():
        raise ValueError(f"SCRIPT {script}: there is no such file; pass the path of a script")
    if arguments.cpu:
        registry.require("cpu", "--cpu")
    elif "--help" not in arguments.arguments:
        _check_device()
    sys.argv = [str(script), *arguments.arguments]
    sys.path[0] = str(script.resolve().parent)
    _install(arguments.cpu)
    with user_errors(), groups_ended(), one_line_errors("megatron-burst pretrain"):
        runpy.run_path(str(script), run_name="__main__")


def _check_device() -> None:
    if not importlib.import_module("torch.cuda").is_available():
        raise ValueError(
            "torch sees no CUDA device, and Megatron needs one; check nvidia-smi and "
            "CUDA_VISIBLE_DEVICES; for tests and debugging without a GPU use "
            "megatron-burst pretrain --cpu SCRIPT ... --distributed-backend gloo "
            "--use-cpu-initialization --transformer-impl local"
        )


def _install(cpu: bool) -> None:
    try:
        megatron = importlib.import_module("megatron_burst.megatron")
        # This imports Megatron-Core.
        importlib.import_module("megatron_burst.megatron.attention.core_attention")
    except ImportError as error:
        try:
            info = importlib.import_module("megatron.core.package_info")
            megatron_text = f"Megatron-Core {info.__version__}"
        except ImportError:
            megatron_text = "Megatron-Core (not installed, and not in the folder of SCRIPT)"
        raise ValueError(f"{megatron_text} cannot be used: {error}") from error
    if not megatron.training_available():
        raise ValueError(
            "megatron.training cannot be imported; use a SCRIPT in a checkout of Megatron-LM, or "
            "add a checkout to PYTHONPATH"
        )
    try:
        if cpu:
            registry.required("cpu", "--cpu").enable()
        megatron.install()
    except (ImportError, RuntimeError) as error:
        raise ValueError(str(error)) from error
