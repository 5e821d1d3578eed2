"""One GPU plays every rank of a ring: numerics against float64, then time per ring step.

Numerics: a whole ring in one process (`Groups.in_process`), bf16, grouped-query heads, both
sides, zigzag and striped, against dense float64 attention; the error is printed beside that of
torch's stock operator on the same inputs, and a ratio above the bound fails the run.
Time: one step (one pair of shards) of our kernel against the bare stock operator, interleaved
in one process, medians of repeated pairs with quartiles; side "query" pays for the stand-in.

`benchmarks/gpu.sh` runs it; `--device cpu` runs the same code on the CPU operator, small.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import megatron_burst as mb
from megatron_burst.kernels import Rows, make
from megatron_burst.masks import Causal, Full

BOUND = 2.0  # times the stock operator's own error; partial results are rounded once more
BACKENDS = {"aten": SDPBackend.FLASH_ATTENTION, "aten_cudnn": SDPBackend.CUDNN_ATTENTION}


def main() -> int:
    args = arguments()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here: nothing was run or measured")
        return 0
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, {date.today()}: {' '.join(sys.argv)}\n")
    kernels = ["aten", "aten_cudnn"] if args.device == "cuda" else ["aten"]
    failed = numerics(args, kernels)
    print()
    timing(args, kernels)
    return 1 if failed else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096, help="global, for the numerics")
    parser.add_argument("--local-tokens", type=int, nargs="+", default=[8192, 16384, 32768])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=20)
    return parser.parse_args()


# --- numerics ------------------------------------------------------------------------------


def numerics(args: argparse.Namespace, kernels: list[str]) -> int:
    """Print the error of out, dq, dk, dv for every case; return how many are out of bound."""
    torch.manual_seed(0)
    heads, kv_heads = 8, max(1, 8 * args.kv_heads // args.heads)
    shapes = [(args.tokens, 1, n, args.width) for n in (heads, kv_heads, kv_heads, heads)]
    q, k, v, dout = (torch.randn(s, device=args.device, dtype=torch.bfloat16) for s in shapes)
    exact = dense(q, k, v, dout)
    ranks = f"{args.nodes} x {args.ranks_per_node} ranks"
    print(f"causal, bf16, {args.tokens} tokens over {ranks}, {heads}:{kv_heads} heads; largest")
    print("error over the largest value, and over the stock operator's own error:")
    failed = 0
    for kernel in kernels:
        own = errors(stock(kernel, args.device, q, k, v, dout), exact)
        print(f"{kernel:10s} {'stock':28s} " + "  ".join(f"{e:8.1e}        " for e in own))
        for layout in ("zigzag", "striped"):
            for side in ("kv", "query"):
                got = ring(args, kernel, layout, side, q, k, v, dout)
                ratios = list(zip(errors(got, exact), own, strict=True))
                bad = any(not error <= BOUND * stock_error for error, stock_error in ratios)
                failed += bad
                row = "  ".join(f"{a:8.1e} {a / b:5.2f}x " for a, b in ratios)
                print(f"{kernel:10s} {layout:8s} side {side:14s} {row} {'FAIL' if bad else ''}")
    return failed


def dense(q, k, v, dout) -> list[torch.Tensor]:
    """out, dq, dk, dv in float64, one head at a time to bound the memory."""
    group = q.shape[2] // k.shape[2]
    results: list[list[torch.Tensor]] = []
    hidden = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).triu(1)
    for head in range(q.shape[2]):
        a, b, c = (
            x[:, 0, i].double().requires_grad_()
            for x, i in ((q, head), (k, head // group), (v, head // group))
        )
        scores = (a @ b.T * q.shape[-1] ** -0.5).masked_fill(hidden, float("-inf"))
        out = scores.softmax(-1) @ c
        results.append(
            [out.detach(), *torch.autograd.grad(out, (a, b, c), dout[:, 0, head].double())]
        )
    out, dq, dk, dv = (torch.stack(x, 1).unsqueeze(1) for x in zip(*results, strict=True))
    return [out, dq, *(x.unflatten(2, (-1, group)).sum(3) for x in (dk, dv))]


def stock(kernel: str, device: str, q, k, v, dout) -> list[torch.Tensor]:
    """out, dq, dk, dv of torch's own attention through the operator that `kernel` uses."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    with sdpa_kernel(BACKENDS[kernel]):
        out = F.scaled_dot_product_attention(
            *(x.permute(1, 2, 0, 3) for x in (q, k, v)), is_causal=True, enable_gqa=True
        ).permute(2, 0, 1, 3)
        out.backward(dout)
    return [out.detach(), q.grad, k.grad, v.grad]


def ring(args, kernel: str, layout: str, side: str, q, k, v, dout) -> list[torch.Tensor]:
    """out, dq, dk, dv of the whole ring, every rank on this device."""
    groups = mb.Groups.in_process(inter=args.nodes, intra=args.ranks_per_node)
    order = mb.layout.make(layout, cp_size=groups.size)
    ranks = range(groups.size)
    shards = [[mb.shard(x, order, r).requires_grad_() for r in ranks] for x in (q, k, v)]
    outs = mb.attention(*shards, groups=groups, layout=layout, side=side, kernel=kernel)
    torch.autograd.backward(outs, [mb.shard(dout, order, r) for r in ranks])
    parts = [[o.detach() for o in outs], *([t.grad for t in shard] for shard in shards)]
    return [mb.unshard(part, order) for part in parts]


def errors(got: list[torch.Tensor], exact: list[torch.Tensor]) -> list[float]:
    return [
        ((a.double() - b).abs().max() / b.abs().max()).item()
        for a, b in zip(got, exact, strict=True)
    ]


# --- time per step -------------------------------------------------------------------------


def timing(args: argparse.Namespace, kernels: list[str]) -> None:
    heads, kv_heads, width = args.heads, args.kv_heads, args.width
    print(f"one ring step, bf16, {heads}:{kv_heads} heads, width {width}: milliseconds (TFLOP/s),")
    print("medians of interleaved repeats; ratio to the stock operator's time [quartiles]:")
    for tokens in args.local_tokens:
        for mask in (Full(), Causal()):
            for kernel in kernels:
                step_times(args, kernel, tokens, mask)


def step_times(args: argparse.Namespace, name: str, tokens: int, mask: mb.masks.Mask) -> None:
    """Print one row per direction: the stock operator, then ours with either side."""
    dtype, device = torch.bfloat16, args.device
    sizes = [(tokens, 1, n, args.width) for n in (args.heads, args.kv_heads, args.kv_heads)]
    q, k, v = (torch.randn(size, device=device, dtype=dtype) for size in sizes)
    dout = torch.randn_like(q)
    kernel = make(name, q, k, v)
    span = mb.layout.make("contiguous", cp_size=1).spans(0, tokens)
    work, scale = kernel.plan(mask, span, span), args.width**-0.5
    ((_, out, lse),) = list(kernel.forward(q, k, v, work, scale))
    out, lse = out.contiguous(), lse.float().contiguous()
    delta = (dout.float() * out.float()).sum(-1)
    totals = [torch.zeros(size, device=device) for size in sizes]
    operator, causal = kernel.operator, isinstance(mask, Causal)
    first = [x.permute(1, 2, 0, 3) for x in (q, k, v, dout, out)]
    stats = lse.permute(1, 2, 0).contiguous()

    def back(rows: Rows) -> Callable[[], None]:
        return lambda: kernel.backward(rows, k, v, work, scale, *totals)

    forward = {
        "stock": lambda: operator.forward(*first[:3], causal, scale),
        "ours": lambda: list(kernel.forward(q, k, v, work, scale)),
    }
    backward = {
        "stock": lambda: operator.backward(first[3], *first[:3], first[4], stats, causal, scale),
        "side kv": back(Rows(q, dout, lse, delta, out)),
        "side query": back(Rows(q, dout, lse, delta, None)),
    }
    flops = 4 * tokens**2 * args.heads * args.width * (0.5 if causal else 1)
    for title, runs, work_done in (
        ("forward", forward, flops),
        ("backward", backward, 2.5 * flops),
    ):
        times = interleaved(runs, args.repeats, device)
        cells = [cell(label, times, work_done) for label in runs]
        shape = f"{name:10s} {'causal' if causal else 'full':6s} {tokens:6d} {title:8s}"
        print(f"{shape} " + "   ".join(cells), flush=True)


def interleaved(runs: dict[str, Callable], repeats: int, device: str) -> dict[str, list[float]]:
    """Seconds of each run, A B C A B C ..., after one warm-up round."""
    times: dict[str, list[float]] = {label: [] for label in runs}
    for repeat in range(repeats + 1):
        for label, run in runs.items():
            seconds = timed(run, device)
            if repeat:
                times[label].append(seconds)
    return times


def timed(run: Callable, device: str) -> float:
    if device == "cpu":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


def cell(label: str, times: dict[str, list[float]], flops: float) -> str:
    median = statistics.median(times[label])
    text = f"{label} {median * 1e3:8.3f} ({flops / median / 1e12:6.2f})"
    if label == "stock":
        return text
    ratios = [a / b for a, b in zip(times[label], times["stock"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{text} {middle:.2f}x [{low:.2f}, {high:.2f}]"


if __name__ == "__main__":
    sys.exit(main())
