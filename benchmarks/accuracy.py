"""Error of distributed attention, of torch's operator and of a 16-bit ring against float64.

Causal attention of 16-bit inputs over 2 to 16 ranks (all in this process, layout zigzag): out, dq,
dk and dv against dense float64 attention of the same inputs. The benchmark compares our ring with
gradients on the wire in fp32 and in 16 bits, on both sides; torch's own operator on one device; and
a ring that adds in 16 bits from hop to hop, as in Transformer Engine. That ring is emulated
(`accuracy_emulated`); the library does not run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from accuracy_emulated import emulated
from report import markdown, progress, provenance

import megatron_burst as mb
from megatron_burst.plugins.testing import in_process

NAMES = ("out", "dq", "dk", "dv")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
Tensors = tuple[torch.Tensor, ...]  # q, k, v, dout or out, dq, dk, dv: [s, b, h, d]
Case = tuple[str, str, str, int]  # dtype, heads, variant, ranks (0: any number)
Errors = dict[Case, list[list[float]]]  # one row per seed: 4 relative RMS, 4 largest errors
STOCK, EMULATED = "one device", "emulated 16-bit ring"


def main() -> int:
    args = arguments()
    torch.set_num_threads(1)
    errors: Errors = {}
    heads = args.heads.split(",")
    with progress("accuracy", len(args.dtypes) * len(heads) * args.seeds) as step:
        for dtype in args.dtypes:
            for ratio in heads:
                for seed in range(args.seeds):
                    step(f"{dtype}, {ratio} heads, seed {seed}")
                    measure(args, dtype, ratio, seed, errors)
    text = f"{provenance()}\n\n{describe(args)}\n\n{tables(errors)}"
    print(text)
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="seconds, small")
    parser.add_argument("--tokens", type=int, default=2048, help="of the whole sequence")
    parser.add_argument("--width", type=int, default=64, help="of a head")
    parser.add_argument("--heads", default="2:2,4:1", help="query:kv heads, comma separated")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--dtypes", nargs="+", default=["bf16"], choices=list(DTYPES))
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    if args.quick:
        args.tokens, args.heads, args.ranks = 128, "2:1", [2, 4]
        args.dtypes, args.seeds = ["bf16"], 2
    return args


def measure(args: argparse.Namespace, dtype: str, ratio: str, seed: int, errors: Errors) -> None:
    """Add the errors of every variant on one set of inputs."""
    generator = torch.Generator().manual_seed(seed)
    heads, kv_heads = map(int, ratio.split(":"))
    q, k, v, dout = (
        torch.randn((args.tokens, 1, n, args.width), generator=generator).to(DTYPES[dtype])
        for n in (heads, kv_heads, kv_heads, heads)
    )
    inputs = (q, k, v, dout)
    exact = dense(*inputs)

    def add(variant: str, ranks: int, got: Tensors) -> None:
        errors.setdefault((dtype, ratio, variant, ranks), []).append(distance(got, exact))

    add(STOCK, 0, stock(*inputs))
    for ranks in args.ranks:
        for name, run in variants(DTYPES[dtype], dtype).items():
            add(name, ranks, run(ranks, *inputs))


def variants(dtype: torch.dtype, name: str) -> dict[str, Callable[..., Tensors]]:
    ours = {
        f"{wire} wire, side {side}": partial(ring, side, wire_dtype)
        for wire, wire_dtype in (("fp32", torch.float32), (name, dtype))
        for side in ("kv", "query")
    }
    return {**ours, EMULATED: emulated}


def distance(got: Tensors, exact: Tensors) -> list[float]:
    """Return RMS error / RMS of each tensor, then largest error / largest entry of each tensor."""
    pairs = [(a.double() - b, b) for a, b in zip(got, exact, strict=True)]
    rms = [(e.norm() / b.norm()).item() for e, b in pairs]
    return rms + [(e.abs().max() / b.abs().max()).item() for e, b in pairs]


# --- what is compared ------------------------------------------------------------------------


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> Tensors:
    """Return out, dq, dk, dv in float64 by the definition, one key head at a time."""
    group = q.shape[2] // k.shape[2]
    hidden = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    results: list[Tensors] = []
    for head in range(k.shape[2]):
        q_heads = slice(head * group, (head + 1) * group)
        parts = (q[:, 0, q_heads], k[:, 0, head], v[:, 0, head])
        a, b, c = (x.double().requires_grad_() for x in parts)
        scores = torch.einsum("shd,td->hst", a, b) * q.shape[-1] ** -0.5
        out = torch.einsum("hst,td->shd", scores.masked_fill(hidden, float("-inf")).softmax(-1), c)
        grads = torch.autograd.grad(out, (a, b, c), dout[:, 0, q_heads].double())
        results.append((out.detach(), *grads))
    out, dq, dk, dv = zip(*results, strict=True)
    return (
        *(torch.cat(x, 1).unsqueeze(1) for x in (out, dq)),
        *(torch.stack(x, 1).unsqueeze(1) for x in (dk, dv)),
    )


def stock(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> Tensors:
    """Return torch's scaled_dot_product_attention on the whole sequence, in the inputs' dtype."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    a, b, c = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    out = F.scaled_dot_product_attention(a, b, c, is_causal=True, enable_gqa=True)
    out = out.permute(2, 0, 1, 3)
    return (out.detach(), *torch.autograd.grad(out, (q, k, v), dout))


def ring(
    side: str,
    wire: torch.dtype,
    ranks: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
) -> Tensors:
    """Return our attention over `ranks` ranks in this process; four or more form two nodes."""
    nodes = 2 if ranks > 2 else 1
    groups = in_process.groups(inter=nodes, intra=ranks // nodes)
    layout = mb.layout.make("zigzag", cp_size=ranks)
    shards = [
        [mb.shard(x, layout, rank).requires_grad_() for rank in range(ranks)] for x in (q, k, v)
    ]
    outs = in_process.attention(
        *shards, groups=groups, side=side, kernel="aten", grad_wire_dtype=wire
    )
    torch.autograd.backward(outs, [mb.shard(dout, layout, rank) for rank in range(ranks)])
    parts = [[out.detach() for out in outs], *([t.grad for t in shard] for shard in shards)]
    return tuple(mb.unshard(part, layout) for part in parts)


# --- what is written -------------------------------------------------------------------------


def describe(args: argparse.Namespace) -> str:
    return (
        f"Causal attention of {args.tokens} tokens, width {args.width}, standard normal q, k, v "
        f"and dout; layout zigzag, algorithm burst (two nodes from 4 ranks on), kernel aten. "
        f"Error of each tensor against dense float64: root mean square over that of the exact "
        f"tensor, and largest error over the largest exact value, both in units of 1e-3. Medians "
        f"over {args.seeds} seeds; *spread* is the widest (largest - smallest) / median of the "
        f"four tensors. The emulated ring adds 16-bit results of each step with 16-bit additions "
        f"in the order of TransformerEngine's p2p; it is an emulation, no run of that library."
    )


def tables(errors: Errors) -> str:
    groups = dict.fromkeys((dtype, heads) for dtype, heads, _, _ in errors)
    return "\n\n".join(f"**{d}, {h} heads**\n\n{table(errors, d, h)}" for d, h in groups)


def table(errors: Errors, dtype: str, heads: str) -> str:
    columns = ["", "ranks", *(f"rms {n}" for n in NAMES), "spread", *(f"max {n}" for n in NAMES)]
    rows = []
    for (a, b, variant, ranks), seeds in errors.items():
        if (a, b) == (dtype, heads):
            medians = [statistics.median(column) for column in zip(*seeds, strict=True)]
            cells = [f"{1e3 * m:.2f}" for m in medians]
            widths = [(max(c) - min(c)) / statistics.median(c) for c in zip(*seeds, strict=True)]
            cells.insert(4, f"{max(widths[:4]):.1%}")
            cells.append(f"{max(widths[4:]):.0%}")
            rows.append([variant, str(ranks or "any"), *cells])
    return markdown([*columns, "spread"], rows)


if __name__ == "__main__":
    sys.exit(main())
