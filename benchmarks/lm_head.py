"""The fused LM head beside what else computes it: time, and memory, of forward and backward.

    python benchmarks/lm_head.py time   --dtype float32        # ratios, paired and interleaved
    python benchmarks/lm_head.py tile   --tile-mib 32 64 128   # extra memory against the tile
    python benchmarks/lm_head.py tokens --tokens 8192 65536    # extra memory against the tokens

Every figure comes from a process of its own: inputs are made, a small call warms up, then one call
of forward and backward is measured. Time is wall time and, because other programs may share the
machine, the processor time of this process too; an implementation's ratio is taken to ours of the
same round, medians over rounds with the lowest and highest. Memory is the peak (resident set on
CPU, allocator on CUDA) over what was there before, less the gradients of hidden and weight and a
float32 gradient of the weight (which, for float32, is the same). What cannot run here is listed
with its reason. `--device cuda` also prints the three products alone, the roofline of the op.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from datetime import date

OURS = "single_pass"


def main() -> int:
    args = arguments()
    if args.child:
        print(json.dumps(child(json.loads(args.child))))
        return 0
    print(f"{sys.argv[0].rsplit('/', 1)[-1]} {' '.join(sys.argv[1:])}: {machine(args)}\n")
    results = {"time": times, "tile": tiles, "tokens": tokens}[args.what](args)
    if args.out:
        with open(args.out, "a") as file:
            for result in results:
                file.write(json.dumps(result) + "\n")
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("what", choices=["time", "tile", "tokens"])
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--tokens", type=int, nargs="+", default=[8192])
    add("--width", type=int, default=1024)
    add("--vocabulary", type=int, default=32768)
    add("--dtype", choices=["float32", "bfloat16"], default="float32")
    add("--tile-mib", type=float, nargs="+", default=[])
    add("--threads", type=int, default=1)
    add("--rounds", type=int, default=5)
    add("--limit", type=float, default=3600, help="seconds for one process")
    add("--only", nargs="+", choices=list(IMPLEMENTATIONS), default=list(IMPLEMENTATIONS))
    add("--out", metavar="FILE", help="append every figure there, as JSON lines")
    add("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def machine(args: argparse.Namespace) -> str:
    import torch

    name = torch.cuda.get_device_name() if args.device == "cuda" else cpu_name()
    return f"{name}, {args.threads} threads, torch {torch.__version__}, {date.today()}"


def cpu_name() -> str:
    import torch

    with open("/proc/cpuinfo") as file:
        names = [line.split(":")[1].strip() for line in file if line.startswith("model name")]
    return f"{names[0]} ({torch.backends.cpu.get_cpu_capability()})"


def ask(args: argparse.Namespace, name: str, **changes: object) -> dict:
    """One measurement in a process of its own: {"wall", "cpu", "extra", ...} or {"failed"}."""
    case = {
        "name": name, "device": args.device, "tokens": args.tokens[0], "width": args.width,
        "vocabulary": args.vocabulary, "dtype": args.dtype, "threads": args.threads,
        "tile": None, **changes,
    }  # fmt: skip
    command = [sys.executable, __file__, args.what, "--child", json.dumps(case)]
    quiet = os.environ | {"OMP_NUM_THREADS": str(args.threads), "TORCHDYNAMO_DISABLE": "1"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=args.limit, env=quiet
        )
    except subprocess.TimeoutExpired:
        return case | {"failed": f"took more than {args.limit:.0f} s"}
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        return case | {"failed": lines[-1][:160]}
    return case | json.loads(done.stdout.splitlines()[-1])


def times(args: argparse.Namespace) -> list[dict]:
    results: list[dict] = []
    names = list(args.only)
    for number in range(args.rounds):
        for name in list(names) if number % 2 else list(reversed(names)):
            results.append(ask(args, name) | {"round": number})
            if "failed" in results[-1]:
                names.remove(name)  # it would fail again
    print(f"{args.tokens[0]} tokens x width {args.width} x vocabulary {args.vocabulary}, "
          f"{args.dtype}, {args.rounds} rounds\n")  # fmt: skip
    print("| | wall s | over ours | processor s | over ours | extra MiB |")
    print("|-|-|-|-|-|-|")
    ours = {r["round"]: r for r in results if r["name"] == OURS}
    for name in args.only:
        mine = [r for r in results if r["name"] == name]
        failed = [r["failed"] for r in mine if "failed" in r]
        if failed:
            print(f"| {name} | {failed[0]} | | | | |")
            continue
        cells = []
        for key in ("wall", "cpu"):
            ratios = [r[key] / ours[r["round"]][key] for r in mine]
            spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
            cells.append(f"{statistics.median(r[key] for r in mine):.2f}")
            cells.append(f"{statistics.median(ratios):.3f} ({spread})")
        extra = statistics.median(r["extra"] for r in mine) / 2**20
        print(f"| {name} | {' | '.join(cells)} | {extra:.0f} |")
    return results


def tiles(args: argparse.Namespace) -> list[dict]:
    results = [ask(args, OURS, tile=int(m * 2**20)) for m in args.tile_mib or (32, 64, 128, 256)]
    print("| tile MiB | extra MiB |\n|-|-|")
    for result in results:
        print(f"| {result['tile'] / 2**20:.0f} | {result['extra'] / 2**20:.1f} |")
    print(f"\n{slope([r['tile'] for r in results], [r['extra'] for r in results]):.3f} bytes per "
          "byte of tile (least squares)")  # fmt: skip
    return results


def tokens(args: argparse.Namespace) -> list[dict]:
    counts = args.tokens if len(args.tokens) > 1 else [8192, 16384, 32768, 65536]
    results = [ask(args, OURS, tokens=count) for count in counts]
    print("| tokens | extra MiB |\n|-|-|")
    for result in results:
        print(f"| {result['tokens']} | {result['extra'] / 2**20:.1f} |")
    grows = slope(counts, [r["extra"] for r in results])
    hidden = args.width * results[0]["itemsize"]
    print(f"\n{grows:.1f} bytes per token (least squares); a token's logits would be "
          f"{args.vocabulary * 4} bytes, its hidden state is {hidden}")  # fmt: skip
    return results


def slope(xs: list[float], ys: list[float]) -> float:
    return statistics.linear_regression(xs, ys).slope


# --- in the process that measures ------------------------------------------------------------


def eager(hidden, weight, labels, case):
    import torch.nn.functional as F

    return F.cross_entropy((hidden @ weight.T).float(), labels, reduction="none").sum()


def megatron(hidden, weight, labels, case):
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    one_rank(parallel_state)
    logits = (hidden @ weight.T)[:, None]
    return vocab_parallel_cross_entropy(logits, labels[:, None]).sum()


def megatron_native(hidden, weight, labels, case):
    from megatron.core import parallel_state
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    one_rank(parallel_state)
    logits, group = (hidden @ weight.T)[:, None], parallel_state.get_tensor_model_parallel_group()
    return fused_vocab_parallel_cross_entropy(logits, labels[:, None], group).sum()


def one_rank(parallel_state):
    import torch

    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        parallel_state.initialize_model_parallel()


def torch_chunked(hidden, weight, labels, case):
    import torch
    import torch.nn.functional as F

    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=case.get("chunk"))
    return F.linear_cross_entropy(hidden, weight, labels, reduction="sum", options=options)


def torch_chunked_1024(hidden, weight, labels, case):
    """The same in pieces of as many rows as our tiles have, 1024 at the default size."""
    return torch_chunked(hidden, weight, labels, case | {"chunk": 1024})


def cut_cross_entropy(hidden, weight, labels, case):
    from cut_cross_entropy import linear_cross_entropy

    how = "cce_exact" if hidden.is_cuda else "torch_compile"
    return linear_cross_entropy(hidden, weight, labels, reduction="sum", impl=how)


def liger(hidden, weight, labels, case):
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    return LigerFusedLinearCrossEntropyFunction.apply(
        hidden, weight, labels, None, None, -100, 0.0, 0.0, "sum"
    )[0]


def single_pass(hidden, weight, labels, case, mode="single_pass"):
    import megatron_burst as mb

    return mb.linear_cross_entropy(hidden, weight, labels, tile=case["tile"], mode=mode).sum()


def recompute(hidden, weight, labels, case):
    return single_pass(hidden, weight, labels, case, "recompute")


def three_products(hidden, weight, labels, case):
    """The matrix products alone, on tiles of ours: a bound for the time, not a loss."""
    import torch

    rows = max(1, len(hidden) * len(weight) * hidden.element_size() // 2**30)
    rows = -(-len(hidden) // rows)
    z = hidden.new_empty(rows, len(weight))
    dh, dw = torch.empty_like(hidden), torch.zeros_like(weight)
    for h, grad in zip(hidden.detach().split(rows), dh.split(rows), strict=True):
        part = z[: len(h)]
        torch.mm(h, weight.detach().T, out=part)
        torch.mm(part, weight.detach(), out=grad)
        dw.addmm_(part.T, h)
    return None


IMPLEMENTATIONS = {
    f.__name__: f
    for f in (
        single_pass, recompute, eager, megatron, megatron_native, torch_chunked,
        torch_chunked_1024, cut_cross_entropy, liger, three_products,
    )
}  # fmt: skip


def child(case: dict) -> dict:
    import torch

    torch.set_num_threads(case["threads"])
    run, dtype = IMPLEMENTATIONS[case["name"]], getattr(torch, case["dtype"])
    call(run, *inputs(64, 32, 128, dtype, case["device"]), case)
    leaves = inputs(case["tokens"], case["width"], case["vocabulary"], dtype, case["device"])
    before = peak_reset(case["device"])
    wall, cpu = time.perf_counter(), time.process_time()
    call(run, *leaves, case)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    hidden, weight, _ = leaves
    expected = (hidden.numel() + weight.numel()) * dtype.itemsize
    expected += 0 if dtype == torch.float32 else 4 * weight.numel()
    extra = peak(case["device"]) - before - expected
    return {"wall": wall, "cpu": cpu, "extra": extra, "itemsize": dtype.itemsize}


def inputs(n, d, v, dtype, device):
    import torch

    make = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(n, d, generator=make, device=device, dtype=dtype)
    weight = torch.empty(v, d, device=device, dtype=dtype).normal_(0, 0.02, generator=make)
    labels = torch.randint(0, v, (n,), generator=make, device=device)
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def call(run, hidden, weight, labels, case):
    loss = run(hidden, weight, labels, case)
    if loss is not None:
        loss.backward()
        assert hidden.grad is not None
        assert weight.grad is not None
    if hidden.is_cuda:
        import torch

        torch.cuda.synchronize()


def peak_reset(device: str) -> int:
    """Forget the peak so far; bytes in use now."""
    if device == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return status("VmRSS")


def peak(device: str) -> int:
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    return status("VmHWM")


def status(name: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name))


if __name__ == "__main__":
    sys.exit(main())
