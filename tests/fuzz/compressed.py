"""DeepSeek-V4's layers, window, compressed and selected compressed keys, on grids in one process:
`python -m tests.fuzz compressed`."""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import compressed_layer as layer
import compressed_oracle as dense
import nccl_rules
import oracle
import torch
from compressed_oracle import INDEX, ROWS, SHARED, LayerShape
from workers import Workers

import megatron_burst as mb
from megatron_burst.plugins.testing import in_process
from megatron_burst.schedule.algorithms import ALGORITHMS

from . import rules
from .draw import GRIDS, LOW, STRIDES, Grid
from .judge import EXACT, strided
from .tally import Tally, tried

SIZES = (1, 2, 3, 4, 4, 8)
KEYED = (
    "ring",
    "double_ring",
    "burst",
    "multicast",
    "prefetch",
    "all_gather",
    "two_way",
)  # send keys
NAMES = (*ROWS, *SHARED)


@dataclass(frozen=True)
class CompressedCall:
    """One layer: its tensors come from `seed`. Calls with the same `plans` share their plans."""

    seed: int
    plans: int
    shape: LayerShape
    placed: layer.Placed = field(repr=False)
    documents: bool  # do the masks have any?
    explicit: bool  # does the mask get the numbers of keys?
    dtype: torch.dtype
    ties: bool
    window: dict  # options of the plan for the window
    far: dict  # options of the plan for the compressed keys
    kernel: str
    needs: frozenset
    planned: frozenset  # `needs`, and tensors whose gradients were foreseen in vain
    strides: str
    with_loss: bool
    swapped: bool
    label: str | None
    again: bool  # does a checkpoint compute the layer again?
    twice: bool  # does backward run twice?
    kinds: frozenset = field(repr=False)


@dataclass(frozen=True)
class CompressedCase:
    grid: Grid
    calls: list[CompressedCall]
    events: list[tuple[str, int]]  # ("forward" | "backward", index of a call)


def case(number: int) -> CompressedCase:
    rng = random.Random(f"compressed {number}")
    size = rng.choice(SIZES)
    inter, intra = rng.choice(GRIDS[size])
    ulysses = rng.choice([1, 1, 1, *[n for n in range(2, size + 1) if size % n == 0]])
    grid = Grid(inter, intra, ulysses, rng.choice(["head_first", "context_first"]))
    if not grid.even:
        grid = replace(grid, placement="head_first", ulysses=1)
    calls = [_call(rng, grid, 0)]
    for n in range(rng.choice([0, 0, 1, 2])):
        base = rng.choice(calls)
        if rng.random() < 0.4:  # another micro-batch
            calls.append(replace(base, seed=rng.randrange(1 << 30), label=f"call {n + 1}"))
        else:
            calls.append(_call(rng, grid, n + 1))
    events: list[tuple[str, int]] = []
    todo, flying = [*range(len(calls))], []
    while todo or flying:
        if todo and (not flying or rng.random() < 0.6):
            flying.append(todo.pop(0))
            events.append(("forward", flying[-1]))
        else:
            events.append(("backward", flying.pop(rng.randrange(len(flying)))))
    return CompressedCase(grid, calls, events)


def _call(rng: random.Random, grid: Grid, number: int) -> CompressedCall:
    size = grid.size
    rows = rng.choice([2, 4, 6, 8] if size > 3 else [2, 4, 8, 12, 18, 24])
    kind = rng.choice(["window", "hca", "hca", "csa", "csa", "csa"][: 3 if grid.ulysses > 1 else 6])
    dtype = rng.choice(LOW) if rng.random() < 0.2 else torch.float64
    ties = kind == "csa" and rng.random() < 0.35
    length, ratio = rows * size, rng.choice([1, 2, 4, 4, 8] if ties else [1, 2, 3, 4, 4, 5, 8, 12])
    shape, documents, explicit = _documents(rng, kind, length, ratio, size)
    possible = [1, 1, 1, 2] if grid.ulysses in (1, 2, 4, 8) else [1, 3]  # ranks share them
    key_heads, compressed_heads = rng.choice(possible), rng.choice(possible)
    heads = max(key_heads, compressed_heads) * grid.ulysses * rng.choice([1, 1, 2, 3])
    shape = replace(
        shape, window=rng.choice([0, 1, 3, 8, length]), overlap=rng.random() < 0.5,
        batch=rng.choice([1, 1, 2, 3]), heads=heads, key_heads=key_heads,
        compressed_heads=compressed_heads, width=rng.choice([4, 6, 8]),
        index_heads=rng.choice([1, 2, 3]), index_width=rng.choice([2, 4, 5]),
        top_k=rng.choice([1, 2, 3, 5, shape.keys + 2]), scale=rng.choice([None, 0.3]),
        sink=rng.random() < 0.6,
    )  # fmt: skip
    layout, positions, laid = rules.layout(rng, size, rows)
    key_layout, key_positions, keys_laid = _key_layout(rng, size, shape.keys // size)
    window = _options(rng, grid, key_heads, selected=False)
    far = _options(rng, grid, compressed_heads, selected=kind == "csa")
    needs = frozenset(name for name in NAMES if rng.random() < rng.choice([0.85, 0.85, 0.3]))
    kinds = {
        f"kind {kind}", f"dtype {str(dtype)[6:]}", f"layout {laid}", f"keys {keys_laid}",
        f"window {window['algorithm']}", f"far {far['algorithm']}", f"ratio {ratio}",
    }  # fmt: skip
    return CompressedCall(
        seed=rng.randrange(1 << 30), plans=number, shape=shape,
        placed=layer.Placed(layout, positions, key_layout, key_positions),
        documents=documents, explicit=explicit, dtype=dtype, ties=ties, window=window, far=far,
        kernel=rng.choice(["auto", "aten", "reference"]),
        needs=needs, planned=needs | {*NAMES} if rng.random() < 0.3 else needs,
        strides=rng.choice(STRIDES), with_loss=kind == "csa" and rng.random() < 0.5,
        swapped=rng.random() < 0.3, label=rng.choice([None, f"call {number}"]),
        again=rng.random() < 0.2, twice=rng.random() < 0.15, kinds=frozenset(kinds),
    )  # fmt: skip


def _documents(rng, kind, length, ratio, size):
    """(shape, do its masks have documents, are the numbers of their keys explicit)."""
    documents = rng.random() < 0.65
    inner = [rng.randint(0, length) for _ in range(rng.randint(0, 5))] if documents else []
    bounds = [0, *sorted(inner), length]
    ends = list(dense.keys_of_documents(bounds, ratio))
    explicit = documents and rng.random() < 0.5
    if explicit:  # keys that are padding
        more = 0
        for n in range(1, len(ends)):
            more += rng.choice([0, 0, 1, 2])
            ends[n] += more
    keys = -(-ends[-1] // size) * size + size * rng.choice([0, 0, 1, 2])
    padding = rng.sample(range(len(bounds) - 1), rng.choice([0, 0, 1])) if documents else []
    shape = LayerShape(
        kind, length, keys, ratio, tuple(bounds), tuple(ends), 0, padding=tuple(padding)
    )
    return shape, documents, explicit


def _key_layout(rng, size, rows):
    if rows and rows % 2 == 0:
        return rules.layout(rng, size, rows)
    name = rng.choice(["contiguous", "striped"])
    positions = oracle.permutation(name, size, rows * size)
    return mb.layout.make(name, cp_size=size), positions, f"{name}, odd" if rows else "none"


def _options(rng, grid, key_heads, selected):
    """Options of a plan; `selected`: of one that selections are derived from."""
    names = [*(KEYED if selected else ALGORITHMS), "auto"]
    if not selected:
        names += ["hybrid"] * 3 * (grid.ulysses > 1)
        names += ["ulysses"] * 4 * (grid.ulysses == grid.size)
    options = {
        "algorithm": rng.choice(names), "side": rng.choice(["auto", "kv", "query"]),
        "kernel": rng.choice(["auto", "aten", "reference"]),
    }  # fmt: skip
    if options["algorithm"] == "auto":
        speeds = (rng.choice([1e-3, 1.0, 1e3]) for _ in range(4))
        options["rates"] = mb.Rates(next(speeds), next(speeds), 1e-2 * next(speeds), next(speeds))
    elif key_heads // grid.ulysses > 1 and rng.random() < 0.5:
        options["head_chunks"] = key_heads // grid.ulysses
    return options


def faults(case: CompressedCase) -> list[str]:
    """What is wrong with one case."""
    grid = case.grid
    groups = in_process.groups(
        inter=grid.inter, intra=grid.intra, ulysses=grid.ulysses, placement=grid.placement
    )
    traces = nccl_rules.record(groups)
    found, flying, made = [], {}, {}
    for event, n in case.events:
        call = case.calls[n]
        if event == "backward":
            found += [f"call {n}: {fault}" for fault in _backward(call, *flying.pop(n))]
            continue
        if call.plans not in made:
            masks = layer.masks(call.shape, call.documents, call.explicit)
            made[call.plans] = layer.plans(
                groups, call.shape, call.placed, masks, call.planned, call.dtype, call.window,
                call.far,
            )  # fmt: skip
        flying[n] = _forward(call, groups, made[call.plans])
    for name, communicators in nccl_rules.COMMUNICATORS.items():
        broken = nccl_rules.faults(traces, communicators(groups.topology))
        found += [f"NCCL, communicators {name}: {fault}" for fault in broken]
    return found


def _forward(call: CompressedCall, groups, both):
    """(tensors, shards, outs, losses, ids)."""
    tensors = dense.draw(call.shape, call.seed, call.dtype, call.ties)

    def lay_out(x):
        fused = call.strides == "fused" and x.dim() == 3  # has no heads
        return strided(x, "sliced" if fused else call.strides)

    def of_rank(x, plans):
        return layer.attend(
            call.shape, x, plans, kernel=call.kernel, with_loss=call.with_loss,
            swapped=call.swapped, label=call.label,
        )  # fmt: skip

    shards = layer.split(tensors, call.placed, call.needs, lay_out)
    if call.again:
        results = in_process.checkpoint(groups, of_rank, shards, both, keep=0.0)
    else:
        results = in_process.on_ranks(groups, of_rank, shards, both)
    return tensors, shards, *zip(*results, strict=True)


def _backward(call: CompressedCall, tensors, shards, outs, losses, ids) -> list[str]:
    shape, rows = call.shape, call.placed.positions
    make = torch.Generator().manual_seed(call.seed + 1)
    size = shape.length, shape.batch, shape.heads, shape.width
    dout = torch.randn(size, generator=make).to(call.dtype)
    wide = torch.float64 if call.dtype == torch.float64 else torch.float32
    dloss = torch.randn(size[:2], generator=make).to(wide) if call.with_loss else None
    given, listed = {name: x.double() for name, x in tensors.items()}, None
    if shape.kind == "csa" and call.dtype != torch.float64 and not call.ties:
        listed = layer.joined(ids, rows)[:, :, 0].tolist()
        listed = [[[u for u in some if u >= 0] for some in row] for row in listed]
    doubles = dout.double(), None if dloss is None else dloss.double()
    right = dense.solve(shape, given, *doubles, ids=listed)
    found = _ids(call, ids, right, given, listed)
    if found:
        return found
    limits = _limits(call, tensors, dout, doubles[1], right)
    found += _off("out", layer.joined(outs, rows), right["out"], limits["out"], call.dtype)
    if call.with_loss:
        loss = layer.joined(losses, rows)[:, :, 0]
        found += _off("loss", loss, right["loss"], limits["loss"], wide)
    starts = [x[part] for x in (dout, None if dloss is None else dloss.unsqueeze(-1))
              if x is not None for part in rows]  # fmt: skip
    results = [*outs, *(losses if call.with_loss else [])]
    pairs = [(x, g) for x, g in zip(results, starts, strict=True) if x.requires_grad]
    if pairs:
        results, starts = map(list, zip(*pairs, strict=True))
        for again in range(1 + call.twice):
            torch.autograd.backward(results, starts, retain_graph=again < call.twice)
    return found + _gradients(call, shards, right, limits)


def _limits(call, tensors, dout, dloss, right) -> dict[str, float]:
    """How far results may be off: in float64 by 1e-10; otherwise by four times the error of dense
    operators in this dtype, a few units, and what float32 rounds of terms that cancel."""
    limits = dict.fromkeys(("out", "loss", *NAMES), EXACT)
    if call.dtype == torch.float64:
        return limits
    near = dense.solve(call.shape, tensors, dout, dloss, ids=right["ids"])
    terms = dout.abs().max().item() * tensors["kv"].abs().max().item() ** 2
    terms *= call.shape.width * call.shape.factor * torch.finfo(torch.float32).eps
    unit = torch.finfo(call.dtype).eps
    for name, exact in right.items():
        if name in limits and exact is not None and exact.numel():
            most = max(1.0, exact.abs().max().item())
            limits[name] = 4 * oracle.worst(near[name], exact) + 8 * (unit * most + terms)
    return limits


def _gradients(call, shards, right, limits) -> list[str]:
    found, times = [], 1 + call.twice
    for name, mine in layer.gradients(shards, call.placed).items():
        gradient = right[name] if name in call.needs else None
        if gradient is None:
            if mine is not None and mine.any():
                found.append(f"d {name} is not zero")
        elif mine is None:
            if gradient.any():
                found.append(f"d {name} is missing")
        else:
            limit = times * limits[name]
            found += _off(f"d {name}", mine, times * gradient, limit, call.dtype)
    return found


def _off(name: str, mine, right, limit: float, dtype) -> list[str]:
    if mine.dtype != dtype:
        return [f"{name} is {mine.dtype}"]
    error = oracle.worst(mine, right)
    return [] if error <= limit else [f"{name} is off by {error:.3g}, allowed {limit:.3g}"]


def _ids(call: CompressedCall, ids, right, given, listed) -> list[str]:
    """In float64, and if all numbers are exact, the selection is the best; otherwise no key that
    was left out is better by more than is rounded."""
    shape = call.shape
    if shape.kind != "csa":
        return []
    for rank, rows in enumerate(call.placed.positions):
        wanted = [
            [[some + [-1] * (shape.top_k - len(some))] for some in right["ids"][t]] for t in rows
        ]
        if ids[rank].dtype != torch.int32 or ids[rank].tolist() != wanted:
            return [f"rank {rank}: selected {ids[rank].tolist()}, not {wanted}"]
    if listed is None:
        return []
    seen = dense.sees_compressed(shape)
    parts = (given[f"index_{name}"] for name in ("values", "gates", "bias"))
    keys = dense.compressed_keys(*parts, shape).abs()
    largest = dense.index_scores(given["index_q"].abs(), keys, given["index_weights"].abs())
    slack = 8 * torch.finfo(call.dtype).eps * largest.max().item() if largest.numel() else 0.0
    for t, row in enumerate(listed):
        for b, some in enumerate(row):
            visible = seen[t].nonzero()[:, 0].tolist()
            others, scores = {*visible} - {*some}, right["scores"][t, b]
            if len(some) != min(shape.top_k, len(visible)) or not {*some} <= {*visible}:
                return [f"position {t}: selected {some} of {visible}"]
            if others and scores[[*others]].max() > scores[some].min() + slack:
                return [f"position {t}: selected {some}, scores {scores.tolist()}"]
    return []


def kinds(case: CompressedCase) -> list[str]:
    """What a case counts for in the tally."""
    grid = case.grid
    found = [f"ranks {grid.size}, {grid.ulysses} sharing heads"]
    for call in case.calls:
        shape = call.shape
        found += [*call.kinds, f"strides {call.strides}"]
        found += ["packed"] * (len(shape.bounds) > 2) + ["keys of padding"] * call.explicit
        found += ["documents of padding"] * bool(shape.padding) + ["overlap"] * shape.overlap
        found += ["empty documents"] * any(a == b for a, b, _, _ in shape.documents)
        found += ["documents without keys"] * any(
            b - a < shape.ratio for a, b, *_ in shape.documents
        )
        found += ["sink"] * shape.sink + ["equal scores"] * call.ties + ["loss"] * call.with_loss
        found += ["frozen"] * (len(call.needs) < len(NAMES)) + ["backward twice"] * call.twice
        found += ["gradients in vain"] * (call.planned != call.needs)
        found += ["computed again"] * call.again + ["compressed keys first"] * call.swapped
        found += ["all are selected"] * (shape.kind == "csa" and shape.top_k > shape.keys)
        found += ["index tensors frozen"] * call.needs.isdisjoint(INDEX)
    return [*found, f"calls in flight {len(case.calls)}"]


def search(cases: Iterable[int], _: Callable[[int], Workers] | None = None) -> Tally:
    """Try these cases, until too many have failed."""
    return tried("compressed", cases, case, kinds, faults)
