"""Wrong uses of everything around a call: (name, call, words of the message[, error])."""

import copy
import pickle

import torch

import megatron_burst as mb
from megatron_burst import masks
from megatron_burst.plugins.testing import in_process

from .wrong_calls import INF, grid, layout, rates, tensors


def choose(**changed):
    given = {"ranks": 4, "intra": 2, "rates": rates(), "tokens": 8, "heads": 4, "width": 8}
    return mb.choose(**given | changed)


def checkpoint_of_something_else():
    """A function that does not do the same the second time."""
    groups, times = mb.Groups.single(), []
    q, k, v = (x.requires_grad_() for x in tensors())

    def layer(q):
        times.append(1)
        mask = masks.Full() if len(times) > 1 else masks.Causal()
        return mb.attention(q, k, v, groups=groups, mask=mask)

    mb.checkpoint(layer, q).sum().backward()


def shard(**changed):
    given = {"x": torch.zeros(8, 2), "layout": mb.layout.make("zigzag", cp_size=2), "rank": 0}
    return mb.shard(**given | changed)


def unshard(parts, layout=None, **more):
    return mb.unshard(parts, layout or mb.layout.make("zigzag", cp_size=2), **more)


GROUPS = [
    ("intra 0", lambda: grid(intra=0), ("intra", "0")),
    ("intra negative", lambda: grid(inter=2, intra=-2), ("intra", "-2")),
    ("intra float", lambda: grid(intra=2.0), ("intra", "integer", "2.0")),
    ("intra bool", lambda: grid(intra=True), ("intra", "integer", "True")),
    ("intra text", lambda: grid(intra="2"), ("intra", "integer", "'2'")),
    ("intra None", lambda: grid(intra=None), ("intra", "integer", "None")),
    ("inter 0", lambda: grid(inter=0), ("inter", "0")),
    ("inter float", lambda: grid(inter=2.0), ("inter", "integer", "2.0")),
    ("inter bool", lambda: grid(inter=True), ("inter", "integer", "True")),
    ("inter negative", lambda: grid(inter=-1), ("inter", "-1")),
    ("both negative", lambda: grid(inter=-2, intra=-2), ("-2",)),
    ("head 0", lambda: grid(ulysses=0), ("ulysses", "0")),
    ("head 3 of 4", lambda: grid(intra=4, ulysses=3), ("ulysses", "3", "4", "use 1, 2 or 4")),
    ("head float", lambda: grid(ulysses=2.0), ("ulysses", "integer", "2.0")),
    ("head bool", lambda: grid(ulysses=True), ("ulysses", "integer", "True")),
    ("head None", lambda: grid(ulysses=None), ("ulysses", "integer", "None")),
    ("placement", lambda: grid(placement="heads"), ("placement", "head_first", "'heads'")),
    ("placement None", lambda: grid(placement=None), ("placement", "head_first", "None")),
    ("uneven rings", lambda: grid(inter=3, ulysses=2, placement="context_first"),
     ("placement", "ulysses=2", "use")),
    ("no intra", lambda: in_process.groups(), ("intra",), TypeError),
    ("flat of None", lambda: mb.Groups.flat(None), ("group", "None")),
    ("topology of a list", lambda: mb.Groups.from_topology([0, 1], intra=1), ("group", "[0, 1]")),
    ("hosts of None", lambda: mb.Groups.by_host(None), ("group", "None")),
    ("groups of None", lambda: mb.Groups(intra=None, inter=None), ("intra", "None")),
    ("a copy", lambda: copy.deepcopy(grid()), ("mb.Groups", "copied"), TypeError),
    ("a pickle", lambda: pickle.dumps(grid()), ("mb.Groups", "pickled"), TypeError),
]  # fmt: skip

LAYOUTS = [
    ("name", lambda: layout("zig"), ("layout", "zigzag", "'zig'")),
    ("name None", lambda: layout(None), ("layout", "zigzag", "None")),
    ("name unhashable", lambda: layout(["zigzag"]), ("layout", "zigzag")),
    ("no cp_size", lambda: mb.layout.make("zigzag"), ("cp_size",), TypeError),
    ("cp_size 0", lambda: layout(cp_size=0), ("cp_size", "0")),
    ("cp_size float", lambda: layout(cp_size=2.0), ("cp_size", "integer", "2.0")),
    ("cp_size bool", lambda: layout(cp_size=True), ("cp_size", "integer", "True")),
    ("block of zigzag", lambda: layout(block=4), ("block", "block_striped", "zigzag")),
    ("no block", lambda: layout("block_striped"), ("block", "block_striped")),
    ("block 3 on 2 ranks", lambda: layout("block_striped", block=3), ("block=3", "use 4")),
    ("block 0", lambda: layout("block_striped", block=0), ("block=0", "use 2")),
    ("documents in stripes", lambda: layout("striped", cu_seqlens=[0, 8]),
     ("cu_seqlens", "zigzag")),
    ("documents too short", lambda: layout(cu_seqlens=[0, 3, 8]), ("multiples of 4", "striped")),
    ("documents from 1", lambda: layout(cu_seqlens=[1, 8]), ("cu_seqlens", "start at 0")),
    ("documents that decrease", lambda: layout(cu_seqlens=[0, 8, 4]), ("cu_seqlens", "decrease")),
    ("a number of documents", lambda: layout(cu_seqlens=8), ("cu_seqlens", "8")),
    ("no documents", lambda: layout(cu_seqlens=[]), ("cu_seqlens", "[]")),
    ("empty documents", lambda: layout(cu_seqlens=[0, 0]), ("cu_seqlens", "empty")),
    ("documents in fractions", lambda: layout(cu_seqlens=[0, 4.5]), ("cu_seqlens", "integers")),
    ("block float", lambda: layout("block_striped", block=4.0), ("block", "integer", "4.0")),
    ("rank behind the last", lambda: layout().positions(2, 8), ("rank", "0..1", "2")),
    ("rank negative", lambda: layout("striped").positions(-1, 8), ("rank", "0..1", "-1")),
    ("rank float", lambda: layout().spans(1.5, 8), ("rank", "integer", "1.5")),
    ("rank text", lambda: layout().spans("0", 8), ("rank", "integer", "'0'")),
    ("odd length", lambda: layout().positions(0, 6), ("seq_len", "4", "6", "pad to 8")),
    ("odd length in stripes", lambda: layout("striped", cp_size=3).positions(0, 10),
     ("layout striped over 3 ranks", "positive multiple of 3", "got 10; pad to 12")),
    ("short length in one piece", lambda: layout("contiguous", cp_size=4).positions(0, 2),
     ("layout contiguous over 4 ranks", "positive multiple of 4", "got 2; pad to 4")),
    ("no length", lambda: layout(cp_size=4).positions(0, 0), ("multiple of 8, got 0; pad to 8",)),
    ("length float", lambda: layout().spans(0, 8.0), ("seq_len", "integer", "8.0")),
    ("shard of a name", lambda: shard(layout="zigzag"), ("layout", "mb.layout.make", "'zigzag'")),
    ("shard of no such rank", lambda: shard(rank=2), ("rank", "0..1", "2")),
    ("shard of rank None", lambda: shard(rank=None), ("rank", "None")),
    ("shard of odd length", lambda: shard(x=torch.zeros(6)), ("seq_len", "6", "pad to 8")),
    ("shard along no dimension", lambda: shard(dim=3), ("dim", "3")),
    ("shard of a list", lambda: shard(x=[0, 1, 2, 3]), ("x", "tensor")),
    ("unshard of too few", lambda: unshard([torch.zeros(4)]), ("parts", "2", "1")),
    ("unshard of unequal parts", lambda: unshard([torch.zeros(4), torch.zeros(8)]),
     ("parts", "[4, 8]")),
    ("unshard of one tensor", lambda: unshard(torch.zeros(2, 4).unbind()[0]), ("parts",)),
    ("unshard of numbers", lambda: unshard([1, 2]), ("parts", "tensor")),
    ("unshard by name", lambda: unshard([torch.zeros(4)] * 2, "zigzag"), ("layout", "mb.layout")),
]  # fmt: skip

OTHERS = [
    ("keep percent", lambda: mb.checkpoint(lambda x: x, torch.zeros(1), keep=50), ("keep", "50")),
    ("keep text", lambda: mb.checkpoint(lambda x: x, torch.zeros(1), keep="all"),
     ("keep", "'all'")),
    ("keep bool", lambda: mb.checkpoint(lambda x: x, torch.zeros(1), keep=True), ("keep", "True")),
    ("checkpoint of nothing callable", lambda: mb.checkpoint(3, torch.zeros(1)),
     ("callable",), TypeError),
    ("checkpoint of another call", checkpoint_of_something_else, ("checkpoint", "same")),
    ("choose no rates", lambda: choose(rates=None), ("rates", "mb.Rates", "None")),
    ("choose without compute", lambda: choose(rates=rates(compute=None)),
     ("rates", "compute", "mb.measure_rates")),
    ("choose itemsize text", lambda: choose(itemsize="2"), ("itemsize", "integer", "'2'")),
    ("choose with rates that are next to nothing",
     lambda: choose(rates=mb.Rates(1e-320, 1e-320, compute=1e-320)),
     ("too small for calls of this size",)),
    ("choose tokens 0", lambda: choose(tokens=0), ("tokens", "positive", "0")),
    ("choose heads bool", lambda: choose(heads=True), ("heads", "integer", "True")),
    ("choose kv_heads", lambda: choose(kv_heads=3), ("kv_heads", "4", "3")),
    ("choose width float", lambda: choose(width=8.0), ("width", "integer", "8.0")),
    ("choose ranks 0", lambda: choose(ranks=0), ("ranks", "0")),
    ("choose ranks float", lambda: choose(ranks=4.0), ("ranks", "integer", "4.0")),
    ("choose intra 3 of 4", lambda: choose(intra=3), ("intra", "4", "3", "use 1, 2 or 4")),
    ("choose layout", lambda: choose(layout="zig"), ("layout", "'zig'")),
    ("choose layout of 2", lambda: choose(layout=layout()), ("layout", "4")),
    ("choose mask", lambda: choose(mask="causal"), ("mask", "'causal'")),
    ("choose odd tokens", lambda: choose(tokens=7), ("7", "pad")),
    ("choose misspelt", lambda: choose(ulysses=4), ("ulysses",), TypeError),
    ("rates negative", lambda: rates(intra=-1.0), ("rates", "intra", "-1.0")),
    ("rates 0", lambda: rates(inter=0), ("rates", "inter", "0")),
    ("rates text", lambda: rates(compute="fast"), ("rates", "compute", "'fast'")),
    ("rates latency", lambda: rates(latency=-1e-6), ("rates", "latency", "-1e-06")),
    ("rates nan", lambda: rates(intra=float("nan")), ("rates", "intra", "nan")),
    ("rates launch", lambda: rates(launch=INF), ("rates", "launch", ">= 0", "inf")),
    ("rates nic", lambda: rates(nic=0), ("rates", "nic", "positive", "0")),
    ("rates endless nic", lambda: rates(nic=INF), ("rates", "nic", "finite", "inf")),
    ("rates copying", lambda: rates(copying=-1.0), ("rates", "copying", "positive", "-1.0")),
    ("rates start", lambda: rates(start=-1.0), ("rates", "start", ">= 0", "-1.0")),
    ("rates handling", lambda: rates(handling=-1.0), ("rates", "handling", ">= 0", "-1.0")),
    ("rates slowdown", lambda: rates(slowdown=INF), ("rates", "slowdown", "fraction", "inf")),
    ("rates exchange", lambda: rates(exchange=INF), ("rates", "exchange", "finite", "inf")),
    ("rates backward", lambda: rates(backward=INF), ("rates", "backward", "finite", "inf")),
    ("measure mask", lambda: mb.measure_rates(mb.Groups.single(), like=tensors(), mask="causal"),
     ("mask", "mb.masks", "'causal'")),
    ("measure no groups", lambda: mb.measure_rates(None), ("groups", "mb.Groups", "None")),
    ("measure one tensor", lambda: mb.measure_rates(mb.Groups.single(), like=tensors()[0]),
     ("like", "q, k, v")),
    ("measure wrong shapes",
     lambda: mb.measure_rates(mb.Groups.single(), like=[torch.zeros(4)] * 3),
     ("like", "[s, b, heads, width]")),
    ("measure kernel unhashable",
     lambda: mb.measure_rates(mb.Groups.single(), like=tensors(), kernel=["aten"]),
     ("kernel", "['aten']")),
    ("measure kernel", lambda: mb.measure_rates(mb.Groups.single(), like=tensors(), kernel="x"),
     ("kernel", "'x'")),
    ("config algorithm", lambda: mb.BurstConfig("flash"), ("--context-parallel-algo", "'flash'")),
    ("config layout", lambda: mb.BurstConfig(layout="zig"), ("--burst-layout", "'zig'")),
    ("config side", lambda: mb.BurstConfig(side="k"), ("--burst-side", "'k'")),
    ("config kernel", lambda: mb.BurstConfig(kernel="x"), ("--burst-kernel", "'x'")),
    ("config intra 0", lambda: mb.BurstConfig(intra_size=0), ("--burst-intra-size", "0")),
    ("config ulysses bool", lambda: mb.BurstConfig(ulysses_size=True),
     ("--burst-ulysses-size", "True")),
    ("config placement", lambda: mb.BurstConfig(placement="x"), ("--burst-placement", "'x'")),
    ("config wire", lambda: mb.BurstConfig(wire_dtype=torch.bfloat16),
     ("--burst-wire-dtype", "bf16")),
    ("config store", lambda: mb.BurstConfig(store=-1), ("--burst-attention-store", "-1")),
    ("config loss", lambda: mb.BurstConfig(lm_head_loss="on"), ("--burst-lm-head-loss", "'on'")),
    ("config misspelt", lambda: mb.BurstConfig(sides="kv"), ("sides",), TypeError),
]  # fmt: skip
