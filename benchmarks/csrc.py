"""Operators of `csrc/` and the torch code that replaces them, on the CPU.

Both run in turns, so that other load slows both. The script prints medians of the times, and of the
ratios within a pair. The library is required: `python setup.py build_csrc`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from report import markdown, milliseconds, progress, provenance, ratio

from megatron_burst.kernels import native
from megatron_burst.kernels.aten import stand_in
from megatron_burst.kernels.online_softmax import empty_result, merge_, row_delta
from megatron_burst.linear_cross_entropy.formula import Formula
from megatron_burst.linear_cross_entropy.rows import Columns, softmax_gradient_

WIDTH, HEADS = 128, 8


class Case(NamedTuple):
    """One operator; `fresh()` makes its arguments, outside the measured time."""

    work: str
    what: str
    fresh: Callable[[], tuple]
    run: Callable[..., object]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="seconds, small")
    parser.add_argument("--repeats", type=int, default=41)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if not native.serves("cpu"):
        print("the library is not built: python setup.py build_csrc", file=sys.stderr)
        return 1
    all_cases = list(cases(64 if args.quick else 2048, 500 if args.quick else 32000))
    rows = []
    with progress("csrc", len(all_cases)) as step:
        for case in all_cases:
            step(f"{case.work}, {case.what}")
            times = pairs(case, 3 if args.quick else args.repeats)
            cells = milliseconds(times["torch"]), milliseconds(times["csrc"])
            rows.append([case.work, case.what, *cells, ratio(times, "torch", "csrc")])
    columns = ["work", "on", "torch, ms", "csrc, ms", "torch / csrc"]
    print(f"Measured with {provenance()}\n\n{markdown(columns, rows)}")
    return 0


def cases(rows: int, vocabulary: int) -> Iterator[Case]:
    shape = f"{rows} rows x {HEADS} heads x {WIDTH}"
    for dtype in (torch.float32, torch.bfloat16):
        kind = str(dtype).removeprefix("torch.")
        q, other = torch.randn(2, rows, 1, HEADS, WIDTH).to(dtype)
        part = torch.randn(1, HEADS, rows, WIDTH).to(dtype).permute(2, 0, 1, 3)
        lse = torch.randn(rows, 1, HEADS)
        out, seen = empty_result(q, WIDTH)
        yield Case("merge", f"{kind}, {shape}", lambda o=out, s=seen, p=part, x=lse: (o, s, p, x),
                   merge_)  # fmt: skip
        yield Case("delta", f"{kind}, {shape}", lambda a=q, b=other: (a, b, torch.float32),
                   row_delta)  # fmt: skip
        yield Case("stand-in", f"{kind}, {shape}", lambda a=q, x=lse: (a, x), stand_in)
    yield from gradients(256 if rows > 256 else 8, vocabulary)


def gradients(rows: int, vocabulary: int) -> Iterator[Case]:
    z = torch.randn(rows, vocabulary)
    labels, weights = torch.arange(rows), torch.full((rows,), 1 / rows)
    columns, shape = Columns(0, vocabulary), f"float32, {rows} rows x {vocabulary}"
    for name, formula in {
        "logits": Formula(vocabulary),
        "logits, softcap": Formula(vocabulary, softcap=30.0),
        "exponentials": Formula(vocabulary),
        "exponentials, smoothing": Formula(vocabulary, smoothing=0.1),
    }.items():
        peak = z.amax(1)
        lse = z.logsumexp(1)
        left = (z - peak[:, None]).exp_() if "exponentials" in name else z
        rest = (columns, formula, peak if "exponentials" in name else None)
        rows_of = (labels, lse, weights, *rest)
        yield Case("gradient", f"{name}, {shape}",
                   lambda left=left, rows_of=rows_of: (left.clone(), *rows_of),
                   softmax_gradient_)  # fmt: skip


def pairs(case: Case, repeats: int) -> dict[str, list[float]]:
    """Return seconds with and without the library, in turns, after a warm-up round."""
    file, times = native.FILE, {"torch": [], "csrc": []}
    for repeat in range(1 + repeats):
        for name, library in (("torch", "none"), ("csrc", file)):
            arguments = case.fresh()
            native.FILE = library
            begin = time.perf_counter()
            case.run(*arguments)
            taken = time.perf_counter() - begin
            native.FILE = file
            if repeat:
                times[name].append(taken)
    return times


if __name__ == "__main__":
    sys.exit(main())
