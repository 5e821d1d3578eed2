"""Output of the command on docs/advise.md."""

from __future__ import annotations

import shlex
import subprocess
import sys

SHOWN = "--model llama3-8b --gpus 64 --gpu h100 --seq 1M --top 3"
MEMORY, RIVALS = "memory of row 1", "Megatron's own attention"  # the lines between are left out
FLAGS = "megatron_burst pretrain"  # flags follow it


def printed(words: str) -> list[str]:
    """Return the lines that `megatron-burst advise` prints."""
    command = [sys.executable, "-m", "megatron_burst", "advise", *shlex.split(words)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [line.rstrip() for line in done.stdout.splitlines()]


def output() -> str:
    """Return the output as a block, without memory by item and without Megatron's own flags."""
    lines = printed(SHOWN)
    start = next(i for i, line in enumerate(lines) if line.startswith(MEMORY))
    rivals = next(i for i, line in enumerate(lines) if line.startswith(RIVALS))
    flags = next(i for i, line in enumerate(lines) if FLAGS in line)
    ours = [line for line in lines[flags + 1 :] if "context-parallel" in line or "burst" in line]
    kept = [*lines[:start], *lines[rivals : flags + 1], "  ... \\", *ours]
    return "\n".join(["```text", *kept, "```"])
