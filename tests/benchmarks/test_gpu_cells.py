"""benchmarks/gpu, one cell: rivals compute the same mask, and nothing wrong gets a time."""

import types
from itertools import pairwise

import numpy as np
import pytest
import torch

from benchmarks.gpu import attention, packs, ring, rivals, sizes, tables
from benchmarks.gpu.cases import cases
from benchmarks.gpu.clock import Clock
from benchmarks.gpu.sample import TOLERANCE
from megatron_burst.kernels import flash, registry
from megatron_burst.kernels import flash_packages as packages
from megatron_burst.kernels.registry import make

CPU = torch.device("cpu")
TINY = {case.name: case for case in cases(64, 16, 8)}


def dense(case):
    every = np.arange(64)
    return case.visible(every, every)


# --- what is measured ----------------------------------------------------------------------


@pytest.mark.parametrize("name", TINY)
def test_flex_attention_is_told_the_same_mask(name):
    case = TINY[name]
    index = torch.arange(64)
    seen = case.seen(CPU)(index[:, None], index[None, :]) if case.seen else torch.ones(64, 64)
    assert torch.equal(seen.bool().expand(64, 64), dense(case))


@pytest.mark.parametrize("name", [name for name, case in TINY.items() if case.one_call])
def test_stock_operators_are_told_the_same_mask(name):
    """The rectangle of one call, written out by what `OneCall` says of its fields."""
    case = TINY[name]
    rows, columns, triangle, window, bounds = case.one_call
    part = torch.zeros(64, 64, dtype=torch.bool)
    inside = part[rows, columns]
    m, n = torch.arange(inside.shape[0])[:, None], torch.arange(inside.shape[1])[None, :]
    if window:
        inside |= (n <= m) & (m - n < window)
    elif bounds:
        for a, b in pairwise(bounds):
            inside[a:b, a:b] = torch.ones(b - a, b - a).tril().bool()
    else:
        inside |= (n <= m) if triangle else torch.tensor(True)
    assert torch.equal(part, dense(case))


@pytest.mark.parametrize("name", TINY)
def test_pairs_are_those_that_attend(name):
    assert TINY[name].pairs == dense(TINY[name]).sum()


def test_the_block_sparse_mask_is_a_quarter():
    (case,) = (case for case in cases(256, 32, 8) if case.name.startswith("blocks"))
    assert case.name.endswith("25 %")
    assert case.pairs == 256 * 256 // 4


def test_flops_count_two_products_forward_and_five_backward():
    cell = attention.Cell(TINY["causal zigzag, own keys"], (4, 2), 64)
    pairs = 64 * 65 // 2
    assert attention.flops(cell, 16, attention.FORWARD) == 4 * pairs * 4 * 16
    assert attention.flops(cell, 16, attention.KV) == 10 * pairs * 4 * 16


@pytest.mark.parametrize("name", [n for n, case in TINY.items() if case.one_call is not None])
def test_one_call_of_an_operator_is_shown_the_mask(name):
    """By what `TileVisibility` says of its fields, in rows and columns of the call."""
    case, told = TINY[name], []

    class Operator:
        windows = joins = True

        def forward(self, q, k, v, shown, scale):
            told.append((shown, q.shape[2], k.shape[2]))
            return q, None

    x = torch.zeros(64, 1, 1, 1)
    calls = rivals.stock(Operator(), rivals.Inputs(x, x, x, x, 1.0), case)
    calls.forward()
    ((shown, rows, columns),) = told
    i, j = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
    seen = torch.ones(rows, columns, dtype=torch.bool)
    if shown.lengths is not None:
        ends = [bounds[1:] for bounds in shown.lengths.on(CPU)[:2]]
        documents = [
            torch.bucketize(at, end, right=True) for at, end in zip((i, j), ends, strict=True)
        ]
        seen &= documents[0] == documents[1]
    if shown.causal:
        seen &= j <= i
    if shown.window is not None:
        left, right = shown.window
        seen &= (j >= i + columns - rows - left) & (j <= i + columns - rows + right)
    whole = torch.zeros(64, 64, dtype=torch.bool)
    whole[calls.rows, calls.columns] = seen
    assert torch.equal(whole, dense(case))


@pytest.mark.parametrize("name", ["documents, causal", "causal zigzag, first rank, last keys"])
def test_flex_attention_computes_the_case(name, monkeypatch):
    """Forward alone and not compiled: there is no backward on a CPU."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(torch.Tensor, "requires_grad_", lambda tensor: tensor)
    bench = attention.Bench(attention.Cell(TINY[name], (4, 2), 64), 16, Clock(CPU))
    calls = rivals.flex(bench.inputs, bench.case)
    out = calls.read(calls.forward())
    assert bench.sample.forward_error(out, calls.rows) < TOLERANCE
    assert bench.sample.forward_error(out.flip(0), calls.rows) > TOLERANCE


# --- nothing wrong gets a time -------------------------------------------------------------


class Wrong:
    """A kernel whose result is wrong in one place: "out", "dq", "dk", "dv", or "raise"."""

    def __init__(self, kernel, where):
        self.kernel, self.where = kernel, where

    def __getattr__(self, name):
        return getattr(self.kernel, name)

    def forward(self, q, k, v, work, scoring, out, lse, max_logits=None):
        if self.where == "raise":
            raise RuntimeError("an illegal memory access")
        self.kernel.forward(q, k, v, work, scoring, out, lse)
        if self.where == "out":
            out += 0.5

    def backward(self, rows, k, v, work, scoring, *sums):
        self.kernel.backward(rows, k, v, work, scoring, *sums)
        for name, total in zip(("dq", "dk", "dv"), sums, strict=True):
            if name == self.where:
                total *= 1.2


@pytest.mark.parametrize("where", ["out", "dq", "dk", "dv", "raise"])
def test_a_wrong_kernel_fails_and_the_others_are_measured(monkeypatch, where):
    def made(name, *tensors):
        return Wrong(make(name, *tensors), where) if name == "aten" else make(name, *tensors)

    monkeypatch.setattr(attention, "make", made)
    cell = attention.Cell(TINY["documents, causal"], (4, 2), 64)
    record = attention.measure(cell, sizes.CPU, Clock(CPU))
    assert list(record["failed"]) == ["aten"]
    words = {"raise": "RuntimeError: an illegal", "out": "forward is off by"}
    assert words.get(where, "backward is off by") in record["failed"]["aten"]
    assert {run["who"] for run in record["runs"]} == {"flex", "reference"}
    some = {"machine": "a device", "versions": "torch", "commands": [], "left out": []}
    text = tables.markdown({**some, "jobs": {cell.name: record}})
    assert "**Failed**" in text
    assert "| reference" in text


def test_what_a_kernel_refuses_is_told_with_its_reason():
    cell = attention.Cell(TINY["full"], (4, 4), 64)
    record = attention.measure(cell, sizes.CPU, Clock(CPU))
    assert "cuda" in record["refused"]["aten_cudnn"]
    assert set(record["refused"]) == set(registry.KERNELS) - {"aten", "flex", "reference"}
    assert not record["failed"]
    who = {(run["who"], run["pass"]) for run in record["runs"]}
    passes = (attention.FORWARD, attention.KV, attention.QUERY)
    ours = {(name, each) for name in ("aten", "flex", "reference") for each in passes}
    assert who == ours | {("torch flash", each) for each in passes[:2]}


# --- new masks in every step ---------------------------------------------------------------

TWO = sizes.CPU._replace(tokens=(64,))


@pytest.mark.parametrize("kind", packs.KINDS)
def test_programs_are_counted_over_new_masks(kind, monkeypatch):
    monkeypatch.setattr(packs, "NUMBER", 3)
    record = packs.measure(kind, TWO, Clock(CPU))
    assert not record["failed"]
    runs = {run["who"]: run for run in record["runs"]}
    assert set(runs) == {"aten", "flex", "reference"}
    assert all(len(run["seconds"]) == 3 for run in runs.values())
    assert runs["flex"]["programs"] == 2  # one shape, two passes
    assert runs["aten"]["programs"] is None
    some = {"machine": "a device", "versions": "torch", "commands": [], "left out": []}
    text = tables.markdown({**some, "jobs": {kind: record}})
    (row,) = (line for line in text.splitlines() if "| flex" in line)
    assert [cell.strip() for cell in row.split("|")[1:5]] == [kind, "flex", "3", "2"]


def test_programs_of_a_package_are_counted_by_its_caches(monkeypatch):
    """Of both functions; other kernels have none."""
    package = packages.PACKAGES["flash4"]
    functions = [lambda **given: None for _ in range(2)]
    for function, number in zip(functions, (3, 4), strict=True):
        function.compile_cache = types.SimpleNamespace(cache=dict.fromkeys(range(number)))
    both = (packages.FittedFunction(function, {}, {}) for function in functions)
    loaded = packages.FlashFunctions(*both, windows=True, joins=True, deterministic=True)
    for name, number in (("flash4", 7), ("flash3", None)):
        operator = flash.Flash(name, package, loaded)
        assert packs._compilations(flash.FlashKernel(name, operator, CPU)) == number


def test_twenty_different_masks_of_which_each_row_sees_something():
    for kind in packs.KINDS:
        masks = list(packs.masks(kind, 64))
        every = np.arange(packs.RANKS * 64)
        seen = [np.array(mask.visible(every[:, None], every[None, :])) for mask in masks]
        assert len({x.tobytes() for x in seen}) == len(seen) == 20
        assert all(x.diagonal().all() for x in seen)
        assert not any(np.triu(x, 1).any() for x in seen)


@pytest.mark.parametrize("where", ["out", "dk"])
def test_a_kernel_that_keeps_an_old_mask_gets_no_time(where, monkeypatch):
    monkeypatch.setattr(packs, "NUMBER", 2)
    monkeypatch.setattr(
        packs.registry,
        "make",
        lambda name, *x: Wrong(make(name, *x), where) if name == "aten" else make(name, *x),
    )
    record = packs.measure(packs.KINDS[0], TWO, Clock(CPU))
    assert "mask 1 is off by" in record["failed"]["aten"]
    assert {run["who"] for run in record["runs"]} == {"flex", "reference"}


def test_kernels_that_compile_run_in_cells_of_their_own():
    gpu = torch.device("cuda")
    assert set(ring.kernels(gpu, compiled=True)) - set(ring.kernels(gpu)) == {"flex"}
    assert "reference" not in ring.kernels(gpu, compiled=True)


def test_graphs_of_cudnn_are_counted_where_the_operator_knows_them():
    class Operator:
        graphs = frozenset({"one", "other"})

    kernel = registry.make("aten", *(torch.zeros(4, 1, 1, 8) for _ in range(3)))
    assert packs._compilations(kernel) is None
    kernel.operator = Operator()
    assert packs._compilations(kernel) == 2
