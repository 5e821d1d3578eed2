"""What a mask costs under each layout: pairs computed, and time on a CPU.

*Computed over visible* (nothing is run): how many (query, key) pairs the CPU kernel's tiles hold
over how many attend, over the queries of `--sample` ranks spread over the ring and all their
keys. Times come from `masks_time`.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

import masks_time
import numpy as np
import torch
from report import human, markdown, progress, provenance

import megatron_burst as mb
from megatron_burst.kernels.operators import CpuFlash
from megatron_burst.layout import Layout, Span
from megatron_burst.masks import Mask
from megatron_burst.masks.tiling import Cutter

LAYOUTS = ("contiguous", "zigzag", "striped")
PARTS = ("counts", "time")


def main() -> int:
    args = arguments()
    torch.set_num_threads(1)
    for part in args.parts:
        text = {"counts": counts, "time": masks_time.measure}[part]
        print(f"{text(args)}\n\nMeasured with {provenance()}", end="\n\n")
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="seconds, small")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--local-tokens", type=int, default=16384, help="of one rank")
    parser.add_argument("--sample", type=int, default=4, help="ranks whose tiles are counted")
    parser.add_argument("--tokens", type=int, default=4096, help="of the one rank that is timed")
    parser.add_argument("--heads", type=int, default=4, help="of the one rank that is timed")
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    if args.quick:
        args.ranks, args.local_tokens, args.sample = 8, 256, 2
        args.tokens, args.heads, args.widths, args.repeats = 256, 1, [32], 2
    return args


@dataclass(frozen=True)
class Case:
    """A mask, how many tokens its smallest feature has, and layouts of its own."""

    label: str
    mask: Mask
    feature: int  # window, shortest document or block: what a shard's rows are compared with
    layouts: tuple[Layout, ...] = ()


def cases(args: argparse.Namespace) -> list[Case]:
    """Masks in the proportions of 64 ranks x 16K tokens, whatever the size asked for."""
    ranks, masks = args.ranks, mb.masks
    seq_len = ranks * args.local_tokens
    unit = args.local_tokens // 16  # 1K tokens at full size
    causal, window = masks.Causal(), masks.Window(4 * unit - 1, 0)
    shortest, block = unit, args.local_tokens
    packed = masks.Documents(documents(seq_len, shortest, 1))
    padded = documents(seq_len, shortest, 2 * ranks)
    blocks = seq_len // block
    table = np.random.default_rng(1).random((blocks, blocks)) < 0.1
    np.fill_diagonal(table, True)
    own_zigzag = mb.layout.make("zigzag", cp_size=ranks, cu_seqlens=padded)
    own_stripes = mb.layout.make("block_striped", cp_size=ranks, block=block)
    n = len(padded) - 1
    return [
        Case("full", masks.Full(), seq_len),
        Case("causal", causal, seq_len),
        Case(f"window {human(4 * unit)}", window, 4 * unit),
        Case(f"window {human(64 * unit)}", masks.Window(64 * unit - 1, 0), 64 * unit),
        Case(f"window {human(4 * unit)} both ways", masks.Window(2 * unit, 2 * unit), 4 * unit),
        Case("prefix 1/4, then causal", causal | masks.Prefix(seq_len // 4), seq_len),
        Case(f"{n} documents, causal", packed & causal, shortest),
        Case(f"{n} documents, padded, causal", masks.Documents(padded) & causal, shortest,
             (own_zigzag,)),
        Case(f"{n} documents, window {human(4 * unit)}", packed & window, shortest),
        Case(f"blocks of {human(block)}, 10 %, causal", masks.BlockSparse(table, block) & causal,
             block, (own_stripes,)),
        Case("dilated 4, causal", masks.Dilated(4) & causal, seq_len),
    ]  # fmt: skip


def documents(seq_len: int, shortest: int, multiple: int, count: int = 100) -> np.ndarray:
    """Cumulative lengths of about `count` documents, lognormal as text corpora are."""
    lengths = np.random.default_rng(0).lognormal(0.0, 1.0, count)
    count = min(count, seq_len // (8 * shortest))
    spare = seq_len - count * shortest
    shares = lengths[:count] / lengths[:count].sum() * spare
    bounds = np.concatenate([[0], np.cumsum(shortest + shares)])
    bounds = (bounds // multiple * multiple).astype(np.int64)
    bounds[-1] = seq_len
    return bounds


def counts(args: argparse.Namespace) -> str:
    """The table of masks and layouts."""
    rows, every = [], cases(args)
    with progress("counting", sum(len(LAYOUTS) + len(c.layouts) for c in every)) as step:
        for case in every:
            made = [mb.layout.make(name, cp_size=args.ranks) for name in LAYOUTS]
            for layout in (*made, *case.layouts):
                step(f"{case.label}, {name_of(layout)}")
                spans = all_spans(args, layout)
                share, calls = computed_over_visible(args, spans, case.mask)
                stride = max(span.stride for span in spans[0])
                feature = min(case.feature // stride, args.local_tokens)
                rows.append([case.label, name_of(layout), str(feature), f"{share:.3f}",
                             f"{calls:.0f}"])  # fmt: skip
    head = (
        f"{args.ranks} ranks x {human(args.local_tokens)} tokens. *Feature, rows*: how many rows "
        f"of a shard the mask's smallest feature (window, shortest document, block) covers. "
        f"*Computed / visible*: pairs in the tiles of the CPU kernel over pairs that attend, for "
        f"the queries of {args.sample} ranks. *Calls per pair*: operator calls for one pair of "
        f"shards that has something visible, on average."
    )
    columns = ["mask", "layout", "feature, rows", "computed / visible", "calls per pair"]
    return f"{head}\n\n{markdown(columns, rows)}"


def computed_over_visible(
    args: argparse.Namespace, spans: list[tuple[Span, ...]], mask: Mask
) -> tuple[float, float]:
    """Over the pairs of all keys with the queries of some ranks; and tiles per pair of shards."""
    cutter = Cutter(*CpuFlash.limits)
    computed = visible = calls = pairs = 0
    for rank in np.linspace(0, args.ranks - 1, args.sample).round().astype(int).tolist():
        for keys in spans:
            tiles = cutter.tiles(mask, spans[rank], keys)
            computed += sum(tile.computed for tile in tiles)
            visible += sum(tile.visible for tile in tiles)
            calls, pairs = calls + len(tiles), pairs + bool(tiles)
    return computed / visible, calls / pairs


def all_spans(args: argparse.Namespace, layout: Layout) -> list[tuple[Span, ...]]:
    seq_len = args.ranks * args.local_tokens
    return [layout.spans(rank, seq_len) for rank in range(args.ranks)]


def name_of(layout: Layout) -> str:
    own = type(layout).__name__ == "DocumentZigzag"
    return "zigzag in documents" if own else layout.name


if __name__ == "__main__":
    sys.exit(main())
