"""Losses of the same training run at CP 1, 2, 4 and 8.

    python benchmarks/loss.py            # 20 steps each, fp32 and bf16, plain and packed

It trains `examples/pretrain_gpt.py` from one seed on the quickstart's text. CP 1 is Megatron's own
attention on one rank. It prints the largest relative difference in loss. For bf16 it also prints
the difference between bf16 and fp32 on one rank, which is the effect of the number format.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import report

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import launch
import prepare_data

MODES = {
    "fp32": "",
    "bf16": "--bf16",
    "fp32, packed": "--packed",
    "bf16, packed": "--packed --bf16",
}
MODEL = (
    "--eod-mask-loss --num-layers 2 --hidden-size 96 --ffn-hidden-size 256 "
    "--num-attention-heads 8 --num-query-groups 4 --global-batch-size 8 --untie-embeddings-and-"
    "output-weights --lr-warmup-iters 2"
)


def flags_of(size: int, mode: str) -> list[str]:
    """Return the flags of a run on ``size`` context-parallel ranks, in 2 nodes if possible."""
    split = f"--context-parallel-size {size}"
    if size > 2:
        split += f" --hierarchical-context-parallel-sizes {size // 2} 2"
    return [*split.split(), *MODES[mode].split()]


def worst(losses: dict[int, float], reference: dict[int, float]) -> tuple[float, int]:
    """Return the largest relative difference and its step."""
    return max((abs(losses[step] - x) / x, step) for step, x in reference.items())


def measure(args: argparse.Namespace, folder: Path) -> dict[tuple[str, int], dict[int, float]]:
    """Return losses by step, of each mode and size."""
    data = prepare_data.prepare(None, folder / "data", args.seq_length, report.TERMINAL)
    common = f"--data-path {data.prefix} --seq-length {args.seq_length} --train-iters {args.steps}"
    losses = {}
    runs = [(mode, size) for mode in args.modes for size in args.sizes]
    with report.progress("loss", len(runs)) as begin:
        for mode, size in runs:
            begin(f"{mode}, CP {size}")
            flags = [*common.split(), *MODEL.split(), *flags_of(size, mode)]
            flags += ["--log-interval", str(args.steps)]
            run = launch.train(f"{mode}-{size}".replace(", ", "-"), size, flags, folder)
            losses[mode, size] = run.curve("loss")
    return losses


def table(losses: dict[tuple[str, int], dict[int, float]], args: argparse.Namespace) -> str:
    """Return a row per mode: every size compared with one rank, and bf16 with fp32 on one rank."""
    rows = []
    for mode in args.modes:
        alone = losses[mode, args.sizes[0]]
        cells = [mode, f"{alone[min(alone)]:.3f} to {alone[max(alone)]:.3f}"]
        for size in args.sizes[1:]:
            difference, step = worst(losses[mode, size], alone)
            cells.append(f"{difference:.1e} (step {step})")
        exact = losses.get((mode.replace("bf16", "fp32"), args.sizes[0]))
        format_alone = "bf16" in mode and exact
        cells.append(f"{worst(alone, exact)[0]:.1e}" if format_alone and exact else "")
        rows.append(cells)
    heads = [f"CP {size}" for size in args.sizes[1:]]
    return report.markdown(["run", "loss, CP 1", *heads, "bf16 itself, CP 1"], rows)


def main() -> int:
    parser = argparse.ArgumentParser(description="Losses at several context-parallel sizes.")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seq-length", type=int, default=512)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        losses = measure(args, Path(folder))
    print(
        f"Largest relative difference in loss from one rank (Megatron's own attention) over "
        f"{args.steps} steps from the same seed, {args.seq_length} tokens per sequence, two layers "
        "of width 96, GQA 8:4, the quickstart's text; burst over 2 nodes from CP 4 on. The last "
        "column is what bf16 costs without any splitting: one rank in bf16 against one in fp32.\n\n"
        f"{table(losses, args)}\n\n{report.provenance()}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
