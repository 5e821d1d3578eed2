"""Processor time of the thread that launches attention, compared with a plain ring.

Run it with `make bench-host`.

A GPU that waits for its host computes nothing, and an H100 needs only a quarter of a millisecond
for a pair of 4K rows. So everything except the launches is timed: one rank of a large grid, on
torch's fake process group and meta tensors, with an operator that returns earlier results and a
merge that does nothing. The plain loop (`Plain`) has the same operator, tensors and process group.
It does only the necessary work: buffers for the next keys, one batch of sends and receives of k and
v, one call, one merge, and in backward a second ring for dk and dv. The plain loop is always dense,
so a ratio also includes the overhead of documents or windows.

Processor time of this thread, rounds in turn (A B A B ...), medians with quartiles. Other jobs have
little influence, but numbers of different machines are not comparable.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest import mock
from weakref import ref

import numpy as np
import torch
import torch.distributed as dist
from report import interleaved, markdown, progress, provenance, quartiles, spread
from torch.distributed import _meta_registrations
from torch.testing._internal.distributed.fake_pg import FakeStore

import megatron_burst as mb
from megatron_burst.comm.groups import CallCounter
from megatron_burst.comm.transport import Channel, Counters, ProcessEndpoint
from megatron_burst.execution import function
from megatron_burst.kernels import aten, registry
from megatron_burst.kernels.operators_cuda import CudaFlash
from megatron_burst.schedule.topology import Topology

HEADS, KV_HEADS, WIDTH = 32, 8, 128
ROWS = 4096  # of each rank, unless documents set another number


# --- no device ----------------------------------------------------------------------------------


class NoOperator(CudaFlash):
    """Torch's FlashAttention without the launch: it returns earlier results."""

    device = "meta"

    def __init__(self) -> None:
        self.calls = 0
        like = {"dtype": torch.bfloat16, "device": "meta"}
        self.out = torch.empty(1, HEADS, 1 << 20, WIDTH, **like)
        self.lse = torch.empty(1, HEADS, 1 << 20, dtype=torch.float32, device="meta")

    def forward(self, q, k, v, *_: Any):  # pyright: ignore[reportIncompatibleMethodOverride]
        self.calls += 1
        h, rows = q.shape[1:3]
        return self.out[:, :h, :rows], self.lse[:, :h, :rows]

    def backward(self, dout, q, k, v, *_: Any):  # pyright: ignore[reportIncompatibleMethodOverride]
        self.calls += 1
        h, rows, (_, n, columns, _) = q.shape[1], q.shape[2], k.shape
        out, keys = self.out[:, :h, :rows], self.out[:, :n, :columns]
        return out, keys, keys


class OneRank(mb.Groups):
    """A rank in the middle of a grid without other ranks: it receives its own messages."""

    def __init__(self, group: dist.ProcessGroup, size: int, ulysses: int = 1):
        self.topology, self.rank = (
            Topology(size, min(size, 8), ulysses, "head_first"),
            dist.get_rank(),
        )
        self.backend, self.devices, self.cache, self.calls = "fake", ("meta",), {}, CallCounter()
        self._communicators = SimpleNamespace(used={ref(group)})  # pyright: ignore
        counters, rings = Counters(), ("flat", "intra", "inter", "ulysses", "grid")
        channels: Any = {
            (Channel(ring, gradient), "meta"): group for ring in rings for gradient in (False, True)
        }
        self._place(
            lambda members: ProcessEndpoint(members.index(self.rank), members, channels, counters)
        )

    def gather(self, header: torch.Tensor) -> list[torch.Tensor]:
        return [header] * self.size

    def connect(self, channels: Any, device: torch.device) -> None:
        pass

    def running(self, device: str = "cpu"):
        return super().running("cpu")  # autocast does not know "meta"


# For meta tensors torch runs long Python functions; on a device each of these is one launch.
LAUNCHED = (
    "__eq__", "__iadd__", "add_", "copy_", "fill_", "index_copy_", "index_select", "masked_fill",
    "zero_",
)  # fmt: skip


@contextmanager
def without_launches() -> Iterator[None]:
    """Skip operators and merges, and replace allocations by the plain `torch.empty`."""

    def returned(tensor: torch.Tensor, *_: object) -> torch.Tensor:
        return tensor

    def allocated(
        like: torch.Tensor, shape: torch.Size | None = None, *, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        size = like.shape if shape is None else shape
        return torch.empty(size, dtype=dtype or like.dtype, device=like.device)

    def delta(dout: torch.Tensor, out: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(dout.shape[:-1], dtype=dtype, device=dout.device)

    with ExitStack() as stack:
        for name in LAUNCHED:
            stack.enter_context(mock.patch.object(torch.Tensor, name, returned))
        stack.enter_context(mock.patch.object(torch.Tensor, "new_empty", allocated))
        stack.enter_context(mock.patch.object(torch, "empty_like", allocated))
        stack.enter_context(mock.patch.object(aten, "merge_", returned))
        stack.enter_context(mock.patch.object(function, "row_delta", delta))
        # Row indices are copied to a device that does not exist, so nothing is pinned.
        stack.enter_context(mock.patch.object(torch.Tensor, "pin_memory", returned))
        # torch draws the id of a fake work repeatedly until the id is new.
        fresh = count().__next__
        stack.enter_context(mock.patch.object(_meta_registrations, "generate_unique_id", fresh))
        yield


# --- the plain loops ----------------------------------------------------------------------------


@dataclass
class Plain:
    """A rank of a causal ring on the zigzag layout, written as in a training script."""

    operator: NoOperator
    group: dist.ProcessGroup
    rank: int
    size: int

    def shift(self, *tensors: torch.Tensor) -> tuple[list[torch.Tensor], list[dist.Work]]:
        """Send tensors to the next rank; return receive buffers for the same tensors, and works."""
        arriving, ops = [t.new_empty(t.shape) for t in tensors], []
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        for t, room in zip(tensors, arriving, strict=True):
            ops.append(dist.P2POp(dist.isend, t, after, self.group))
            ops.append(dist.P2POp(dist.irecv, room, before, self.group))
        return arriving, dist.batch_isend_irecv(ops)

    def parts(self, step: int, rows: int) -> tuple[slice, slice, bool]:
        """Return the queries and the keys of a pair, and True if the pair is causal.

        Pairs after the own pair have the first half of the keys, or the second half of the queries.
        """
        if step == 0:
            return slice(0, rows), slice(0, rows), True
        half = rows // 2
        if step <= self.rank:
            return slice(0, rows), slice(0, half), False
        return slice(half, rows), slice(0, rows), False

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
        """Return out [s, b, h, d] and lse [s, b, h]."""
        rows, scale = len(q), q.shape[-1] ** -0.5
        out, lse = (
            torch.empty(shape, dtype=torch.float32, device=q.device).fill_(0.0)
            for shape in (q.shape, q.shape[:-1])
        )
        following, works = [k, v], []
        for step in range(self.size):
            if step + 1 < self.size:
                following, works = self.shift(k, v)
            r, c, causal = self.parts(step, rows)
            part, stats = self.operator.forward(
                *(x.permute(1, 2, 0, 3) for x in (q[r], k[c], v[c])), causal, scale
            )
            aten.merge_(out[r], lse[r], part.permute(2, 0, 1, 3), stats.permute(2, 0, 1))
            for work in works:
                work.wait()
            k, v = following
            works = []
        return out.to(q.dtype), lse

    def backward(self, dout, q, k, v, out, lse):
        """Return dq, dk, dv; gradients of keys are sent one step after the keys."""
        rows, scale = len(q), q.shape[-1] ** -0.5
        dq, dk, dv = (
            torch.empty(x.shape, dtype=torch.float32, device=x.device).zero_() for x in (q, k, v)
        )
        following, works, sums, sent = [k, v], [], [dk, dv], []
        for step in range(self.size):
            if step + 1 < self.size:
                following, works = self.shift(k, v)
            r, c, causal = self.parts(step, rows)
            inputs = dout[r], q[r], k[c], v[c], out[r]
            grads = self.operator.backward(
                *(x.permute(1, 2, 0, 3) for x in inputs), lse[r].permute(1, 2, 0),
                causal, scale,
            )  # fmt: skip
            for work in sent:  # gradients of these keys from the previous rank
                work.wait()
            for total, grad in zip((dq[r], sums[0][c], sums[1][c]), grads, strict=True):
                total += grad.permute(2, 0, 1, 3)
            for work in works:
                work.wait()
            k, v = following
            works = []
            sums, sent = self.shift(*sums)
        for work in sent:
            work.wait()
        return tuple(x.to(q.dtype) for x in (dq, *sums))


class PlainAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plain: Plain, *qkv: torch.Tensor) -> torch.Tensor:
        out, lse = plain.forward(*qkv)
        ctx.plain = plain
        ctx.save_for_backward(*qkv, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, *ctx.plain.backward(dout, *ctx.saved_tensors)


class PlainUlysses(Plain):
    """All heads for all rows and back, by one all-to-all per tensor (DeepSpeed-Ulysses)."""

    def scatter(self, x: torch.Tensor) -> torch.Tensor:
        """Exchange [s, b, n, d] -> [p s, b, n / p, d]."""
        parts = x.unflatten(2, (self.size, -1)).permute(2, 0, 1, 3, 4).contiguous()
        whole = torch.empty_like(parts)
        dist.all_to_all_single(whole, parts, group=self.group)
        return whole.flatten(0, 1)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Exchange [p s, b, n / p, d] -> [s, b, n, d]."""
        whole = torch.empty_like(x)
        dist.all_to_all_single(whole, x, group=self.group)
        return whole.unflatten(0, (self.size, -1)).permute(1, 2, 0, 3, 4).flatten(2, 3)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
        shared = [self.scatter(x).permute(1, 2, 0, 3) for x in (q, k, v)]
        out, lse = self.operator.forward(*shared, True, 1.0)
        return self.gather(out.permute(2, 0, 1, 3).contiguous()), lse

    def backward(self, dout, q, k, v, out, lse):
        shared = [self.scatter(x).permute(1, 2, 0, 3) for x in (dout, q, k, v, out)]
        grads = self.operator.backward(*shared, lse, True, 1.0)
        return tuple(self.gather(x.permute(2, 0, 1, 3).contiguous()) for x in grads)


# --- the cases ----------------------------------------------------------------------------------


@dataclass
class Case:
    """One case: rows per rank, and options of `mb.prepare`."""

    name: str
    size: int
    rows: int = ROWS
    options: dict[str, Any] = field(default_factory=dict)
    ulysses: int = 1


def cases(sizes: list[int]) -> Iterator[Case]:
    for size in sizes:
        window = mb.masks.Causal() & mb.masks.Window(ROWS, 0)
        yield Case("dense", size)
        yield Case("dense, striped", size, options={"layout": "striped"})
        yield Case(f"window of {ROWS}", size, options={"mask": window})
        for number, kind in ((40, "padded"), (100, "padded"), (100, "odd")):
            yield documents(size, number, kind)
        yield documents(size, 100, "odd", "striped")
        yield Case("2 head chunks", size, options={"head_chunks": 2})
        if size <= KV_HEADS:
            yield Case("ulysses", size, options={"algorithm": "ulysses"}, ulysses=size)


def documents(size: int, number: int, kind: str, layout: str = "zigzag") -> Case:
    """Return documents that are padded to 2 x CP, as by Megatron's loader, or odd."""
    rng, multiple = np.random.default_rng(0), 2 * size
    lengths = rng.lognormal(0, 1, number)
    lengths = np.maximum(lengths * ROWS * size / lengths.sum(), 1).astype(int)
    if kind == "padded":
        lengths = -(-lengths // multiple) * multiple
    ends = np.cumsum([0, *lengths])
    ends[-1] += -ends[-1] % multiple
    made: Any = layout
    if kind == "padded":
        made = mb.layout.make(layout, cp_size=size, cu_seqlens=ends)
    options = {"layout": made, "mask": mb.masks.Documents(ends) & mb.masks.Causal()}
    name = f"{number} documents, {kind}" + (f", {layout}" if layout != "zigzag" else "")
    return Case(name, size, int(ends[-1]) // size, options)


class Timed:
    """Runs of a case: ours and the plain loop's, forward and backward, and the plan."""

    def __init__(self, case: Case):
        self.operator: Any = NoOperator()
        kernel = aten.AtenKernel("aten", self.operator)
        group: Any = dist.new_group(list(range(case.size)))
        groups = OneRank(group, case.size, case.ulysses)
        kind = PlainUlysses if case.ulysses > 1 else Plain
        plain = kind(self.operator, group, groups.rank, case.size)
        q, k, v = (
            torch.empty(case.rows, 1, n, WIDTH, dtype=torch.bfloat16, device="meta")
            .requires_grad_()
            for n in (HEADS, KV_HEADS, KV_HEADS)
        )  # fmt: skip
        dout = torch.empty_like(q)
        options = {"algorithm": "ring", "side": "kv", "kernel": "aten", **case.options}

        def prepare() -> Any:
            with mock.patch.dict(registry.KERNELS, {"aten": lambda *_: kernel}):
                return mb.prepare(q, k, v, groups=groups, **options)

        plan = self.plan_ = prepare()
        self.hops, out = case.size - 1 if case.ulysses == 1 else 1, {}

        def forward(name: str, attend: Callable[[], torch.Tensor]) -> Callable[[], None]:
            def run() -> None:
                out[name] = attend()

            return run

        def backward(name: str) -> Callable[[], object]:
            return lambda: torch.autograd.grad(out[name], (q, k, v), dout)

        self.runs: dict[str, Callable[[], Any]] = {
            "ours": forward("ours", lambda: mb.attention(q, k, v, plan=plan, label=0)),
            "ours backward": backward("ours"),
            "plain": forward("plain", lambda: PlainAttention.apply(plain, q, k, v)),
            "plain backward": backward("plain"),
        }
        self.plan = {"plan": prepare}

    def counts(self, name: str) -> tuple[int, int]:
        """Return operator calls and exchanges in one run."""
        before, exchange = self.operator.calls, ProcessEndpoint.exchange
        with mock.patch.object(ProcessEndpoint, "exchange", autospec=True) as counted:
            counted.side_effect = exchange
            self.runs[name]()
        return self.operator.calls - before, counted.call_count


Terms = list[tuple[float, ...]]  # head chunks, calls, exchanges, seconds of a pass
BACKWARD = 2  # time of a backward call / forward call, as in `HostTime`


def row(case: Case, repeats: int, terms: Terms) -> list[str]:
    """Return a row of the table and add its passes to `terms`."""
    timed = Timed(case)
    launched = [timed.counts(name) for name in ("ours", "ours backward")]
    counts = [str(calls) for calls, _ in launched]
    timed.runs["plain"]()
    _, cpu = interleaved(timed.runs, repeats)
    _, plans = interleaved(timed.plan, min(repeats, 5))
    cells = [str(case.size), case.name, "/".join(counts)]
    for suffix in ("", " backward"):
        ours, plain = cpu[f"ours{suffix}"], cpu[f"plain{suffix}"]
        per_hop = [f"{1e6 * quartiles(x)[1] / timed.hops:.0f}" for x in (ours, plain)]
        ratios = [a / b for a, b in zip(ours, plain, strict=True)]
        cells += [f"{1e3 * quartiles(ours)[1]:.2f}", " / ".join(per_hop), spread(ratios)]
    if case.ulysses == 1:
        chunks = case.options.get("head_chunks", 1)
        names = ("ours", "ours backward")
        for (calls, exchanges), times, name in zip(launched, (1, BACKWARD), names, strict=True):
            terms.append((chunks, times * calls, exchanges, quartiles(cpu[name])[1]))
    return [*cells, f"{1e3 * quartiles(plans['plan'])[1]:.1f}"]


def figures(terms: Terms) -> str:
    """Return the figures of `HostTime` for a pass, fitted to all passes by relative error."""
    *counts, took = np.array(terms).T
    fit = np.linalg.lstsq(np.array(counts).T / took[:, None], np.ones(len(took)), rcond=None)[0]
    off = np.abs(fit @ np.array(counts) / took - 1)
    start, call, exchange = 1e6 * fit
    return (
        f"As `HostTime`: call {call:.0f} us, exchange {exchange:.0f} us, start {start:.0f} us, off "
        f"by {np.median(off):.0%} in the median, {off.max():.0%} at most."
    )


WHAT = (
    "Processor time of the launching thread, without what is launched: medians, ratios with "
    "quartiles. The plain loop is the dense one in every row but `ulysses`. Calls: of the "
    "operator, forward/backward."
)
COLUMNS = (
    "ranks", "case", "calls", "forward, ms", "us per hop, ours / plain", "ratio",
    "backward, ms", "us per hop, ours / plain", "ratio", "plan, ms",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--quick", action="store_true", help="seconds, small")
    parser.add_argument("--only", default="", help="cases whose name begins so")
    args = parser.parse_args()
    if args.quick:
        args.ranks, args.repeats = [8], 3
    torch.set_num_threads(1)
    gc.disable()  # as in timeit: a collection would run within a measurement
    world, me = max(args.ranks), min(args.ranks) // 2
    dist.init_process_group("meta:fake,cpu:fake", rank=me, world_size=world, store=FakeStore())
    chosen = [case for case in cases(args.ranks) if case.name.startswith(args.only)]
    with without_launches():
        rows, terms = [], []
        with progress("host", len(chosen)) as step:
            for case in chosen:
                step(f"{case.size} ranks, {case.name}")
                rows.append(row(case, args.repeats, terms))
    print(f"{provenance()} {WHAT}\n\n{markdown(COLUMNS, rows)}")
    if len(terms) > 3:
        print(f"\n{figures(terms)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
