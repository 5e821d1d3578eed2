"""Bad input: the same ValueError on every rank, with argument and fix; no hang.

`fuzz.misuse`, run by `test_fuzz.py`, covers input that is wrong on all ranks. Here one rank alone
has wrong input, or dies, or never calls, on real processes.
"""

import os
import re
import time

import cases
import pytest
import torch
import torch.distributed as dist
from workers import Workers

import megatron_burst as mb
from megatron_burst.kernels import registry
from megatron_burst.kernels.operators import CpuFlash
from megatron_burst.plugins.testing import in_process


def qkv(rows=4, batch=1, heads=4, kv_heads=2, d=8, w=8, dtype=torch.float32, device="cpu"):
    shapes = (rows, batch, heads, d), (rows, batch, kv_heads, d), (rows, batch, kv_heads, w)
    return [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]


q, k, v = qkv()


# --- what differs by transport or by rank in one process -----------------------------------


@pytest.mark.parametrize(
    ("backend", "device", "words"),
    [
        (
            "nccl",
            "cpu",
            "backend nccl sends cuda tensors, got cpu tensors; make .* with backend gloo",
        ),
        ("gloo", "meta", "backend gloo sends cpu tensors, got meta tensors; move them to cpu"),
    ],
)
def test_tensors_that_the_transport_cannot_move(backend, device, words):
    groups = in_process.groups(intra=2)
    for rank in groups.ranks:
        rank.backend, rank.devices = backend, {"nccl": ("cuda",), "gloo": ("cpu",)}[backend]
    with pytest.raises(ValueError, match=f"groups: {words}"):
        in_process.attention(*([x] * 2 for x in qkv(device=device)), groups=groups)


def test_in_process_ranks_that_differ_are_told_so():
    groups = in_process.groups(intra=2)
    with pytest.raises(ValueError, match=r"rank 0 has q \(\(4, .*rank 1 has q \(\(2, "):
        in_process.attention([q, q[:2]], [k, k[:2]], [v, v[:2]], groups=groups)


def test_numbers_of_ranks_may_be_integers_or_floats():
    groups = in_process.groups(intra=2)
    asked = {"groups": groups, "kernel": "reference"}
    tensors = [[x] * 2 for x in qkv()]
    plans = [
        in_process.prepare(
            *tensors, softcap=kind(30), softmax_scale=kind(2), store=kind(1), **asked
        )
        for kind in (int, float)
    ]
    assert repr(plans[0].facts) == repr(plans[1].facts)  # ranks compare the text


# --- plans ---------------------------------------------------------------------------------


MISFITS = {
    "rows": qkv(rows=8),
    "batch": qkv(batch=2),
    "heads": qkv(kv_heads=4),
    "width": qkv(d=16),
    "value width": qkv(w=4),
    "dtype": qkv(dtype=torch.float64),
    "device": qkv(device="meta"),
    "gradient": [x.clone().requires_grad_() for x in qkv()],
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_plan_for_other_tensors_is_refused(name):
    groups = in_process.groups(intra=1)
    plan = in_process.prepare([q], [k], [v], groups=groups)
    tensors = [[x] for x in MISFITS[name]]
    assert plan.matches([q], [k], [v])
    assert not plan.matches(*tensors)
    with pytest.raises(ValueError, match=r"plan: made for .* got .*call mb.prepare for these"):
        in_process.attention(*tensors, plan=plan)


# --- one rank differs: real processes ------------------------------------------------------


def told(arguments):
    """Return the type and message of attention's error on this rank.

    `arguments` are (tensor changes, choices) by rank. The group must work afterwards.
    """
    groups = cases.groups_on_rank(1, 3)
    shape, choices = arguments[dist.get_rank()]
    needs, given = choices.pop("requires_grad", False), choices.pop("given", None)
    tensors: list = [x.requires_grad_(needs) for x in qkv(**shape)]
    if given == "a list":
        tensors[1] = [tensors[1]] * 2
    elif given == "no tensor":
        tensors[0] = None
    if "sink" in choices:
        choices["sink"] = torch.zeros(choices["sink"])
    try:
        mb.attention(*tensors, groups=groups, **choices)
        answer = None
    except Exception as error:
        answer = type(error).__name__, str(error)
    out = mb.attention(*qkv(), groups=groups)  # nobody is out of step
    return answer, tuple(out.shape)


ODD_ONE_OUT = {
    "rows": (({"rows": 8}, {}), ["q ((8,", "q ((4,"]),
    "batch": (({"batch": 2}, {}), ["(4, 2, 4, 8)", "(4, 1, 4, 8)"]),
    "kv heads": (({"kv_heads": 1}, {}), ["k ((4, 1, 1, 8)", "k ((4, 1, 2, 8)"]),
    "value width": (({"w": 4}, {}), ["v ((4, 1, 2, 4)"]),
    "dtype": (({"dtype": torch.bfloat16}, {}), ["torch.bfloat16", "torch.float32"]),
    "needs gradient": (({}, {"requires_grad": True}), ["needs_grad", "True", "False"]),
    "algorithm": (({}, {"algorithm": "ring"}), ["algorithm 'ring'", "algorithm 'burst'"]),
    "side": (({}, {"side": "query"}), ["side 'query'", "side 'auto'"]),
    "kernel": (({}, {"kernel": "reference"}), ["kernel 'reference'", "kernel 'aten'"]),
    "layout": (({}, {"layout": "striped"}), ["layout Striped", "layout Zigzag"]),
    "mask": (({}, {"mask": mb.masks.Full()}), ["mask Full()", "mask Causal()"]),
    "scale": (({}, {"softmax_scale": 0.5}), ["softmax_scale 0.5"]),
    "wire": (({}, {"grad_wire_dtype": torch.bfloat16}), ["grad_wire_dtype torch.bfloat16"]),
    "bad shape": (({"rows": 3}, {}), ["rank 1", "layout zigzag", "got 9; pad to 12"]),
    "bad heads": (({"kv_heads": 3}, {}), ["rank 1", "divide the 4 query heads, got 3"]),
    "bad algorithm": (({}, {"algorithm": "rings"}), ["rank 1", "algorithm", "'rings'"]),
    "bad side": (({}, {"side": "q"}), ["rank 1", "side", "'q'"]),
    "bad kernel": (({}, {"kernel": "flash"}), ["rank 1", "kernel", "'flash'"]),
    "bad layout": (({}, {"layout": "zig"}), ["rank 1", "layout", "'zig'"]),
    "bad mask": (({}, {"mask": 1}), ["rank 1", "mask must be a mask from mb.masks, got 1"]),
    "bad wire": (({}, {"grad_wire_dtype": torch.int8}), ["rank 1", "grad_wire_dtype"]),
    "a list": (({}, {"given": "a list"}), ["rank 1", "k must be one tensor", "a list of 2"]),
    "no tensor": (({}, {"given": "no tensor"}), ["rank 1", "q must be a tensor", "got None"]),
    "a sink": (({}, {"sink": 4}), ["sink ((4,)", "sink None"]),
    "bad sink": (({}, {"sink": 3}), ["rank 1", "floating-point tensor of shape [4]", "(3,)"]),
    "bad device": (({"device": "meta"}, {}), ["rank 1", "groups: backend gloo sends cpu", "meta"]),
}


@pytest.mark.parametrize("name", ODD_ONE_OUT)
def test_one_odd_rank_gives_all_ranks_the_same_error(ranks, name):
    odd, words = ODD_ONE_OUT[name]
    answers = ranks(3).run(told, [({}, {}), odd, ({}, {})])
    assert len({answer for answer, _ in answers}) == 1
    (kind, message), _ = answers[0]
    assert kind == "ValueError"
    assert all(word in message for word in words), message
    assert [shape for _, shape in answers] == [(4, 1, 4, 8)] * 3


def refused_by_one(name):
    """Return the message on this rank for a mask that fails only on rank 1."""
    groups = cases.groups_on_rank(1, 3)
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patched:
        if name == "window":
            patched.setattr(CpuFlash, "limits", (None, None))  # as on CUDA: no tables
        mask = {
            "window": mb.masks.Documents([0, 8, 24]) & (mb.masks.Prefix(8) | mb.masks.Window(3, 0)),
            "user's own": Breaks(),
        }[name]
        tensors = qkv(rows=8)
        with pytest.raises(ValueError, match="rank 1: ") as error:
            mb.attention(*tensors, groups=groups, layout="contiguous", mask=mask)
    mb.attention(*tensors, groups=groups)  # nobody is out of step
    return str(error.value)


class Breaks(mb.masks.Mask):
    """A mask that fails for the rows of rank 1."""

    def __repr__(self):
        return "Breaks()"

    def visible(self, q, k):
        return k <= q

    def cover(self, q_span, k_span):
        if dist.get_rank() == 1:
            raise KeyError("left")
        return mb.masks.Cover.PARTIAL if k_span.start <= q_span.last else mb.masks.Cover.EMPTY


@pytest.mark.parametrize(
    ("name", "words"),
    [("window", "mask: a window .*'reference'"), ("user's own", "KeyError .*'left'")],
)
def test_what_one_rank_cannot_plan_is_told_to_all(ranks, name, words):
    messages = ranks(3).run(refused_by_one, name)
    assert len(set(messages)) == 1
    assert re.search(words, messages[0]), messages[0]


# --- a rank that fails and goes on ---------------------------------------------------------


def after_a_failure(count):
    """Rank 1 runs out of memory in a call, and every rank continues; return the later errors."""
    tensors = [torch.randn(4, 1, 4, 8, requires_grad=True) for _ in range(3)]
    groups = mb.Groups.flat(dist.group.WORLD)
    plan = mb.prepare(*tensors, groups=groups, kernel="reference")
    broken = plan.with_kernel(cases.Failing(plan.kernel, "forward", count))
    told = []
    for each in (broken if groups.rank == 1 else plan, plan, None):
        try:
            mb.attention(*tensors, **({"plan": each} if each else {"groups": groups}))
            told.append("fine")
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


def test_ranks_that_may_be_out_of_step_are_told_so():
    pool = Workers(2, timeout=3)
    try:
        told, failed = pool.run(after_a_failure, 0, timeout=30)
    finally:
        pool.close()
    assert failed[0] == "MemoryError: no room for forward"
    words = "ValueError: groups: an earlier call failed .*no room for forward"
    assert re.match(words, failed[1])
    assert re.match("RuntimeError: exchange failed|fine", told[0])
    assert re.match("RuntimeError: exchange failed|ValueError: groups: ", told[1])
    assert "fine" not in (told[2], failed[2])


@pytest.mark.parametrize(
    ("grid", "choices", "sends"),
    [
        ({"intra": 2}, {}, True),
        ({"intra": 4, "ulysses": 2}, {"algorithm": "hybrid"}, True),
        ({"intra": 2, "ulysses": 2}, {"algorithm": "burst"}, False),
        ({"intra": 2, "ulysses": 2}, {"algorithm": "auto", "rates": mb.Rates(1e9, 1e9)}, False),
        ({"intra": 2, "ulysses": 2}, {"algorithm": "ulysses"}, False),
        ({"intra": 1}, {}, False),
        ({"intra": 2}, {"key_layout": "replicated", "mask": mb.masks.Full()}, False),
    ],
)
def test_a_kernel_runs_beside_transfers_only_in_a_ring_of_several_ranks(
    grid, choices, sends, monkeypatch
):
    given, make = set(), registry.make

    def recorded(*args, beside_rings, **named):
        given.add(beside_rings)
        return make(*args, beside_rings=beside_rings, **named)

    monkeypatch.setattr(registry, "make", recorded)
    groups = in_process.groups(**grid)
    in_process.prepare(*([x] * groups.size for x in qkv()), groups=groups, **choices)
    assert given == {sends}


# --- a plan for a shape, where tensors are not there yet ------------------------------------


@pytest.mark.parametrize("algorithm", ["burst", "auto"])
def test_a_shape_in_place_of_tensors(algorithm):
    groups = in_process.groups(intra=2)
    rates = mb.Rates(intra=1e9, inter=1e9) if algorithm == "auto" else None
    asked = {"groups": groups, "algorithm": algorithm, "rates": rates}
    tensors = [[x.double().requires_grad_() for _ in range(2)] for x in qkv(w=4)]
    given = {"shape": (4, 1, 4, 8), "kv_heads": 2, "value_width": 4, "dtype": torch.float64}
    plan = in_process.prepare(**given, **asked)
    assert plan.facts == in_process.prepare(*tensors, **asked).facts
    assert all(out.shape == (4, 1, 4, 4) for out in in_process.attention(*tensors, plan=plan))
    assert in_process.prepare(**given, needs_grad=(False,) * 3, **asked).needs_grad == (False,) * 3
    assert in_process.prepare(shape=[4, 1, 4, 8], **asked).matches(
        *[[torch.zeros(4, 1, 4, 8)] * 2] * 3
    )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, r"pass q, k and v, or shape=\(rows, batch, heads, width\)"),
        ({"q": qkv()[0], "dtype": torch.float32}, "pass either q, k, v, or shape"),
        ({"q": 1, "shape": (4, 1, 4, 8)}, "pass either q, k, v, or shape"),
        ({"shape": (4, 1, 4)}, r"shape of q on this rank must be .* got \(4, 1, 4\)"),
        ({"shape": (4, 1, 4, 0)}, "shape of q on this rank must"),
        ({"shape": 4}, "shape of q on this rank must"),
        ({"shape": (4, 1, 4, 8), "kv_heads": 3}, "key/value heads must divide the 4 query heads"),
        ({"shape": (4, 1, 4, 8), "kv_heads": 0}, "kv_heads must be a positive integer, got 0"),
        ({"kv_heads": 2, "dtype": torch.float64}, "pass q, k and v, or shape"),
        ({"shape": (4, 1, 4, 8), "dtype": torch.int64}, "have the same device and the same dtype"),
    ],
)
def test_a_shape_that_is_none(given, words):
    with pytest.raises(ValueError, match=words):
        mb.prepare(groups=mb.Groups.single(), **given)


# --- a rank that dies, and one that never comes --------------------------------------------

LIMIT = 5  # seconds, the process group's own timeout


class Fatal:
    """A kernel that ends its process when `method` is first called."""

    def __init__(self, kernel, method):
        self.kernel, self.method = kernel, method

    def __getattr__(self, name):
        if name == self.method:
            os._exit(1)
        return getattr(self.kernel, name)


def mourned(method):
    """Rank 1 dies at its first step, after its first hop; return the others' (seconds, message)."""
    tensors = [x.double().requires_grad_() for x in qkv()]
    groups = mb.Groups.flat(dist.group.WORLD)
    plan = mb.prepare(*tensors, groups=groups, kernel="reference", side="query")
    if groups.rank == 1:
        plan = plan.with_kernel(Fatal(plan.kernel, method))
    start = time.monotonic()
    try:
        mb.attention(*tensors, plan=plan).sum().backward()
    except RuntimeError as error:
        return time.monotonic() - start, str(error)


@pytest.mark.parametrize(("method", "family"), [("forward", "kv"), ("backward", "query")])
def test_a_rank_that_dies_mid_ring_is_named_by_its_exchange(method, family):
    """Rank 2 sends to rank 1 or waits for it, in both directions of the ring.

    Rank 0 may detect it a little later.
    """
    pool = Workers(3, timeout=LIMIT)
    first, dead, last = pool.run(mourned, method, may_die=[1])
    assert dead is None
    for seconds, message in (first, last):
        assert seconds < 2 * LIMIT
        assert message.startswith("exchange failed: attention ")
    assert f"exchange failed: attention {method}" in last[1]
    hop = rf"{family} of rank \d from rank (1 to rank 2|2 to rank 1)"
    assert re.search(rf"rank 2: .*{hop}", last[1]), last[1]


def abandoned(where):
    """Rank 1 skips the plan, or the ring; return the message of rank 0's error."""
    groups = mb.Groups.flat(dist.group.WORLD)
    try:
        if dist.get_rank() == 0 or where == "ring":
            plan = mb.prepare(*qkv(), groups=groups)
        if dist.get_rank() == 0:
            mb.attention(*qkv(), plan=plan)
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("plan", "exchange failed: comparison of arguments"),
        ("ring", "exchange failed: attention forward.* kv of rank "),
    ],
)
def test_a_rank_that_never_comes_is_an_error_within_the_timeout(where, words):
    pool = Workers(2, timeout=2)
    try:
        message, _ = pool.run(abandoned, where, timeout=30)
    finally:
        pool.close()
    assert re.search(words, message), message
