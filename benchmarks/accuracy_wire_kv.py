"""What 8 bits on the wire for keys and values would cost, in float64: the reason for having none.

Keys and values that are bf16 tensors, as a model has them, are sent in e4m3 with one scale per row
and head, chosen by the sender, and decoded where they arrive; everything else is computed in
float64, so that nothing but this rounding is seen. A format would be taken if its error of `out` is
at most twice that of rounding `out` to bf16, which every call does. Beside it: two halves, keys or
values alone; scales of 32 numbers (as MXFP8 has them); and 8-bit integers, which have more bits for
the largest numbers and fewer for the smallest.

Inputs: standard normal; with outliers (four channels of the keys are large and nearly constant, the
first token draws most queries' attention, values grow along the channels), as language models have
them; smooth (keys and values change little from token to token).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable

import torch
from accuracy import NAMES, Tensors, dense, distance
from report import markdown, progress, provenance

Code = Callable[[torch.Tensor], torch.Tensor]  # what arrives of a tensor [s, b, h, d] of float64
LARGEST = 448.0  # of e4m3


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="seconds, small")
    parser.add_argument("--tokens", type=int, default=1024, help="of the whole sequence")
    parser.add_argument("--width", type=int, default=128, help="of a head")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    if args.quick:
        args.tokens, args.seeds = 128, 1
    torch.set_num_threads(1)
    rows = []
    with progress("wire", len(INPUTS) * args.seeds) as step:
        for kind in INPUTS:
            errors: dict[str, list[list[float]]] = {}
            for seed in range(args.seeds):
                step(f"{kind}, seed {seed}")
                measure(kind, args.tokens, args.width, seed, errors)
            rows += table(kind, errors)
    head = ["inputs", "what is rounded", *(f"rms {name}" for name in NAMES), "out, times bf16's"]
    lines = markdown(head, rows)
    print(
        f"{provenance()}\n\nCausal attention of {args.tokens} tokens, 2:1 heads of width "
        f"{args.width}. Error of each tensor against float64, root mean square over that of the "
        f"exact tensor, in units of 1e-3. Medians over {args.seeds} seeds.\n\n{lines}"
    )
    return 0


def measure(kind: str, tokens: int, width: int, seed: int, errors: dict) -> None:
    """Add the errors of every code on one set of inputs."""
    q, k, v, dout = INPUTS[kind](tokens, width, torch.Generator().manual_seed(seed))
    exact = dense(q, k, v, dout)
    found: dict[str, Tensors] = {"out and gradients, to bf16": tuple(bf16(x) for x in exact)}
    for name, (of_k, of_v) in CODES.items():
        found[name] = dense(q, of_k(k), of_v(v), dout)
    for name, tensors in found.items():
        errors.setdefault(name, []).append(distance(tensors, exact)[:4])


def table(kind: str, errors: dict[str, list[list[float]]]) -> list[list[str]]:
    medians = {
        name: [statistics.median(column) for column in zip(*seeds, strict=True)]
        for name, seeds in errors.items()
    }
    yardstick = next(iter(medians.values()))[0]
    return [
        [kind, name, *(f"{1e3 * x:.2f}" for x in found), f"{found[0] / yardstick:.1f}"]
        for name, found in medians.items()
    ]


# --- codes -----------------------------------------------------------------------------------


def bf16(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16).double()


def e4m3(x: torch.Tensor, block: int | None = None) -> torch.Tensor:
    """One scale for each row and head, or for each `block` numbers of it: a power of two, as MXFP8
    has it."""
    parts = x if block is None else x.unflatten(-1, (-1, block))
    scale = parts.abs().amax(-1, keepdim=True).clamp_min(1e-30) / LARGEST
    if block is not None:
        scale = scale.log2().ceil().exp2()
    decoded = (parts / scale).to(torch.float8_e4m3fn).double() * scale
    return bf16(decoded.reshape(x.shape))


def int8(x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    return bf16((x / scale).round() * scale)


def as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


CODES: dict[str, tuple[Code, Code]] = {
    "k and v, e4m3 per row and head": (e4m3, e4m3),
    "k alone, e4m3": (e4m3, as_it_is),
    "v alone, e4m3": (as_it_is, e4m3),
    "k and v, e4m3 per 32 numbers": (lambda x: e4m3(x, 32), lambda x: e4m3(x, 32)),
    "k and v, int8 per row and head": (int8, int8),
}


# --- inputs: q, k, v, dout [s, 1, heads, width] of float64, rounded to bf16 ---------------------


def normal(tokens: int, width: int, generator: torch.Generator) -> Tensors:
    shapes = [(tokens, 1, heads, width) for heads in (2, 1, 1, 2)]
    return tuple(bf16(torch.randn(s, generator=generator, dtype=torch.float64)) for s in shapes)


def outliers(tokens: int, width: int, generator: torch.Generator) -> Tensors:
    q, k, v, dout = normal(tokens, width, generator)
    loud = torch.randperm(width, generator=generator)[:4]
    k[..., loud] = 20 + k[..., loud]
    sink = torch.randn(width, generator=generator, dtype=torch.float64)
    k[0] = k[0] + sink
    q = q + 0.5 * sink
    v = v * torch.logspace(-1, 1, width, 10, dtype=torch.float64)
    return tuple(map(bf16, (q, k, v, dout)))


def smooth(tokens: int, width: int, generator: torch.Generator) -> Tensors:
    q, k, v, dout = normal(tokens, width, generator)
    for x in (k, v):
        for t in range(1, tokens):
            x[t] = 0.95 * x[t - 1] + (1 - 0.95**2) ** 0.5 * x[t]
    return tuple(map(bf16, (q, k, v, dout)))


INPUTS = {"normal": normal, "outliers": outliers, "smooth": smooth}


if __name__ == "__main__":
    sys.exit(main())
