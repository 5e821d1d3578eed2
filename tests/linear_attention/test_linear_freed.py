"""Tensors of a call of linear attention are freed with its results, without the collector."""

import gc
import weakref

import pytest
from test_linear_attention_ranks import FORMS, problem

import megatron_burst as mb
from megatron_burst.plugins.testing import in_process


def forward_and_backward(form, backward, reverse=None):
    """Return references to the tensors of a call on two ranks after its results are dropped."""
    *arguments, _ = problem(form, [0, 16])
    groups, layout = in_process.groups(intra=2), mb.layout.make("zigzag", cp_size=2)
    names, shards = ("q", "k", "v", "decay", "beta"), {}
    for name, t in zip(names, arguments, strict=True):
        split = t is not None and t.dim() > 1
        shards[name] = [mb.shard(t, layout, r, dim=0) for r in range(2)] if split else t
    held_bytes = [
        weakref.ref(t) for each in shards.values() if isinstance(each, list) for t in each
    ]
    outs = in_process.linear_attention(
        shards["q"], shards["k"], shards["v"], decay=shards["decay"], beta=shards["beta"],
        groups=groups, reverse=reverse,
    )  # fmt: skip
    held_bytes += [weakref.ref(t) for t in outs]
    if backward:
        sum(out.sum() for out in outs).backward()
    return held_bytes


CASES = [(form, None) for form in FORMS] + [("kda", True), ("kda", "both")]


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize(("form", "reverse"), CASES)
def test_everything_is_freed(form, reverse, backward):
    gc.collect()
    gc.disable()
    try:
        held_bytes = forward_and_backward(form, backward, reverse)
        assert len(held_bytes) >= 8
        assert not [each() for each in held_bytes if each() is not None]
    finally:
        gc.enable()
