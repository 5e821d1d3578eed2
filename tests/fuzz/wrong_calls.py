"""Wrong calls of `mb.attention` and `mb.prepare`: (name, call, words of the message[, error])."""

import numpy as np
import torch

import megatron_burst as mb
from megatron_burst import masks
from megatron_burst.plugins.testing import in_process


def tensors(rows=4, batch=1, heads=4, kv=2, d=8, w=8, dtype=torch.float32):
    """q, k, v of one rank."""
    shapes = (rows, batch, heads, d), (rows, batch, kv, d), (rows, batch, kv, w)
    return [torch.zeros(shape, dtype=dtype) for shape in shapes]


def grid(inter=1, intra=2, **more):
    return in_process.groups(inter=inter, intra=intra, **more)


def attend(changed=None, groups=None, **choices):
    """`mb.attention` on two ranks; `changed`: (which of q, k, v, what it becomes on all ranks)."""
    groups = groups or grid()
    qkv = tensors()
    for which, value in (changed or {}).items():
        qkv["qkv".index(which)] = value(qkv["qkv".index(which)])
    return in_process.attention(*([x] * groups.size for x in qkv), groups=groups, **choices)


def heads(count, kv, ulysses, inter=1, intra=4, **choices):
    """`mb.attention` of these heads on groups that share heads."""
    groups = grid(inter, intra, ulysses=ulysses)
    qkv = tensors(heads=count, kv=kv)
    return in_process.attention(*([x] * groups.size for x in qkv), groups=groups, **choices)


def plan(**choices):
    groups = grid()
    return in_process.prepare(*([x] * 2 for x in tensors()), groups=groups, **choices)


def planned(changed, **choices):
    """A call with a plan that is not for it."""
    qkv = tensors(**changed)
    return in_process.attention(*([x] * 2 for x in qkv), plan=plan(), **choices)


def checkpointed(keep, **choices):
    q, k, v = (x.requires_grad_() for x in tensors())
    made = mb.prepare(q, k, v, groups=mb.Groups.single(), **choices)
    return mb.checkpoint(lambda q: mb.attention(q, k, v, plan=made), q, keep=keep)


def other_keys(rows=6, changed=None, groups=None, **choices):
    """`mb.attention` to keys of another sequence."""
    groups, (q, *_) = groups or grid(), tensors()
    _, k, v = tensors(rows, **(changed or {}))
    choices = {"mask": masks.Full(), "key_layout": "contiguous"} | choices
    return in_process.attention(*([x] * groups.size for x in (q, k, v)), groups=groups, **choices)


def joint(*key_sets, q=None, around=None, **choices):
    """`mb.joint_attention` on one rank; `key_sets`: changes of each set, or the set."""
    own, groups, sets = tensors()[0] if q is None else q, mb.Groups.single(), []
    for given in key_sets:
        if isinstance(given, dict):
            options = {"mask": masks.Full(), "key_layout": "replicated", "groups": groups} | given
            _, k, v = tensors(5, w=options.pop("w", 8))
            set_q = own.detach().requires_grad_(options.pop("q_needs_grad", False))
            sets.append((k, v, mb.prepare(set_q, k, v, **options)))
        else:
            sets.append(given)
    if around is None:
        return mb.joint_attention(own, sets, **choices)
    leaf = own.requires_grad_()
    return mb.checkpoint(lambda q: mb.joint_attention(q, sets, **choices), leaf, keep=around)


def rates(**changed):
    return mb.Rates(**{"intra": 1e9, "inter": 1e9, "compute": 1e12} | changed)


def layout(name="zigzag", **more):
    return mb.layout.make(name, **{"cp_size": 2} | more)


NAN, INF = float("nan"), float("inf")
KEYWORDS = [
    ("algorithm", {"algorithm": "flash"}, ("algorithm", "burst", "'flash'")),
    ("algorithm None", {"algorithm": None}, ("algorithm", "burst", "None")),
    ("algorithm in capitals", {"algorithm": "Burst"}, ("algorithm", "burst", "'Burst'")),
    ("algorithm megatron", {"algorithm": "megatron"}, ("algorithm", "burst", "'megatron'")),
    ("algorithm unhashable", {"algorithm": ["burst"]}, ("algorithm", "['burst']")),
    ("ulysses without heads", {"algorithm": "ulysses"}, ("algorithm ulysses", "ulysses=2")),
    ("hybrid without heads", {"algorithm": "hybrid"}, ("algorithm hybrid", "ulysses=2")),
    ("side", {"side": "keys"}, ("side", "query", "'keys'")),
    ("side None", {"side": None}, ("side", "query", "None")),
    ("kernel", {"kernel": "flash"}, ("kernel", "reference", "'flash'")),
    ("kernel of cuda", {"kernel": "aten_cudnn"}, ("aten_cudnn", "cuda", "cpu", "reference")),
    ("kernel flash3 on cpu", {"kernel": "flash3"}, ("flash3", "kernel='auto'")),
    ("layout", {"layout": "zig"}, ("layout", "zigzag", "'zig'")),
    ("layout None", {"layout": None}, ("layout", "None")),
    ("layout number", {"layout": 2}, ("layout", "got 2")),
    ("layout class", {"layout": mb.layout.Zigzag}, ("layout", "Zigzag")),
    ("layout block_striped by name", {"layout": "block_striped"},
     ("block_striped", "mb.layout.make", "block=")),
    ("layout of 4 ranks", {"layout": layout(cp_size=4)}, ("layout", "4 ranks", "2")),
    ("layout of other blocks", {"layout": layout("block_striped", block=6)}, ("block=6", "8")),
    ("layout balanced by name", {"layout": "balanced"},
     ("depends on the batch", "make('balanced', cp_size=2, cu_seqlens=")),
    ("layout balanced of another batch", {"layout": layout("balanced", cu_seqlens=[0, 3, 10])},
     ("8 positions; seq_len must be 10, the total length of the documents, got 8",)),
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
    ("scale of a large integer", {"softmax_scale": 10**400}, ("softmax_scale", "finite", "1329")),
    ("softcap of many digits", {"softcap": 10**5000}, ("softcap", "finite", "16610 bits")),
    ("scale text", {"softmax_scale": "auto"}, ("softmax_scale", "'auto'")),
    ("scale bool", {"softmax_scale": True}, ("softmax_scale", "True")),
    ("scale tensor", {"softmax_scale": torch.tensor(0.5)}, ("softmax_scale", "tensor")),
    ("scale list", {"softmax_scale": [1.0]}, ("softmax_scale", "[1.0]")),
    ("softcap 0", {"softcap": 0.0, "kernel": "reference"}, ("softcap", "None", "0.0")),
    ("softcap negative", {"softcap": -0.5, "kernel": "aten"}, ("softcap", "positive", "-0.5")),
    ("softcap inf", {"softcap": INF, "kernel": "reference"}, ("softcap", "finite", "inf")),
    ("softcap nan", {"softcap": NAN, "kernel": "aten"}, ("softcap", "finite", "nan")),
    ("softcap of aten", {"softcap": 5.0, "kernel": "aten"}, ("softcap=5.0", "reference")),
    ("wire integer", {"grad_wire_dtype": torch.int8}, ("grad_wire_dtype", "float32", "int8")),
    ("wire name", {"grad_wire_dtype": "fp8"}, ("grad_wire_dtype", "bf16", "'fp8'")),
    ("store percent", {"store": 50}, ("store", "0 to 1", "50")),
    ("store text", {"store": "half"}, ("store", "0 to 1", "'half'")),
    ("store nan", {"store": NAN}, ("store", "0 to 1", "nan")),
    ("head_chunks 3", {"head_chunks": 3}, ("head_chunks", "divide", "2", "got 3")),
    ("head_chunks 0", {"head_chunks": 0}, ("head_chunks", "got 0")),
    ("head_chunks negative", {"head_chunks": -1}, ("head_chunks", "got -1")),
    ("head_chunks bool", {"head_chunks": True}, ("head_chunks", "got True")),
    ("head_chunks text", {"head_chunks": "2"}, ("head_chunks", "got '2'")),
    ("head_chunks float", {"head_chunks": 2.0}, ("head_chunks", "got 2.0")),
    ("needs_grad bool", {"needs_grad": True}, ("needs_grad", "three", "True")),
    ("needs_grad of two", {"needs_grad": (True, True)}, ("needs_grad", "three", "(True, True)")),
    ("needs_grad of a name", {"needs_grad": "qkv"}, ("needs_grad", "three", "'qkv'")),
    ("needs_grad of words", {"needs_grad": ("no",) * 3}, ("needs_grad", "booleans", "'no'")),
    ("needs_grad of numbers", {"needs_grad": [1, 0, 1]}, ("needs_grad", "booleans", "[1, 0, 1]")),
    ("sink number", {"sink": 0.0}, ("sink", "[4]", "0.0")),
    ("sink list", {"sink": [0.0] * 4}, ("sink must be a floating-point tensor", "[0.0, 0.0")),
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
    ("more rows of k", {"k": lambda k: torch.cat([k, k])}, ("k, v the same s", "(8, 1, 2, 8)")),
    ("more rows of k and v", {x: lambda x: torch.cat([x, x]) for x in "kv"},
     ("the 4 rows of q, got 8", "key_layout")),
    ("more batch of v", {"v": lambda v: torch.cat([v, v], 1)}, ("the same b", "(4, 2, 2, 8)")),
    ("other heads of v", {"v": lambda v: v[:, :, :1]}, ("heads", "(4, 1, 1, 8)")),
    ("other width of k", {"k": lambda k: k[..., :4]}, ("k", "width", "8", "4")),
    ("heads that do not divide", {x: lambda x: torch.cat([x, x[:, :, :1]], 2) for x in "kv"},
     ("k", "divide", "4", "3")),
    ("k in double", {"k": lambda k: k.double()}, ("k", "float64", "float32")),
    ("integers", {x: lambda x: x.int() for x in "qkv"}, ("q", "dtype", "int32")),
    ("float8", {x: lambda x: x.to(torch.float8_e4m3fn) for x in "qkv"}, ("q", "dtype", "float8")),
    ("complex", {x: lambda x: x.to(torch.complex64) for x in "qkv"}, ("q", "dtype", "complex64")),
    ("k elsewhere", {"k": lambda k: k.to("meta")}, ("k", "device", "meta", "cpu")),
    ("odd rows in zigzag", {x: lambda x: x[:3] for x in "qkv"}, ("3 rows", "pad", "4 per rank")),
]  # fmt: skip

CALLS = [
    ("no groups", lambda: mb.attention(*tensors()), ("groups", "None")),
    ("groups None", lambda: mb.attention(*tensors(), groups=None), ("groups", "mb.Groups", "None")),
    ("groups a number", lambda: mb.prepare(*tensors(), groups=4), ("groups", "mb.Groups", "4")),
    ("groups the class", lambda: mb.attention(*tensors(), groups=mb.Groups),
     ("groups", "mb.Groups")),
    ("a keyword that is none", lambda: attend(scale=1.0), ("scale",), TypeError),
    ("a list", lambda: mb.attention(*([x] for x in tensors()), groups=mb.Groups.single()),
     ("q", "one tensor", "a list of 1")),
    ("ranks of a process", lambda: mb.attention(*tensors(), groups=grid()),
     ("groups", "mb.Groups")),
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
    ("2 head_chunks of 2 heads on 2 ranks", lambda: heads(4, 2, 2, head_chunks=2),
     ("head_chunks", "the 1 key/value heads", "got 2")),
    ("6 heads on 4 ranks", lambda: heads(6, 6, 4), ("4", "6 query heads", "ulysses=1 or 2")),
    ("6 heads on 4 ranks, ulysses", lambda: heads(6, 6, 4, algorithm="ulysses"),
     ("6 query heads", "ulysses=1 or 2", "hybrid")),
    ("7 heads on 4 ranks", lambda: heads(7, 7, 4), ("7 query heads", "ulysses=1")),
    ("6 key heads on 4 ranks", lambda: heads(12, 6, 4), ("6 key/value heads", "ulysses=1 or 2")),
    ("4 heads on 2 x 3 ranks", lambda: heads(4, 4, 6, 2, 3), ("4 query heads", "ulysses=1")),
]  # fmt: skip
OTHER_KEYS = [
    ("no mask", {"mask": None}, ("mask", "mb.masks.Full()", "None")),
    ("a name", {"key_layout": "zig"}, ("key_layout", "replicated", "'zig'")),
    ("a number", {"key_layout": 2}, ("key_layout", "got 2")),
    ("the class", {"key_layout": mb.layout.Replicated}, ("key_layout", "Replicated")),
    ("balanced by name", {"key_layout": "balanced"}, ("key_layout 'balanced'", "make('balanced'")),
    ("4 ranks", {"key_layout": layout(cp_size=4)}, ("key_layout", "4 ranks", "2")),
    ("odd rows in zigzag", {"rows": 3, "key_layout": "zigzag"}, ("k, v: 3 rows", "4 per rank")),
    ("other documents", {"key_layout": layout(cu_seqlens=[0, 4])}, ("documents", "4", "12")),
    ("documents, but no keys", {"rows": 0, "key_layout": layout(cu_seqlens=[0, 4])},
     ("k, v: 0 rows", "must be 4", "got 0")),
    ("keys that are replicated, as queries", {"layout": "replicated", "rows": 4},
     ("layout must be one of", "'replicated'")),
    ("a table of queries", {"mask": masks.Dense(np.ones((8, 8)))}, ("table", "8", "12")),
    ("documents of queries", {"mask": masks.Documents([0, 8])}, ("key_cu_seqlens", "12", "8")),
    ("documents of fewer keys", {"mask": masks.Documents([0, 8], key_cu_seqlens=[0, 6])},
     ("key_cu_seqlens", "12", "6")),
    ("fewer windows", {"rows": 1, "mask": masks.Compressed(2)}, ("4 windows", "2 keys")),
    ("other heads", {"changed": {"kv": 3}}, ("k", "divide", "4", "3")),
    ("another batch", {"changed": {"batch": 2}}, ("the same b", "(6, 2, 2, 8)")),
    ("another width", {"changed": {"d": 4}}, ("k: width", "8", "4")),
    ("rates without auto", {"key_layout": "replicated", "rates": rates()}, ("rates", "auto")),
    ("a wire without auto", {"key_layout": "replicated", "grad_wire_dtype": "auto"},
     ("grad_wire_dtype='auto'", "algorithm='auto'")),
    ("head_chunks", {"key_layout": "replicated", "head_chunks": 4}, ("head_chunks", "2", "got 4")),
]  # fmt: skip
JOINT = [
    ("no sets", lambda: joint(), ("key_sets", "(k, v, plan)", "[]")),
    ("a pair", lambda: joint((None, None)), ("key_sets[0]", "(k, v, plan)")),
    ("no plan", lambda: joint({}, (*tensors()[1:], None)), ("key_sets[1]", "mb.prepare", "None")),
    ("other keys", lambda: joint((*tensors()[1:], plan().ranks[0]), q=tensors(8)[0]),
     ("key_sets[0]: plan: made for", "(8, 1, 4, 8)")),
    ("row chunks", lambda: joint({}, {"sequence_chunks": 2}), ("key_sets[1]", "sequence_chunks=2")),
    ("a store", lambda: joint({"store": 0.5}), ("key_sets[0]", "store=0.5", "store=None")),
    ("a checkpoint that keeps", lambda: joint({}, around=0.5), ("keep", "0.5", "keep=0.0")),
    ("other groups", lambda: joint({}, {"groups": mb.Groups.single()}), ("key_sets[1]", "groups")),
    ("another layout", lambda: joint({}, {"layout": "striped"}), ("key_sets[1]", "layout")),
    ("another width", lambda: joint({}, {"w": 4}), ("key_sets[1]: values", "8", "got 4")),
    ("a frozen q in one plan", lambda: joint({"q_needs_grad": True}, {}), ("needs_grad of q",)),
    ("sink", lambda: joint({}, sink=torch.zeros(2)), ("key_sets[0]: sink", "[4]", "(2,)")),
    ("max_logits", lambda: joint({}, max_logits=torch.zeros(4)), ("max_logits", "mb.prepare")),
    ("q of other heads", lambda: joint({}, q=tensors(heads=2)[0].double()), ("k: q, k, v must",)),
    ("no q", lambda: joint((*tensors()[1:], plan().ranks[0]), q="q"), ("q must be a tensor",)),
    ("label", lambda: joint({}, label=1.5), ("label", "1.5")),
]  # fmt: skip
CALLS += [
    (f"other keys: {name}", lambda c=c: other_keys(**c), words) for name, c, words in OTHER_KEYS
]
CALLS += [(f"joint: {name}", call, words) for name, call, words in JOINT]
CALLS += [(name, lambda c=c: attend(**c), words) for name, c, words in KEYWORDS]
CALLS += [(name, lambda c=c: attend(c), words) for name, c, words in TENSORS]
