"""Arguments that operations on chains refuse, and the error messages."""

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import megatron_burst as mb
from megatron_burst.plugins.testing import in_process

S, B, G, H, D, W = 4, 2, 1, 2, 3, 4


def given(**changes):
    """Return the keywords of a valid call on two ranks, with changes."""
    each = {"q": (S, B, G, D), "k": (S, B, G, D), "v": (S, B, H, W)}
    tensors = {name: [torch.randn(shape) for _ in range(2)] for name, shape in each.items()}
    return tensors | {"groups": in_process.groups(intra=2)} | changes


def two(*shape, dtype=torch.float32):
    return [torch.zeros(shape, dtype=dtype) for _ in range(2)]


WRONG = {
    "no list": (
        {"q": torch.zeros(S, B, G, D)},
        "q: groups hold 2 ranks .*, got tensor",
    ),
    "three dimensions": ({"q": two(S, B, D)}, r"q must be \[s, b, g, d\]"),
    "k": ({"k": two(S, B, G, D + 1)}, r"k must be \[s, b, g, d\], here \[4, 2, 1, 3\]"),
    "heads": ({"q": two(S, B, 3, D), "k": two(S, B, 3, D)}, "3 heads of q and k must divide"),
    "dtypes": ({"v": two(S, B, H, W, dtype=torch.float64)}, "v must have the device and the"),
    "decay": ({"decay": two(S, B, 3)}, r"decay must be \[s, b, h\] or \[s, b, h, d\] or \[h\]"),
    "beta": ({"beta": two(S, B, 1)}, r"beta must be \[s, b, h\]"),
    "form": ({"form": "kda"}, "form kda"),
    "no form": ({"form": "mamba"}, "form must be one of auto, linear"),
    "kernel": ({"kernel": "best"}, "kernel must be one of auto"),
    "algorithm": ({"algorithm": "burst"}, "algorithm must be one of auto, all_gather, scan"),
    "rates": ({"rates": 3, "algorithm": "auto"}, "rates must be mb.Rates whose intra is a number"),
    "rates beside": (
        {"rates": mb.Rates(1.0, 1.0), "algorithm": "ring"},
        "rates require algorithm='auto'",
    ),
    "batch first": (
        {n: two(1, 8, *end) for n, end in {"q": (1, D), "k": (1, D), "v": (H, W)}.items()},
        r"multiple of 4, got 2; .*; rows come first, then the batch; use transpose\(0, 1\)",
    ),
    "batch first, packed": (
        {n: two(2, 8, *end) for n, end in {"q": (1, D), "k": (1, D), "v": (H, W)}.items()}
        | {"cu_seqlens": [0, 16]},
        "cu_seqlens must end at 4, .* of the 2 ranks, got 16; rows come first",
    ),
    "decay batch first": ({"decay": two(B, S, H)}, r"got \[2, 4, 2\]; rows come first"),
    "scale": ({"scale": float("inf")}, "scale must be a finite number or None, got inf"),
    "layout": ({"layout": "diagonal"}, "layout must be one of balanced, contiguous"),
    "striped": ({"layout": "striped"}, "use layout zigzag, contiguous or balanced"),
    "other ranks": ({"layout": mb.layout.make("zigzag", cp_size=4)}, "layout is for 4 ranks"),
    "balanced": ({"layout": "balanced"}, "cu_seqlens: layout balanced needs"),
    "documents": ({"cu_seqlens": [0, 5]}, "cu_seqlens must end at 8, .* of the 2 ranks, got 5"),
    "decreasing": ({"cu_seqlens": [0, 9, 8]}, "cu_seqlens must be integers that start at 0"),
    "initial": ({"initial_state": torch.zeros(2, B, H, D, W)}, "initial_state must be"),
    "groups": ({"groups": None}, "groups must be made with mb.Groups, got None"),
    "label": ({"label": 1.5}, "label must be a string, .* got 1.5, of type float"),
    "huge scale": ({"scale": 10**400}, "scale must be a finite number or None, got 1000"),
    "list of decays": ({"decay": [[0.0] * 99] * 2}, r"got decay \[0.0, 0.0, .{,100}$"),
    "plan": ({"plan": 3, "groups": None}, "plan must be made by mb.prepare_linear, got 3"),
    "empty layout": ({"layout": ""}, "layout must be one of balanced, contiguous"),
    "empty algorithm": ({"algorithm": ""}, "algorithm must be one of auto, all_gather, scan"),
    "empty form": ({"form": ""}, "form must be one of auto, linear"),
    "kernel 0": ({"kernel": 0}, "kernel must be one of auto, .*got 0"),
    "final": ({"return_final_state": "no"}, "return_final_state must be True or False, got 'no'"),
    "few": ({"initial_state": [torch.zeros(1, B, H, D, W)]}, "initial_state: groups hold 2 ranks"),
    "some": (
        {"initial_state": [torch.zeros(1, B, H, D, W), None]},
        "ranks disagree: rank 0 has initial_state .*, rank 1 has initial_state None",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_linear_attention_refuses(case):
    wrong, words = WRONG[case]
    with pytest.raises(ValueError, match=words):
        in_process.linear_attention(**given(**wrong))


SCANS = {
    "pieces": ({"increment": two(1, B, H, D, W)}, r"increment must be \[p, b, h, d, w\]"),
    "decay": ({"decay": [torch.zeros(p, B, H, W) for p in (2, 1)]}, "decay must be"),
    "length": ({"seq_len": None}, "seq_len must be an integer, got None"),
    "odd": ({"seq_len": 7}, "over 2 ranks needs a positive multiple of 4, got 7"),
}


@pytest.mark.parametrize("case", SCANS)
def test_what_the_state_scan_refuses(case):
    wrong, words = SCANS[case]
    keywords = {"decay": None, "increment": [torch.zeros(p, B, H, D, W) for p in (2, 1)],
                "groups": in_process.groups(intra=2), "seq_len": 8} | wrong  # fmt: skip
    with pytest.raises(ValueError, match=words):
        in_process.state_scan(keywords.pop("decay"), keywords.pop("increment"), **keywords)


def test_a_plan_serves_what_it_was_made_for_alone():
    keywords = given()
    plan = in_process.prepare_linear(**keywords)
    tensors = {name: keywords[name] for name in "qkv"}
    in_process.linear_attention(**tensors, plan=plan)
    wrong = {
        r"plan cannot be combined with \['groups'\]": keywords,
        "plan: made for v": tensors | {"v": two(S, B, H, W + 1)},
        "plan: made for decay None": tensors | {"decay": two(S, B, H)},
        "return_final_state must be": tensors | {"return_final_state": 1},
        "initial_state: groups hold 2 ranks in this process; pass a list with one": tensors
        | {"initial_state": [torch.zeros(1, B, H, D, W)]},
    }
    for words, call in wrong.items():
        with pytest.raises(ValueError, match=words):
            in_process.linear_attention(**call, plan=plan)
    weight = torch.zeros(3, 2)
    with pytest.raises(ValueError, match="x must be"):
        in_process.short_convolution(two(S + 1, B, 3), weight, plan=plan)
    for unequal in (
        [torch.zeros(S, b, 3) for b in (B, 1)],
        [torch.zeros(S, B, 3, dtype=t) for t in (torch.float32, torch.float64)],
    ):
        with pytest.raises(RuntimeError, match=r"exchange failed|was sent, but"):
            in_process.short_convolution(unequal, weight, plan=plan)
    with pytest.raises(ValueError, match=r"label must be a string, .* got 1.5, of type float"):
        in_process.short_convolution(two(S, B, 3), weight, plan=plan, label=1.5)


def test_a_sparse_tensor_beside_a_plan_is_refused():
    keywords = given()
    plan = in_process.prepare_linear(**keywords)
    tensors = {name: keywords[name] for name in "qkv"}
    tensors["q"] = [t.to_sparse() for t in tensors["q"]]
    with pytest.raises(ValueError, match="q must be a tensor, and not sparse, got tensor"):
        in_process.linear_attention(**tensors, plan=plan)


def test_a_plan_is_prepared_by_the_keywords_of_a_call():
    """None selects each default, and a decay [h] is the same on all ranks."""
    keywords = given(decay=-torch.rand(H))
    none = dict.fromkeys(("form", "algorithm", "kernel", "layout", "scale", "cu_seqlens"))
    plan = in_process.prepare_linear(**keywords, **none)
    tensors = {name: keywords[name] for name in ("q", "k", "v", "decay")}
    for one, other in zip(
        in_process.linear_attention(**tensors, plan=plan),
        in_process.linear_attention(**keywords),
        strict=True,
    ):
        assert torch.equal(one, other)


def test_numbers_of_numpy_are_numbers():
    keywords = given()
    one, other = (in_process.linear_attention(**keywords, scale=x) for x in (np.float32(0.5), 0.5))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    groups, written = keywords["groups"], [torch.ones(p, B, H, D, W) for p in (2, 1)]
    actual = in_process.state_scan(None, written, groups=groups, seq_len=np.int64(8))
    assert [t[:, 0, 0, 0, 0].tolist() for t in actual] == [[0.0, 2.0], [1.0]]


def maps(kind, dtype=torch.float32, **sizes):
    """Return decays and increments of two zigzag ranks, [2 or 1, B, H, D, W] by default."""
    b, h, d, w = ({"b": B, "h": H, "d": D, "w": W} | sizes).values()
    beyond = {"scalar": (), "vector": (d,), "matrix": (d, d)}.get(kind)
    decays = [torch.zeros(p, b, h, *(beyond or ()), dtype=dtype) for p in (2, 1)]
    increments = [torch.zeros(p, b, h, d, w, dtype=dtype) for p in (2, 1)]
    return None if beyond is None else decays, increments


def scalars(*sizes):
    return [torch.zeros(p, *sizes) for p in (2, 1)]


# kind of the plan -> what is wrong, and the words
PLANNED = {
    "columns": ("none", maps("none", w=W + 1), r"increment must be \[p, b, h, d, w\]"),
    "no increment": ("none", (None, [None, None]), "increment must be a tensor"),
    "float64": (
        "none",
        maps("none", torch.float64),
        "increment: the plan has states in torch.f",
    ),
    "one head": ("scalar", (scalars(B, 1), maps("none")[1]), r"decay must be \[p, b, h\], here"),
    "other kind": ("scalar", maps("vector"), r"decay must be \[p, b, h\], here"),
    "no decay": ("vector", maps("none"), r"decay must be a tensor \[p, b, h, d\]"),
    "a decay": ("none", maps("scalar"), "decay must be None: .* without decay; got a Tensor"),
    "integers": ("scalar", (two(2, B, H, dtype=torch.int64), maps("none")[1]), "decay must have"),
}


@pytest.mark.parametrize("case", PLANNED)
def test_what_the_state_scan_refuses_of_a_plan(case):
    kind, wrong, words = PLANNED[case]
    call = {
        "none": {}, "scalar": {"decay": two(S, B, H)}, "vector": {"decay": two(S, B, H, D)}
    }[kind]  # fmt: skip
    plan = in_process.prepare_linear(**given(**call))
    in_process.state_scan(*maps(kind), plan=plan)
    in_process.state_scan(*maps(kind, torch.bfloat16), plan=plan)
    with pytest.raises(ValueError, match=words):
        in_process.state_scan(*wrong, plan=plan)


def test_a_decay_that_grows_is_warned_of():
    with pytest.warns(UserWarning, match="decay has positive logarithms"):
        in_process.linear_attention(**given(decay=torch.ones(H)))


TRANSFORMS = {
    "grad": lambda loss, x: torch.func.grad(loss)(x),
    "vmap": lambda loss, x: torch.func.vmap(loss)(x[None]),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_function_transforms_are_refused(transform):
    call = given()
    k, v = call["k"][0], call["v"][0]

    def loss(q):
        return mb.linear_attention(q, k, v, groups=mb.Groups.single()).sum()

    with pytest.raises(ValueError, match=r"mb.linear_attention cannot run inside torch.func"):
        TRANSFORMS[transform](loss, call["q"][0])


@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_a_checkpoint(reentrant):
    """A reentrant checkpoint is around all ranks, another one around the call of each rank."""
    call, calls = given(), []
    tensors = [call.pop(name) for name in "qkv"]
    leaves = [t.double().requires_grad_() for shards in tensors for t in shards]
    groups = call["groups"]

    def of_rank(rank, q, k, v):
        calls.append(rank)
        return mb.linear_attention(q, k, v, groups=groups.ranks[rank])

    def checkpointed(*given):
        return checkpoint(of_rank, *given, use_reentrant=False)

    def outputs(function, *flat):
        shards = (flat[i : i + 2] for i in (0, 2, 4))
        return torch.cat(in_process.on_ranks(groups, function, [0, 1], *shards))

    truth = torch.autograd.grad(outputs(of_rank, *leaves).square().sum(), leaves)
    calls.clear()
    if reentrant:
        out = checkpoint(outputs, of_rank, *leaves, use_reentrant=True)
    else:
        out = outputs(checkpointed, *leaves)
    out.square().sum().backward()
    assert sorted(calls) == [0, 0, 1, 1]
    for leaf, expected in zip(leaves, truth, strict=True):
        assert torch.equal(leaf.grad, expected)
