"""`megatron-burst pretrain SCRIPT ...`: an unmodified Megatron-LM script, with our flags added.

Owns how the script is run: as `python SCRIPT ...` would, after `install`. Everything after SCRIPT
is the script's. Imports Megatron only once the script's folder is where Python looks first, so that
a checkout's own `megatron` is the one that is used. Must not know: flags or models.
"""

from __future__ import annotations

import argparse
import importlib
import runpy
import sys
from pathlib import Path

from .errors import plainly


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """SCRIPT, what belongs to it, and the one option that is not the script's."""
    parser.epilog = (
        "On several ranks: torchrun --nproc-per-node N -m megatron_burst pretrain SCRIPT ... "
        "The flags that are added: megatron-burst pretrain SCRIPT --help, group megatron-burst."
    )
    parser.add_argument(
        "--cpu",
        action="store_true",
        help="without GPUs, for tests and debugging: maps CUDA to the CPU (slow; not for training)",
    )
    parser.add_argument("script", metavar="SCRIPT", help="such as Megatron-LM's pretrain_gpt.py")
    parser.add_argument(
        "arguments", metavar="...", nargs=argparse.REMAINDER, help="flags of the script, and ours"
    )


def run(arguments: argparse.Namespace) -> None:
    """Install, then run the script; ``ValueError`` for what the user of a flag got wrong."""
    script = Path(arguments.script)
    if not script.is_file():
        raise ValueError(f"SCRIPT {script}: there is no such file")
    if not arguments.cpu and "--help" not in arguments.arguments:
        _check_device()
    sys.argv = [str(script), *arguments.arguments]
    sys.path[0] = str(script.resolve().parent)
    _install(arguments.cpu)
    with plainly():
        runpy.run_path(str(script), run_name="__main__")


def _check_device() -> None:
    if not importlib.import_module("torch.cuda").is_available():
        raise ValueError(
            "torch sees no CUDA device, and Megatron needs one: nvidia-smi and "
            "CUDA_VISIBLE_DEVICES say why; for tests and debugging without one: "
            "megatron_burst pretrain --cpu SCRIPT ... --distributed-backend gloo "
            "--use-cpu-initialization --transformer-impl local"
        )


def _install(cpu: bool) -> None:
    try:
        megatron = importlib.import_module("megatron_burst.megatron")
        importlib.import_module("megatron_burst.megatron.core_attention")  # imports Megatron-Core
    except ImportError as error:
        raise ValueError(f"{_version()} cannot be used: {error}") from error
    if not megatron.training_available():
        raise ValueError(
            "there is no megatron.training to import: SCRIPT must lie in a checkout of Megatron-LM,"
            " or PYTHONPATH must name one"
        )
    try:
        if cpu:
            megatron.cpu.enable()
        megatron.install()
    except (ImportError, RuntimeError) as error:
        raise ValueError(str(error)) from error


def _version() -> str:
    try:
        info = importlib.import_module("megatron.core.package_info")
    except ImportError:
        return "Megatron-Core (which is not installed, nor beside SCRIPT)"
    return f"Megatron-Core {info.__version__}"
