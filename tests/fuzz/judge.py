"""Runs a case on any groups, in one process or on a rank of many, and says what was wrong.

In float64 every number is within 1e-10 of the dense oracle; in others it may err as torch's own
operator does on one device, and by what travelling gradients are rounded. Every rank sends the
bytes that its plan announces, in forward and in backward.
"""

import math

import oracle
import torch
import torch.distributed as dist
import torch.nn.functional as F

import megatron_burst as mb
from megatron_burst.plugins.testing import in_process

from .draw import Call, Case

NAMES = ("out", "dq", "dk", "dv")
EXACT = 1e-10
PARTIAL_OUTPUTS = "tile", "token_ring", "auto"  # send outputs, too, in the dtype of the wire


def inputs(call: Call):
    """q, k, v, dout and the sink of the whole sequence, in the dtype of the call."""
    length, b, h, k, d, w = call.shape
    keys = length if call.keys is None else call.keys.length
    generator = torch.Generator().manual_seed(call.seed)
    shapes = (length, b, h, d), (keys, b, k, d), (keys, b, k, w), (length, b, h, w), (h,)
    q, k, v, dout, sink = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(call.dtype)
        for shape in shapes
    )
    return q, k, v, torch.ones_like(dout) if call.ones else dout, sink


def stock(call: Call, q, k, v, dout):
    """out, dq, dk, dv of torch's own operator on one device."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    group = q.shape[2] // k.shape[2]
    first = [leaves[0], *(x.repeat_interleave(group, dim=2) for x in leaves[1:])]
    out = F.scaled_dot_product_attention(
        *(x.permute(1, 2, 0, 3) for x in first),
        attn_mask=torch.from_numpy(call.seen),
        scale=call.choices["softmax_scale"],
    ).permute(2, 0, 1, 3)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


def rounding(call: Call, q, k, v, dout, scale: float) -> list[float]:
    """What one rounding in fp32 of a score, and of what gradients subtract from each other, makes
    of out, dq, dk, dv: without it nothing is allowed where torch's result happens to be exact."""
    q, k, v, dout = (x.double() for x in (q, k, v, dout))
    group = q.shape[2] // k.shape[2]
    wide = [x.repeat_interleave(group, dim=2) for x in (k, v)]
    scores = torch.einsum("sbhd,tbhd->bhst", q, wide[0]).abs().max().item() * scale
    slopes = torch.einsum("sbhw,tbhw->bhst", dout, wide[1]).abs().max().item() * scale
    unit = torch.finfo(torch.float32).eps * (1 + scores)
    largest = [x.abs().max().item() for x in (v, k, q, dout)]
    return [unit * x * y for x, y in zip(largest, (1, slopes, slopes, 1), strict=True)]


def delta_rounding(call: Call, q, k, dout, out, lse, scale: float) -> tuple[float, float]:
    """What dq and dk are off by where delta = rowsum(dout * out), which all slopes of a row are
    reduced by, is off by half a unit of the call's dtype: a kernel gets the output rounded, or one
    made of delta, all of whose products with dout have one sign. torch's error has this in it, but
    not where rows see one key, whose values are their output without rounding."""
    group, kv_heads = q.shape[2] // k.shape[2], k.shape[2]
    q, k = q.double(), k.double().repeat_interleave(group, dim=2)
    off = torch.finfo(call.dtype).eps / 2 * (dout.double() * out).sum(-1).abs()
    scores = torch.einsum("sbhd,tbhd->sbht", q, k) * scale
    weights = (scores - lse.unsqueeze(-1)).exp() * torch.from_numpy(call.seen)[:, None, None]
    weights = weights * scale * off.unsqueeze(-1)
    dq = torch.einsum("sbht,tbhd->sbhd", weights, k.abs())
    dk = torch.einsum("sbht,sbhd->tbhd", weights, q.abs())
    return dq.max().item(), dk.unflatten(2, (kv_heads, group)).sum(3).max().item()


def positions_of(call: Call, which: int) -> list:
    """The positions of each rank's rows in result `which` of out, dq, dk, dv."""
    return call.positions if call.keys is None or which < 2 else call.keys.positions


class Truth:
    """What a call must give, and how far each result may be from it."""

    def __init__(self, call: Call, size: int):
        q, k, v, dout, sink = inputs(call)
        scale, cap = call.choices["softmax_scale"], call.choices["softcap"]
        sink = None if call.sink == "none" else sink
        seen = torch.from_numpy(call.seen)
        out, lse, dq, dk, dv = oracle.attention(q, k, v, dout, seen, scale, cap, sink)
        self.results = out, dq, dk, dv
        self.parts = {}  # dk and dv of the queries of each rank, if ranks do not sum them
        if call.keys is not None and not call.keys.summed:
            for rank, rows in enumerate(call.positions):
                own = q[rows], k, v, dout[rows], seen[rows], scale, cap, sink
                *_, self.parts[2, rank], self.parts[3, rank] = oracle.attention(*own)
        self.dsink = None if sink is None else oracle.sink_gradient(sink, lse, out, dout)
        self.limits = [EXACT] * 4
        if call.dtype != torch.float64:
            scale = scale or q.shape[3] ** -0.5
            rounded = rounding(call, q, k, v, dout, scale)
            for i, more in enumerate(delta_rounding(call, q, k, dout, out, lse, scale), 1):
                rounded[i] += more
            theirs = stock(call, q, k, v, dout)
            unit = torch.finfo(call.dtype).eps
            self.limits = [
                3 * oracle.worst(other, right) + 2 * unit * right.abs().max().item() + more
                for other, right, more in zip(theirs, self.results, rounded, strict=True)
            ]
            assert all(map(math.isfinite, self.limits))  # NaN would pass everything
        wire = call.choices["grad_wire_dtype"]
        if wire is not None:  # each hop rounds a sum, which may be larger than the last one
            unit = torch.finfo(wire).eps
            largest = max(x.abs().max().item() for x in self.results if x.numel())
            for i in range(call.choices["algorithm"] not in PARTIAL_OUTPUTS, 4):
                self.limits[i] += 2 * size * unit * max(1.0, largest)


def strided(x: torch.Tensor, kind: str) -> torch.Tensor:
    """The same numbers, laid out in memory as `kind` says."""
    if kind == "batch first":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if kind == "sliced":
        return x.repeat_interleave(2, dim=-1)[..., ::2]
    if kind == "fused":
        return torch.cat([x, x], dim=2)[:, :, : x.shape[2]]
    return x.clone()


class Run:
    """One case on these groups; `faults` fills as its events go by."""

    def __init__(self, case: Case, groups: mb.Groups, device: str = "cpu"):
        self.case, self.groups, self.device = case, groups, device
        self.local = [rank.rank for rank in getattr(groups, "ranks", [groups])]
        self.many = groups.backend == "in_process"
        self.faults: list[str] = []
        self.messages: list[str] = []
        self.plans, self.flying = {}, {}
        self.truths = {i: Truth(c, groups.size) for i, c in enumerate(case.calls) if not c.refused}

    def go(self):
        for event, index in self.case.events:
            call = self.case.calls[index]
            if call.refused:
                self._refused(call)
            elif event == "forward":
                self._forward(index, call)
            else:
                self._backward(index, call)
        return self

    def _shards(self, call: Call):
        """(q, k, v as leaves by kind and local rank, douts)."""
        *qkv, dout, _ = inputs(call)
        mine = [call.positions[rank] for rank in self.local]
        of_keys = [positions_of(call, 2)[rank] for rank in self.local]
        leaves = [
            [
                strided(x[rows].to(self.device), call.strides).detach().requires_grad_(need)
                for rows in held
            ]
            for x, need, held in zip(qkv, call.needs, (mine, of_keys, of_keys), strict=True)
        ]
        one = torch.ones((), dtype=call.dtype, device=self.device)
        douts = [dout[rows].to(self.device) for rows in mine]
        if call.ones:
            douts = [one.expand_as(x) for x in douts]
        return leaves, douts

    def _given(self, leaves):
        return leaves if self.many else [each[0] for each in leaves]

    def _forward(self, index: int, call: Call):
        leaves, douts = self._shards(call)
        given = self._given(leaves)
        sink = None
        if call.sink != "none":
            sink = inputs(call)[-1].to(self.device).requires_grad_(call.sink == "learnt")
        if call.form == "keywords":
            more = {"groups": self.groups, **call.choices}
        else:
            key = id(call.choices)  # micro-batches share the plan of the first
            if key not in self.plans:
                self.plans[key] = in_process.prepare(
                    *given, groups=self.groups, sink=sink, **call.choices
                )
            more = {"plan": self.plans[key]}
        count = len(self.local)

        def attend(home, q, k, v, sink):
            given = {"plan": home} if "plan" in more else {**more, "groups": home}
            if call.keep is None:
                return mb.attention(q, k, v, sink=sink, **given)
            return mb.checkpoint(
                lambda *qkv: mb.attention(*qkv, sink=sink, **given), q, k, v, keep=call.keep
            )

        before, home = self._sent(), more["plan" if "plan" in more else "groups"]
        q, k, v = leaves
        if self.many:
            outs = in_process.on_ranks(self.groups, attend, home.ranks, q, k, v, [sink] * count)
        else:
            outs = [attend(home, q[0], k[0], v[0], sink)]
        self._judge(index, call, "out", 0, [out.detach() for out in outs])
        self._judge_bytes(index, call, 0, before)
        self.flying[index] = outs, leaves, douts, sink

    def _backward(self, index: int, call: Call):
        outs, leaves, douts, sink = self.flying.pop(index)
        learnt = call.sink == "learnt"
        wanted = [x for each in leaves for x in each if x.requires_grad] + [sink] * learnt
        if not wanted:
            if any(out.requires_grad for out in outs):
                self.faults.append(f"call {index}: a graph that nobody needs")
            return
        before = self._sent()
        grads = torch.autograd.grad(outs, wanted, douts, retain_graph=call.twice)
        self._judge_bytes(index, call, 1, before)
        if call.twice:
            again = torch.autograd.grad(outs, wanted, douts)
            if not all(torch.equal(x, y) for x, y in zip(grads, again, strict=True)):
                self.faults.append(f"call {index}: a second backward gives other bits")
        found = iter(grads)
        for i, need in enumerate(call.needs):
            if need:
                parts = [next(found) for _ in self.local]
                self._judge(index, call, NAMES[i + 1], i + 1, parts)
        if learnt:
            total = next(found).double()
            if not self.many:
                dist.all_reduce(total)
            error = oracle.worst(total.cpu(), self.truths[index].dsink)
            # Of every row, its output: what that is off, all rows' together.
            rows = math.prod(call.shape[:2]) * call.shape[5]
            if not error <= EXACT + rows * (self.truths[index].limits[0] - EXACT):
                self.faults.append(f"call {index}: the sink's gradient is off by {error:.3g}")

    def _judge(self, index: int, call: Call, name: str, which: int, parts):
        truth = self.truths[index]
        for rank, part in zip(self.local, parts, strict=True):
            right = truth.results[which][positions_of(call, which)[rank]]
            right = truth.parts.get((which, rank), right)
            if part.shape != right.shape or part.dtype != call.dtype:
                self.faults.append(f"call {index}: {name} is {part.dtype} {tuple(part.shape)}")
                continue
            error = oracle.worst(part.cpu(), right)
            if not error <= truth.limits[which]:
                self.faults.append(
                    f"call {index}, rank {rank}: {name} is off by {error:.3g}, "
                    f"allowed {truth.limits[which]:.3g}"
                )

    def _sent(self) -> list[tuple[int, int]]:
        """(intra, inter) bytes that each local rank has sent so far."""
        ranks = getattr(self.groups, "ranks", [self.groups])
        return [(rank.counters.intra, rank.counters.inter) for rank in ranks]

    def _judge_bytes(self, index: int, call: Call, way: int, before: list):
        """What was sent since `before` is what the call's plan announces for forward (way 0) or
        backward (1); not where a checkpoint computes again or gradients were foreseen in vain."""
        plan = self.plans.get(id(call.choices)) if call.form == "plan" else None
        if plan is None or call.keep is not None or "needs_grad" in call.choices:
            return
        ranks = zip(self._sent(), before, getattr(plan, "ranks", [plan]), strict=True)
        for (intra, inter), (intra_before, inter_before), one in ranks:
            sent, told = (intra - intra_before, inter - inter_before), one.traffic()[way]
            if sent != (told.intra, told.inter):
                self.faults.append(
                    f"call {index}: {('forward', 'backward')[way]} sent {sent} bytes, its plan "
                    f"says {(told.intra, told.inter)}"
                )

    def _refused(self, call: Call):
        """It must be, by a ValueError with the words, on every rank alike."""
        leaves = self._shards(call)[0]
        # One process passes its keywords once: what differs there by rank are tensors.
        everywhere = call.odd_rank is None or (self.many and not call.tensors)
        for place, rank in enumerate(self.local):
            if everywhere or rank == call.odd_rank:
                for shards in leaves:
                    shards[place] = shards[place].detach()
                spoil(leaves, place, call.tensors)
        mine = everywhere or self.many or call.tensors or self.groups.rank == call.odd_rank
        choices = call.choices if mine else {}
        try:
            in_process.prepare(*self._given(leaves), groups=self.groups, **choices)
        except ValueError as error:
            self.messages.append(str(error))
            if call.refused not in str(error):
                self.faults.append(f"refused without the word {call.refused!r}: {error}")
        else:
            self.faults.append(f"served, though {call.refused} cannot be")


def spoil(leaves, place: int, how: str):
    """Make the tensors of one rank such as `how` says."""
    q, k, v = leaves
    if how == "three dimensions":
        q[place] = q[place][0]
    elif how == "other dtype":
        k[place] = k[place].to(torch.float32 if k[place].dtype != torch.float32 else torch.float64)
    elif how == "other rows":
        v[place] = v[place][:-1]
    elif how == "integers":
        q[place] = q[place].long()
    elif how == "other width":
        k[place] = torch.cat([k[place], k[place]], dim=3)
    elif how == "no tensor":
        v[place] = "no tensor"  # None would mean that values are the keys
