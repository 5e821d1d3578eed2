"""Wrong uses of the public API, and what each must be told: `python -m tests.fuzz misuse`.

Every one is a ValueError whose message has the words: the argument, what arrived, what would work.
A TypeError is right where the signature is wrong, and for a mask's truth value or a copy of groups.
"""

import copy
import pickle
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch

import megatron_burst as mb
from megatron_burst import masks

from .tally import Tally


class Misuse(NamedTuple):
    name: str
    call: Callable[[], object]
    words: tuple[str, ...]
    error: type[Exception] = ValueError


def tensors(rows=4, batch=1, heads=4, kv=2, d=8, w=8, dtype=torch.float32):
    """q, k, v of one rank."""
    shapes = (rows, batch, heads, d), (rows, batch, kv, d), (rows, batch, kv, w)
    return [torch.zeros(shape, dtype=dtype) for shape in shapes]


def grid(inter=1, intra=2, **more):
    return mb.Groups.in_process(inter=inter, intra=intra, **more)


def attend(changed=None, groups=None, **choices):
    """`mb.attention` on two ranks; `changed`: (which of q, k, v, what it becomes on all ranks)."""
    groups = groups or grid()
    qkv = tensors()
    for which, value in (changed or {}).items():
        qkv["qkv".index(which)] = value(qkv["qkv".index(which)])
    return mb.attention(*([x] * groups.size for x in qkv), groups=groups, **choices)


def heads(count, kv, head, inter=1, intra=4, **choices):
    """`mb.attention` of these heads on groups that share heads."""
    groups = grid(inter, intra, head=head)
    qkv = tensors(heads=count, kv=kv)
    return mb.attention(*([x] * groups.size for x in qkv), groups=groups, **choices)


def plan(**choices):
    groups = grid()
    return mb.prepare(*([x] * 2 for x in tensors()), groups=groups, **choices)


def planned(changed, **choices):
    """A call with a plan that is not for it."""
    qkv = tensors(**changed)
    return mb.attention(*([x] * 2 for x in qkv), plan=plan(), **choices)


def rates(**changed):
    return mb.Rates(**{"intra": 1e9, "inter": 1e9, "compute": 1e12} | changed)


def choose(**changed):
    given = {"ranks": 4, "intra": 2, "rates": rates(), "tokens": 8, "heads": 4, "width": 8}
    return mb.choose(**given | changed)


def checkpointed(keep, **choices):
    groups = grid()
    q, k, v = (x.requires_grad_() for x in tensors())
    made = mb.prepare([q] * 2, [k] * 2, [v] * 2, groups=groups, **choices)
    return mb.checkpoint(lambda q: mb.attention([q] * 2, [k] * 2, [v] * 2, plan=made), q, keep=keep)


def checkpoint_of_something_else():
    """A function that does not do the same the second time."""
    groups, times = grid(), []
    q, k, v = (x.requires_grad_() for x in tensors())

    def layer(q):
        times.append(1)
        mask = masks.Full() if len(times) > 1 else masks.Causal()
        return sum(mb.attention([q] * 2, [k] * 2, [v] * 2, groups=groups, mask=mask))

    mb.checkpoint(layer, q).sum().backward()


def shard(**changed):
    given = {"x": torch.zeros(8, 2), "layout": mb.layout.make("zigzag", cp_size=2), "rank": 0}
    return mb.shard(**given | changed)


def unshard(parts, layout=None, **more):
    return mb.unshard(parts, layout or mb.layout.make("zigzag", cp_size=2), **more)


def layout(name="zigzag", **more):
    return mb.layout.make(name, **{"cp_size": 2} | more)


# --- mb.attention and mb.prepare -----------------------------------------------------------

NAN, INF = float("nan"), float("inf")
KEYWORDS = [
    ("algorithm", {"algorithm": "flash"}, ("algorithm", "burst", "'flash'")),
    ("algorithm None", {"algorithm": None}, ("algorithm", "burst", "None")),
    ("algorithm in capitals", {"algorithm": "Burst"}, ("algorithm", "burst", "'Burst'")),
    ("algorithm megatron", {"algorithm": "megatron"}, ("algorithm", "burst", "'megatron'")),
    ("algorithm unhashable", {"algorithm": ["burst"]}, ("algorithm", "['burst']")),
    ("ulysses without heads", {"algorithm": "ulysses"}, ("algorithm ulysses", "head=2")),
    ("hybrid without heads", {"algorithm": "hybrid"}, ("algorithm hybrid", "head=2")),
    ("side", {"side": "keys"}, ("side", "query", "'keys'")),
    ("side None", {"side": None}, ("side", "query", "None")),
    ("kernel", {"kernel": "flash"}, ("kernel", "reference", "'flash'")),
    ("kernel of cuda", {"kernel": "aten_cudnn"}, ("aten_cudnn", "cuda", "cpu", "reference")),
    ("kernel flash2 on cpu", {"kernel": "flash2"}, ("flash2", "kernel='auto'")),
    ("layout", {"layout": "zig"}, ("layout", "zigzag", "'zig'")),
    ("layout None", {"layout": None}, ("layout", "None")),
    ("layout number", {"layout": 2}, ("layout", "got 2")),
    ("layout class", {"layout": mb.layout.Zigzag}, ("layout", "Zigzag")),
    ("layout block_striped by name", {"layout": "block_striped"},
     ("block_striped", "mb.layout.make", "block=")),
    ("layout of 4 ranks", {"layout": layout(cp_size=4)}, ("layout", "4 ranks", "2")),
    ("layout of other blocks", {"layout": layout("block_striped", block=6)}, ("block=6", "8")),
    ("layout of other documents", {"layout": layout(cu_seqlens=[0, 4])}, ("documents", "4", "8")),
    ("mask name", {"mask": "causal"}, ("mask", "mb.masks", "'causal'")),
    ("mask tensor", {"mask": torch.ones(8, 8)}, ("mask", "mb.masks", "tensor")),
    ("mask class", {"mask": masks.Causal}, ("mask", "mb.masks", "Causal")),
    ("mask of documents that end early", {"mask": masks.Documents([0, 6])},
     ("cu_seqlens", "8", "6")),
    ("mask of other blocks", {"mask": masks.BlockSparse(np.ones((3, 3)), 2)}, ("table", "6", "8")),
    ("mask of a table per rank", {"mask": masks.Dense(np.ones((4, 4)))}, ("table", "4", "8")),
    ("scale 0", {"softmax_scale": 0}, ("softmax_scale", "positive", "0")),
    ("scale negative", {"softmax_scale": -1.0}, ("softmax_scale", "positive", "-1.0")),
    ("scale nan", {"softmax_scale": NAN}, ("softmax_scale", "nan")),
    ("scale inf", {"softmax_scale": INF}, ("softmax_scale", "inf")),
    ("scale text", {"softmax_scale": "auto"}, ("softmax_scale", "'auto'")),
    ("scale bool", {"softmax_scale": True}, ("softmax_scale", "True")),
    ("scale tensor", {"softmax_scale": torch.tensor(0.5)}, ("softmax_scale", "tensor")),
    ("softcap 0", {"softcap": 0.0, "kernel": "reference"}, ("softcap", "None", "0.0")),
    ("softcap of aten", {"softcap": 5.0, "kernel": "aten"}, ("softcap=5.0", "reference")),
    ("wire integer", {"grad_wire_dtype": torch.int8}, ("grad_wire_dtype", "float32", "int8")),
    ("wire name", {"grad_wire_dtype": "bf16"}, ("grad_wire_dtype", "bfloat16", "bf16")),
    ("kv_cache percent", {"kv_cache": 50}, ("kv_cache", "0 to 1", "50")),
    ("kv_cache negative", {"kv_cache": -0.5}, ("kv_cache", "0 to 1", "-0.5")),
    ("kv_cache bool", {"kv_cache": True}, ("kv_cache", "0 to 1", "True")),
    ("kv_cache None", {"kv_cache": None}, ("kv_cache", "0 to 1", "None")),
    ("kv_cache of queries", {"kv_cache": 0.5, "side": "query"}, ("kv_cache", "side kv")),
    ("kv_cache and store", {"kv_cache": 0.5, "store": 0.5}, ("kv_cache=0.5", "store=0.5", "one")),
    ("store percent", {"store": 50}, ("store", "0 to 1", "50")),
    ("store text", {"store": "half"}, ("store", "0 to 1", "'half'")),
    ("store nan", {"store": NAN}, ("store", "0 to 1", "nan")),
    ("head_groups 3", {"head_groups": 3}, ("head_groups", "divide", "2", "got 3")),
    ("head_groups 0", {"head_groups": 0}, ("head_groups", "got 0")),
    ("head_groups negative", {"head_groups": -1}, ("head_groups", "got -1")),
    ("head_groups bool", {"head_groups": True}, ("head_groups", "got True")),
    ("head_groups float", {"head_groups": 2.0}, ("head_groups", "got 2.0")),
    ("needs_grad bool", {"needs_grad": True}, ("needs_grad", "three", "True")),
    ("needs_grad of two", {"needs_grad": (True, True)}, ("needs_grad", "three", "(True, True)")),
    ("needs_grad of a name", {"needs_grad": "qkv"}, ("needs_grad", "three", "'qkv'")),
    ("sink number", {"sink": 0.0}, ("sink", "[4]", "0.0")),
    ("sink too short", {"sink": torch.zeros(2)}, ("sink", "[4]", "(2,)")),
    ("sink per row", {"sink": torch.zeros(4, 4)}, ("sink", "[4]", "(4, 4)")),
    ("sink integers", {"sink": torch.zeros(4).long()}, ("sink", "[4]", "int64")),
    ("sink elsewhere", {"sink": torch.zeros(4, device="meta")}, ("sink", "cpu", "meta")),
    ("rates without auto", {"rates": rates()}, ("rates", "auto", "'burst'")),
    ("rates number", {"rates": 3, "algorithm": "auto"}, ("rates", "mb.Rates", "3")),
    ("rates dict", {"rates": {"intra": 1}, "algorithm": "auto"}, ("rates", "mb.Rates", "intra")),
]  # fmt: skip

TENSORS = [
    ("q of three dimensions", {"q": lambda q: q[0]},
     ("q must be [s, b, heads, width]", "(1, 4, 8)")),
    ("q None", {"q": lambda q: None}, ("q", "tensor", "None")),
    ("k an array", {"k": lambda k: k.numpy()}, ("k", "tensor", "array")),
    ("v a list of lists", {"v": lambda v: v.tolist()}, ("v", "tensor")),
    ("q sparse", {"q": lambda q: q.to_sparse()}, ("q", "sparse")),
    ("no rows", {x: lambda x: x[:0] for x in "qkv"}, ("q", "(0, 1, 4, 8)")),
    ("no heads in v", {"v": lambda v: v[:, :, :0]}, ("v", "(4, 1, 0, 8)")),
    ("more rows of k", {"k": lambda k: torch.cat([k, k])}, ("s and b", "(8, 1, 2, 8)")),
    ("more batch of v", {"v": lambda v: torch.cat([v, v], 1)}, ("s and b", "(4, 2, 2, 8)")),
    ("other heads of v", {"v": lambda v: v[:, :, :1]}, ("heads", "(4, 1, 1, 8)")),
    ("other width of k", {"k": lambda k: k[..., :4]}, ("k", "width", "8", "4")),
    ("heads that do not divide", {x: lambda x: torch.cat([x, x[:, :, :1]], 2) for x in "kv"},
     ("k", "divide", "4", "3")),
    ("k in double", {"k": lambda k: k.double()}, ("k", "float64", "float32")),
    ("integers", {x: lambda x: x.int() for x in "qkv"}, ("q", "dtype", "int32")),
    ("complex", {x: lambda x: x.to(torch.complex64) for x in "qkv"}, ("q", "dtype", "complex64")),
    ("k elsewhere", {"k": lambda k: k.to("meta")}, ("k", "device", "meta", "cpu")),
    ("odd rows in zigzag", {x: lambda x: x[:3] for x in "qkv"}, ("3 rows", "pad", "4 on each")),
]  # fmt: skip

CALLS = [
    ("no groups", lambda: mb.attention(*tensors()), ("groups",), TypeError),
    ("groups None", lambda: mb.attention(*tensors(), groups=None), ("groups", "mb.Groups", "None")),
    ("groups a number", lambda: mb.prepare(*tensors(), groups=4), ("groups", "mb.Groups", "4")),
    ("groups the class", lambda: mb.attention(*tensors(), groups=mb.Groups),
     ("groups", "mb.Groups")),
    ("a keyword that is none", lambda: attend(scale=1.0), ("scale",), TypeError),
    ("a tensor for two ranks", lambda: mb.attention(*tensors(), groups=grid()),
     ("q", "2 ranks", "1 tensors")),
    ("three tensors for two ranks",
     lambda: mb.attention(*([x] * 3 for x in tensors()), groups=grid()), ("q", "2", "3")),
    ("lists of unequal length",
     lambda: mb.attention([tensors()[0]] * 2, [tensors()[1]], [tensors()[2]] * 2, groups=grid()),
           ("k", "2", "1")),
    ("a plan and keywords", lambda: planned({}, side="kv"), ("plan", "keywords", "side")),
    ("a plan and groups", lambda: planned({}, groups=grid()), ("plan", "keywords", "groups")),
    ("a plan of one's own", lambda: mb.attention(*tensors(), plan={}),
     ("plan", "mb.prepare", "{}")),
    ("groups for a plan", lambda: mb.attention(*tensors(), plan=grid()), ("plan", "mb.prepare")),
    ("a plan for other rows", lambda: planned({"rows": 8}), ("plan", "(8, 1, 4, 8)", "mb.prepare")),
    ("a plan for other heads", lambda: planned({"kv": 4}), ("plan", "(4, 1, 4, 8)", "mb.prepare")),
    ("a plan for another dtype", lambda: planned({"dtype": torch.float64}),
     ("plan", "float64", "mb.prepare")),
    ("a plan and a bad sink", lambda: planned({}, sink=torch.zeros(3)), ("sink", "[4]", "(3,)")),
    ("a plan without store in a checkpoint", lambda: checkpointed(0.5),
     ("plan", "store=0.5", "mb.prepare")),
    ("a plan with another store", lambda: checkpointed(0.5, store=0.25),
     ("store=0.25", "store=0.5", "mb.prepare")),
    ("6 heads on 4 ranks", lambda: heads(6, 6, 4), ("4", "6 query heads", "head=1 or 2")),
    ("6 heads on 4 ranks, ulysses", lambda: heads(6, 6, 4, algorithm="ulysses"),
     ("6 query heads", "head=1 or 2", "hybrid")),
    ("7 heads on 4 ranks", lambda: heads(7, 7, 4), ("7 query heads", "head=1")),
    ("6 key heads on 4 ranks", lambda: heads(12, 6, 4), ("6 key/value heads", "head=1 or 2")),
    ("4 heads on 2 x 3 ranks", lambda: heads(4, 4, 6, 2, 3), ("4 query heads", "head=1")),
]  # fmt: skip
CALLS += [(name, lambda c=c: attend(**c), words) for name, c, words in KEYWORDS]
CALLS += [(name, lambda c=c: attend(c), words) for name, c, words in TENSORS]

# --- everything else -----------------------------------------------------------------------

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
    ("head 0", lambda: grid(head=0), ("head", "0")),
    ("head 3 of 4", lambda: grid(intra=4, head=3), ("head", "3", "4", "use 1, 2 or 4")),
    ("head float", lambda: grid(head=2.0), ("head", "integer", "2.0")),
    ("head bool", lambda: grid(head=True), ("head", "integer", "True")),
    ("head None", lambda: grid(head=None), ("head", "integer", "None")),
    ("placement", lambda: grid(placement="heads"), ("placement", "head_first", "'heads'")),
    ("placement None", lambda: grid(placement=None), ("placement", "head_first", "None")),
    ("uneven rings", lambda: grid(inter=3, head=2, placement="context_first"),
     ("placement", "head=2", "use")),
    ("no intra", lambda: mb.Groups.in_process(), ("intra",), TypeError),
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
    ("empty documents", lambda: layout(cu_seqlens=[0, 0]), ("cu_seqlens", "no position")),
    ("rank behind the last", lambda: layout().positions(2, 8), ("rank", "0..1", "2")),
    ("odd length", lambda: layout().positions(0, 6), ("seq_len", "4", "6", "pad to 8")),
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

MASKS = [
    ("window negative", lambda: masks.Window(-1, 0), ("left", "at least 0", "-1")),
    ("window float", lambda: masks.Window(2.5, 0), ("left", "integer", "2.5")),
    ("window bool", lambda: masks.Window(True, 0), ("left", "integer", "True")),
    ("window to the right", lambda: masks.Window(0, -2), ("right", "at least 0", "-2")),
    ("window of one", lambda: masks.Window(4), ("right",), TypeError),
    ("dilated 0", lambda: masks.Dilated(0), ("stride", "at least 1", "0")),
    ("dilated float", lambda: masks.Dilated(1.5), ("stride", "integer", "1.5")),
    ("prefix negative", lambda: masks.Prefix(-3), ("n", "at least 0", "-3")),
    ("prefix text", lambda: masks.Prefix("8"), ("n", "integer", "'8'")),
    ("documents of lengths", lambda: masks.Documents([4, 4]),
     ("cu_seqlens", "start at 0", "[4, 4]")),
    ("documents as floats", lambda: masks.Documents([0.0, 8.0]), ("cu_seqlens", "integers")),
    ("documents None", lambda: masks.Documents(None), ("cu_seqlens", "None")),
    ("documents padded with -1", lambda: masks.Documents([0, 4, 8, -1]),
     ("cu_seqlens", "decrease")),
    ("table not square", lambda: masks.Dense(np.ones((4, 8))), ("table", "square", "(4, 8)")),
    ("table to be added", lambda: masks.Dense(np.array([[0.0, -INF], [0.0, 0.0]])),
     ("table", "1 where", "-inf")),
    ("table of text", lambda: masks.Dense([["a"]]), ("table", "booleans")),
    ("table None", lambda: masks.Dense(None), ("table", "square")),
    ("table ragged", lambda: masks.Dense([[1], [1, 0]]), ("table", "square")),
    ("block 0", lambda: masks.BlockSparse(np.ones((2, 2)), 0), ("block", "at least 1", "0")),
    ("block float", lambda: masks.BlockSparse(np.ones((2, 2)), 4.0), ("block", "integer", "4.0")),
    ("mask and a table", lambda: masks.Causal() & np.ones((2, 2)), ("masks",), TypeError),
    ("mask or None", lambda: masks.Causal() | None, ("masks",), TypeError),
    ("mask and mask in words", lambda: masks.Causal() and masks.Full(), ("& and |",), TypeError),
    ("not a mask", lambda: not masks.Causal(), ("& and |",), TypeError),
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
    ("choose misspelt", lambda: choose(head=4), ("head",), TypeError),
    ("rates negative", lambda: rates(intra=-1.0), ("rates", "intra", "-1.0")),
    ("rates 0", lambda: rates(inter=0), ("rates", "inter", "0")),
    ("rates text", lambda: rates(compute="fast"), ("rates", "compute", "'fast'")),
    ("rates latency", lambda: rates(latency=-1e-6), ("rates", "latency", "-1e-06")),
    ("measure no groups", lambda: mb.measure_rates(None), ("groups", "mb.Groups", "None")),
    ("measure one tensor", lambda: mb.measure_rates(grid(), like=tensors()[0]),
     ("like", "q, k, v")),
    ("measure wrong shapes", lambda: mb.measure_rates(grid(), like=[torch.zeros(4)] * 3),
     ("like", "[s, b, heads, width]")),
    ("measure kernel", lambda: mb.measure_rates(grid(), like=tensors(), kernel="x"),
     ("kernel", "'x'")),
    ("config algorithm", lambda: mb.BurstConfig("flash"), ("--context-parallel-algo", "'flash'")),
    ("config layout", lambda: mb.BurstConfig(layout="zig"), ("--burst-layout", "'zig'")),
    ("config side", lambda: mb.BurstConfig(side="k"), ("--burst-side", "'k'")),
    ("config kernel", lambda: mb.BurstConfig(kernel="x"), ("--burst-kernel", "'x'")),
    ("config intra 0", lambda: mb.BurstConfig(intra_size=0), ("--burst-intra-size", "0")),
    ("config head bool", lambda: mb.BurstConfig(head_size=True), ("--burst-head-size", "True")),
    ("config placement", lambda: mb.BurstConfig(placement="x"), ("--burst-placement", "'x'")),
    ("config cache", lambda: mb.BurstConfig(kv_cache=2), ("--burst-kv-cache", "2")),
    ("config cache of queries", lambda: mb.BurstConfig(kv_cache=0.5, side="query"),
     ("--burst-kv-cache", "--burst-side kv")),
    ("config wire", lambda: mb.BurstConfig(wire_dtype=torch.bfloat16),
     ("--burst-wire-dtype", "bf16")),
    ("config store", lambda: mb.BurstConfig(store=-1), ("--burst-attention-store", "-1")),
    ("config store and cache", lambda: mb.BurstConfig(store=0.5, kv_cache=0.5),
     ("--burst-kv-cache", "--burst-attention-store", "one")),
    ("config loss", lambda: mb.BurstConfig(lm_head_loss="on"), ("--burst-lm-head-loss", "'on'")),
    ("config misspelt", lambda: mb.BurstConfig(sides="kv"), ("sides",), TypeError),
]  # fmt: skip

TABLES = {"call": CALLS, "groups": GROUPS, "layout": LAYOUTS, "masks": MASKS, "others": OTHERS}
ALL = {f"{part}: {row[0]}": Misuse(*row) for part, table in TABLES.items() for row in table}
# What is not told well yet.
PENDING: tuple[str, ...] = (
    "groups: intra 0",
    "groups: intra negative",
    "groups: intra None",
    "groups: inter 0",
    "groups: inter float",
    "groups: inter bool",
    "groups: inter negative",
    "groups: groups of None",
    "layout: cp_size bool",
    "layout: shard of rank None",
    "layout: shard along no dimension",
    "layout: shard of a list",
    "layout: unshard of numbers",
    "masks: window bool",
    "others: choose odd tokens",
)


def faults(name: str) -> list[str]:
    """What is wrong with what this misuse is told."""
    misuse = ALL[name]
    try:
        misuse.call()
    except misuse.error as error:
        missing = [word for word in misuse.words if word not in str(error)]
        return [f"the message has no {missing}: {error}"] if missing else []
    except Exception as error:
        return [f"not a {misuse.error.__name__}: {type(error).__name__}: {error}"]
    return ["nothing was said"]


def search(names: Iterable[str]) -> Tally:
    """Try these misuses."""
    tally = Tally("misuse")
    for name in names:
        tally.add([name.split(":")[0]], faults(name), ALL[name].words, f"'{name}'")
    return tally


def run(seed: int, seconds: float) -> int:
    """All of them, whatever the seed and the time; 0 if all are told well."""
    tally = search(name for name in ALL if name not in PENDING)
    print(tally)
    return bool(tally.failures)


def replay(name: str) -> int:
    """One of them again; 0 if it is told well."""
    tally = search([name])
    print(tally)
    return bool(tally.failures)
