"""What a seed stands for: a grid, calls on it, and the order of their forwards and backwards.

A case that nothing was spoilt in must be served; one that was must be refused by a ValueError
that names the argument. Both are said here, by hand, before the package is asked.
"""

import math
import random
from dataclasses import dataclass, field, replace

import numpy as np
import torch

import megatron_burst as mb
from megatron_burst.schedule.algorithms import ALGORITHMS

from . import other_keys, rules

GRIDS = {
    1: [(1, 1)], 2: [(1, 2), (2, 1)], 3: [(1, 3), (3, 1)], 4: [(2, 2), (1, 4), (4, 1)],
    6: [(2, 3), (3, 2), (1, 6), (6, 1)], 8: [(2, 4), (4, 2), (1, 8), (8, 1)],
}  # fmt: skip
RINGS = tuple(ALGORITHMS)
STRIDES = ("plain", "plain", "batch first", "sliced", "fused")
LOW = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Grid:
    inter: int
    intra: int
    ulysses: int
    placement: str

    @property
    def size(self):
        return self.inter * self.intra

    @property
    def even(self):
        """Do the nodes hold equally many ranks of every ring?"""
        p, per_ring = self.ulysses, self.size // self.ulysses
        for first in range(p):
            ring = [
                r * p + first if self.placement == "head_first" else first * per_ring + r
                for r in range(per_ring)
            ]
            nodes = [rank // self.intra for rank in ring]
            if len({nodes.count(node) for node in nodes}) > 1:
                return False
        return True


@dataclass(frozen=True)
class Call:
    """One call of attention, or what it is to be refused for."""

    seed: int  # of its tensors
    shape: tuple[int, int, int, int, int, int]  # S, b, h, k, d, w
    dtype: torch.dtype
    positions: list = field(repr=False)
    seen: np.ndarray = field(repr=False)
    choices: dict
    form: str  # "keywords" or "plan"; calls with the same `choices` share their plan
    needs: tuple[bool, bool, bool]
    sink: str  # "none", "fixed" or "learnt"
    strides: str
    ones: bool  # is the gradient of the result expanded from a one?
    keep: float | None  # of mb.checkpoint around it
    twice: bool  # does backward run twice?
    kinds: frozenset
    refused: str = ""  # the words of the refusal
    tensors: str = ""  # how q, k, v are spoilt
    odd_rank: int | None = None  # the only rank with what is spoilt
    keys: other_keys.Keys | None = None  # None: keys and queries are the same sequence


@dataclass(frozen=True)
class Case:
    grid: Grid
    calls: list[Call]
    events: list[tuple[str, int]]  # ("forward" | "backward", index of a call)


def draw(name: str, size: int) -> Case:
    """The case called `name` on `size` ranks, the same in every process."""
    rng = random.Random(name)
    inter, intra = rng.choice(GRIDS[size])
    ulysses = rng.choice([1, 1, *[n for n in range(2, size + 1) if size % n == 0] * 2])
    grid = Grid(inter, intra, ulysses, rng.choice(["head_first", "context_first"]))
    calls = [_call(rng, grid)]
    for _ in range(rng.choice([0, 0, 1, 2])):
        base = rng.choice(calls)
        if base.form == "plan" and rng.random() < 0.5:
            calls.append(replace(base, seed=rng.randrange(1 << 30)))  # another micro-batch
        elif rng.random() < 0.5:
            calls.append(_sibling(rng, base, grid))
        else:
            calls.append(_call(rng, grid))
    calls = [
        _spoilt(rng, call, grid) if rng.random() < 0.12 and call.keys is None else call
        for call in calls
    ]
    return Case(grid, calls, _events(rng, calls))


def _events(rng, calls):
    """Forwards in their order, each backward somewhere behind its forward."""
    events: list[tuple[str, int]] = []
    flying: list[int] = []
    todo = list(range(len(calls)))
    while todo or flying:
        if todo and (not flying or rng.random() < 0.6):
            events.append(("forward", todo[0]))
            if not calls[todo[0]].refused:
                flying.append(todo[0])
            todo.pop(0)
        else:
            events.append(("backward", flying.pop(rng.randrange(len(flying)))))
    return events


def _heads(rng, ulysses):
    """(query heads, key/value heads) that `head` ranks can share."""
    while True:
        kv = rng.choice([1, 1, 2, 3, 4, 6, 8])
        heads = kv * rng.choice([1, 1, 2, 3, 4])
        if heads <= 16 and heads % ulysses == 0 and (kv % ulysses == 0 or ulysses % kv == 0):
            return heads, kv


def _call(rng: random.Random, grid: Grid) -> Call:
    rows = rng.choice([2, 2, 4, 4, 6, 8, 10] if grid.size > 3 else [2, 4, 6, 8, 12, 18])
    length = rows * grid.size
    keys_rng = random.Random(repr(rng.getstate()))
    low = rng.random() < 0.25
    dtype = rng.choice(LOW) if low else torch.float64
    layout, positions, laid = rules.layout(rng, grid.size, rows)
    mask, seen, kinds = rules.mask(rng, length)
    if low:  # the operator to compare with does not know rows that see nothing
        mask, seen = mask | mb.masks.Window(0, 0), seen | np.eye(length, dtype=bool)
    heads, kv_heads = _heads(rng, grid.ulysses)
    names = [*RINGS, "auto", *["hybrid"] * 3 * (grid.ulysses > 1)]
    names += ["ulysses"] * 4 * (grid.ulysses == grid.size)
    algorithm, side = rng.choice(names), rng.choice(["auto", "kv", "query"])
    softcap = None if low else rng.choice([None] * 4 + [0.7])
    keep = rng.choice([None, None, 0.0, 0.3, 0.5, 1.0])
    mine = max(1, kv_heads // grid.ulysses)
    choices = {
        "layout": layout,
        "mask": mask,
        "algorithm": algorithm,
        "side": side,
        "kernel": "reference" if softcap else rng.choice(["auto", "aten", "reference"]),
        "softcap": softcap,
        "softmax_scale": rng.choice([None, None, 0.05, 1.0]),
        "head_chunks": rng.choice([None, None, *[n for n in range(1, mine + 1) if mine % n == 0]]),
        "grad_wire_dtype": rng.choice([None] * 5 + [torch.float64, torch.float32, torch.bfloat16]),
    }
    if algorithm == "auto":
        speeds = (rng.choice([1e-3, 1.0, 1e3]) for _ in range(4))
        choices["rates"] = mb.Rates(next(speeds), next(speeds), 1e-2 * next(speeds), next(speeds))
    elif choices["head_chunks"] is None and rng.random() < 0.5:
        del choices["head_chunks"]
    apart = random.Random(repr(rng.getstate()))  # what is drawn here leaves the rest as it was
    if apart.random() < 0.4:
        choices["sequence_chunks"] = apart.choice([2, 3, rows + 1])
        choices["row_blocks"] = apart.choice([1, 1, 2])
    keys, of_keys = None, frozenset()
    if keys_rng.random() < other_keys.SHARE:
        keys, key_layout, key_laid = other_keys.draw(keys_rng, grid.size, length)
        mask, seen, kinds = other_keys.mask(keys_rng, length, keys.length)
        if low and keys.length:
            mask, seen = mask | mb.masks.Prefix(1), seen | (np.arange(keys.length) < 1)
        elif low:
            dtype, low = torch.float64, False
        choices |= {"key_layout": key_layout, "mask": mask}
        of_keys = frozenset({"keys of another sequence", f"keys {key_laid}"})
    form = rng.choice(["plan", "keywords"])
    if form == "plan" and keep is not None:
        choices["store"] = keep
    needs = tuple(rng.random() < 0.85 for _ in "qkv")
    if form == "plan" and rng.random() < 0.3:
        choices["needs_grad"] = tuple(need or rng.random() < 0.5 for need in needs)
    return Call(
        seed=rng.randrange(1 << 30),
        shape=(length, rng.choice([1, 1, 2, 3]), heads, kv_heads,
               *rng.choice([(4, 4), (8, 8), (5, 3), (3, 6), (16, 8)])),
        dtype=dtype, positions=positions, seen=seen, choices=choices, form=form, needs=needs,
        sink="none" if low else rng.choice(["none", "none", "fixed", "learnt"]),
        strides=rng.choice(STRIDES), ones=rng.random() < 0.2, keep=keep,
        twice=rng.random() < 0.15,
        kinds=frozenset({f"algorithm {algorithm}", f"layout {laid}", f"side {side}",
                         f"dtype {str(dtype)[6:]}", *(f"mask {kind}" for kind in kinds)})
        | of_keys,
        keys=keys,
    )  # fmt: skip


def _sibling(rng: random.Random, base: Call, grid: Grid) -> Call:
    """A call that differs in one thing only: nothing kept for the other may serve it."""
    layout, positions, laid = rules.layout(rng, grid.size, base.shape[0] // grid.size)
    kinds = {kind for kind in base.kinds if not kind.startswith("layout")} | {f"layout {laid}"}
    change, more = rng.choice([
        ({"layout": layout}, {"positions": positions, "kinds": frozenset(kinds)}),
        ({"softmax_scale": rng.choice([0.3, 0.9])}, {}),
    ])  # fmt: skip
    return replace(base, seed=rng.randrange(1 << 30), choices=base.choices | change, **more)


# --- what must be refused -------------------------------------------------------------------


def _spoilt(rng: random.Random, call: Call, grid: Grid) -> Call:
    """The call with one thing wrong, on all ranks or on one of them."""
    length, _, _, kv_heads, _, _ = call.shape
    mine = max(1, kv_heads // grid.ulysses)
    documents = mb.masks.Documents([0, length + 1])
    auto = call.choices["algorithm"] == "auto"
    options = [
        ("head_chunks", {"head_chunks": mine + 1}),
        ("algorithm", {"algorithm": "rings"}),
        ("side", {"side": "keys"}),
        ("kernel", {"kernel": "flash9"}),
        ("layout", {"layout": mb.layout.make("zigzag", cp_size=grid.size + 1)}),
        ("layout", {"layout": "zig"}),
        ("layout", {"layout": "balanced"}),
        ("seq_len", {"layout": mb.layout.make("zigzag", cp_size=grid.size,
                     cu_seqlens=[0, length + 2 * grid.size])}),
        ("cu_seqlens", {"mask": call.choices["mask"] & documents}),
        ("table", {"mask": mb.masks.Dense(np.ones((length + 1,) * 2)) | mb.masks.Causal()}),
        ("table", {"mask": mb.masks.BlockSparse(np.ones((2, 2)), length)}),
        ("mask", {"mask": call.seen}),
        ("softmax_scale", {"softmax_scale": rng.choice([0, -1.0, math.nan, math.inf, "1"])}),
        ("softcap", {"softcap": 0.0}),
        ("softcap", {"softcap": 0.5, "kernel": "aten"}),
        ("store", {"store": rng.choice([-0.1, 1.5, "half"])}),
        ("grad_wire_dtype", {"grad_wire_dtype": torch.int32}),
        ("needs_grad", {"needs_grad": True}),
        ("rates", {"rates": 3}),
        ("sink", {"sink": torch.zeros(call.shape[2] + 1)}),
    ]  # fmt: skip
    if not auto:
        options.append(("rates", {"rates": mb.Rates(1.0, 1.0)}))
    if grid.ulysses != grid.size:
        options.append(("ulysses", {"algorithm": "ulysses", "rates": None}))
    if grid.ulysses == 1 < grid.size:
        options.append(("hybrid", {"algorithm": "hybrid", "rates": None}))
    tensors = {
        "three dimensions": "q must be [s, b, heads, width]",
        "other dtype": "k: q, k, v must have the same device",
        "other rows": "q, k, v must have the same b, and k, v the same s",
        "integers": "q: q, k, v must have the same device",
        "other width": "k: width must be equal to the width of q",
        "no tensor": "v must be a tensor",
    }
    kind = rng.choice([None, *tensors]) if rng.random() < 0.5 else None
    words, more = ("", {}) if kind else rng.choice(options)
    if kind:
        words = tensors[kind]
    return replace(
        call, form="prepare", choices=call.choices | more, refused=words, tensors=kind or "",
        odd_rank=rng.choice([None, rng.randrange(grid.size)]), keep=None,
    )  # fmt: skip
