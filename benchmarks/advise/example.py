"""What the page shows of the command itself: its output, and its picture."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

SHOWN = "--model llama3-8b --gpus 64 --gpu h100 --seq 1M --top 3"
DRAWN = "--model llama3-70b --gpus 256 --gpu h100 --seq 128K --pp 4 --vpp 2 --top 1"
MEMORY = "memory of row 1"  # begins what is left out, up to what follows
FASTER, FLAGS = "What would make it faster", "megatron_burst pretrain"  # flags follow the latter
PICTURE = "advise-step.png"


def printed(words: str) -> list[str]:
    """The lines of `megatron-burst advise` with these words."""
    command = [sys.executable, "-m", "megatron_burst", "advise", *shlex.split(words)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [line.rstrip() for line in done.stdout.splitlines()]


def output() -> str:
    """The output as a block, without memory by item and without Megatron's own flags."""
    lines = printed(SHOWN)
    start = next(i for i, line in enumerate(lines) if line.startswith(MEMORY))
    faster = next(i for i, line in enumerate(lines) if line.startswith(FASTER))
    flags = next(i for i, line in enumerate(lines) if FLAGS in line)
    ours = [line for line in lines[flags + 1 :] if "context-parallel" in line or "burst" in line]
    kept = [*lines[:start], *lines[faster : flags + 1], "  ... \\", *ours]
    return "\n".join(["```text", *kept, "```"])


def picture(folder: Path) -> None:
    """The picture of one layer and one step, beside the page."""
    printed(f"{DRAWN} --png {shlex.quote(str(folder / PICTURE))}")
