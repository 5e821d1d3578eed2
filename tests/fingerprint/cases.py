"""Random calls as plain data: numbers and names, no objects of the package.

A case is drawn from its kind and number alone, so every version of the package gets the same calls.
"""

import random
from dataclasses import dataclass, field
from typing import Any

COUNTS = {"attention": 140, "linear": 60, "lm_head": 60, "sparse": 40}
DTYPES = ("float64", "float64", "float32", "bfloat16")
GRIDS = ((1, 1), (1, 2), (2, 2), (1, 4), (2, 4), (4, 2))  # nodes, ranks of each
RINGS = (
    "ring", "double_ring", "burst", "all_gather", "two_way", "token_ring", "multicast", "prefetch",
    "tile",
)  # fmt: skip
LAYOUTS = ("contiguous", "zigzag", "striped")
FORMS = ("linear", "scalar_decay", "vector_decay", "delta_rule", "gated_delta_rule", "kda")
OPERATIONS = ("cross_entropy", "cross_entropy", "logprobs", "kl")


@dataclass(frozen=True)
class Case:
    """A call: its tensors follow from `seed` and the sizes."""

    kind: str
    number: int
    seed: int
    dtype: str
    grid: tuple[int, int] = (1, 1)
    ulysses: int = 1
    sizes: dict[str, int] = field(default_factory=dict)
    mask: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)  # arguments of the operation
    choices: dict[str, Any] = field(default_factory=dict)  # what the adapter makes of the call

    @property
    def name(self) -> str:
        return f"{self.kind} {self.number}"


def draw(kind: str, number: int) -> Case:
    """The case of this kind and number."""
    rng = random.Random(f"{kind} {number}")
    seed, dtype = rng.randrange(1 << 30), rng.choice(DTYPES)
    return Case(kind, number, seed, dtype, **DRAWS[kind](rng))


def cases(share: int = 1) -> list[Case]:
    """All cases, or of each kind one of `share`."""
    return [draw(kind, n) for kind, count in COUNTS.items() for n in range(0, count, share)]


def _mask(rng: random.Random, length: int) -> tuple[Any, ...]:
    cuts = sorted(rng.randint(0, length) for _ in range(rng.randint(0, 3)))
    return rng.choice([
        ("causal",), ("causal",), ("full",), ("window", rng.randint(0, length), 0),
        ("causal or prefix", rng.randint(0, length)), ("documents", (0, *cuts, length)),
        ("causal documents", (0, *cuts, length)),
    ])  # fmt: skip


def _attention(rng: random.Random) -> dict[str, Any]:
    grid = rng.choice(GRIDS)
    ranks = grid[0] * grid[1]
    ulysses = rng.choice([1, 1, *(n for n in (2, 4) if grid[1] % n == 0)])
    kv_heads = ulysses * rng.choice([1, 2])
    length = ranks * rng.choice([4, 8, 12])
    algorithm = "hybrid" if ulysses > 1 else rng.choice(RINGS)
    if ulysses == ranks > 1:
        algorithm = "ulysses"
    low, heads = rng.random() < 0.2, kv_heads * rng.choice([1, 2, 3])
    options = {
        "layout": rng.choice(LAYOUTS),
        "algorithm": algorithm,
        "side": rng.choice(["auto", "kv", "query"]),
        "kernel": rng.choice(["aten", "reference"]),
        "softmax_scale": rng.choice([None, 0.3]),
        "head_chunks": rng.choice([None, 1, kv_heads // ulysses]),
    }
    if options["kernel"] == "reference":
        options["softcap"] = rng.choice([None, 2.0])
    if low:
        options["grad_wire_dtype"] = rng.choice(["fp32", "bf16"])
    if rng.random() < 0.2:
        options |= {"sequence_chunks": 2, "row_blocks": rng.choice([1, 2])}
    return {
        "grid": grid,
        "ulysses": ulysses,
        "sizes": {"s": length, "b": rng.choice([1, 2]), "h": heads, "k": kv_heads,
                  "d": rng.choice([4, 8]), "w": rng.choice([4, 8])},
        "mask": _mask(rng, length),
        "options": options,
        "choices": {"sink": rng.random() < 0.2, "planned": rng.random() < 0.5,
                    "keep": rng.choice([None, None, 0.0, 0.5, 1.0])},
    }  # fmt: skip


def _linear(rng: random.Random) -> dict[str, Any]:
    grid, form = rng.choice(GRIDS), rng.choice(FORMS)
    length = grid[0] * grid[1] * rng.choice([4, 8, 20])
    heads = rng.choice([1, 2])
    cuts = sorted({0, length, *(rng.randint(0, length) for _ in range(rng.randint(0, 2)))})
    return {
        "grid": grid,
        "sizes": {"s": length, "b": rng.choice([1, 2]) if len(cuts) == 2 else 1, "g": heads,
                  "h": heads * rng.choice([1, 2]), "d": rng.choice([2, 4]), "w": rng.choice([2, 4]),
                  "documents": len(cuts) - 1},
        "options": {"form": form, "layout": rng.choice(["contiguous", "zigzag"]),
                    "kernel": rng.choice(["torch", "reference"]),
                    "cu_seqlens": tuple(cuts) if len(cuts) > 2 else None,
                    "return_final_state": True},
        "choices": {"initial": rng.random() < 0.5},
    }  # fmt: skip


def _lm_head(rng: random.Random) -> dict[str, Any]:
    operation = rng.choice(OPERATIONS)
    options = {
        "logit_scale": rng.choice([1.0, 0.5]),
        "logit_softcap": rng.choice([None, 3.0]),
        "vocab_size": rng.choice([None, 11]),
        "tile": rng.choice([None, 500]),
    }
    if operation == "cross_entropy":
        options |= {"mode": rng.choice(["single_pass", "recompute"]),
                    "z_loss": rng.choice([0.0, 0.01]),
                    "label_smoothing": rng.choice([0.0, 0.1])}  # fmt: skip
    else:
        options["temperature"] = rng.choice([1.0, 0.7])
    return {
        "sizes": {"n": rng.choice([1, 7, 20]), "d": rng.choice([3, 8]), "v": 16},
        "options": options,
        "choices": {"operation": operation, "masked": rng.random() < 0.5,
                    "tp": rng.choice([1, 1, 2])},
    }  # fmt: skip


def _sparse(rng: random.Random) -> dict[str, Any]:
    grid, rule = rng.choice(GRIDS), rng.choice(["dsa", "dsa", "moba", "qsa", "msa"])
    block = 1 if rule == "dsa" else 2
    length = grid[0] * grid[1] * 2 * block * rng.choice([1, 2, 3])
    keys, group = rng.choice([1, 2]), rng.choice([1, 2])
    index = (rng.choice([1, 2]), 1) if rule in ("dsa", "qsa") else (keys * group, keys)
    return {
        "grid": grid,
        "sizes": {"s": length, "b": rng.choice([1, 2]), "h": keys * group, "k": keys, "d": 4,
                  "w": 3, "i": keys if rule == "msa" else index[0], "n": index[1], "block": block},
        "mask": rng.choice([("causal",), ("full",)]),
        "options": {"layout": rng.choice(["contiguous", "zigzag"]),
                    "algorithm": rng.choice(["ring", "double_ring", "burst", "all_gather"])},
        "choices": {"rule": rule, "top_k": rng.choice([1, 2, 5])},
    }  # fmt: skip


DRAWS = {"attention": _attention, "linear": _linear, "lm_head": _lm_head, "sparse": _sparse}
