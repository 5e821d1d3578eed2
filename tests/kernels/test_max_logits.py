"""The largest scores of each head, which a call records on request, against a dense oracle.

One rank records the largest score of its own rows, for the heads whose ring it runs. The maximum
over ranks is the maximum of the whole sequence.
"""

import math

import oracle
import pytest
import torch

import megatron_burst as mb
from megatron_burst.kernels import registry
from megatron_burst.kernels.base import Scoring
from megatron_burst.planning.validate import check_max_logits
from megatron_burst.plugins.testing import in_process

LENGTH, HEADS, KV_HEADS = 24, 4, 2


def tensors(dtype=torch.float64):
    torch.manual_seed(3)
    q, k = torch.randn(LENGTH, 2, HEADS, 6), torch.randn(LENGTH, 2, KV_HEADS, 6)
    return [x.to(dtype) for x in (q, k, torch.randn(LENGTH, 2, KV_HEADS, 5))]


def by_hand(q, k, seen, scale, rows=slice(None), softcap=None):
    """Return [h]: the largest visible score of these rows, in float64."""
    found = torch.full((q.shape[2],), -math.inf, dtype=torch.float64)
    for batch in range(q.shape[1]):
        for head in range(q.shape[2]):
            key = k[:, batch, head // (q.shape[2] // k.shape[2])].double()
            scores = q[:, batch, head].double() @ key.T * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            visible = scores[rows][seen[rows]]
            if len(visible):
                found[head] = max(found[head], visible.max())
    return found


def apart(x, layout, ranks):
    return [x[rows] for rows in oracle.permutation(layout, ranks, len(x))]


@pytest.mark.parametrize(
    ("grid", "choices"),
    [
        ({"inter": 2, "intra": 2}, {"layout": "zigzag", "softmax_scale": 0.7}),
        ({"inter": 1, "intra": 3}, {"layout": "contiguous", "algorithm": "ring"}),
        ({"inter": 1, "intra": 4}, {"layout": "striped", "algorithm": "all_gather"}),
        ({"inter": 1, "intra": 2}, {"layout": "striped", "head_chunks": 2, "softcap": 1.5}),
        ({"inter": 1, "intra": 4, "ulysses": 2}, {"algorithm": "hybrid", "softmax_scale": 0.3}),
        ({"inter": 1, "intra": 2, "ulysses": 2}, {"algorithm": "ulysses", "layout": "contiguous"}),
    ],
)
@pytest.mark.parametrize("mask", ["causal", "gap"])
def test_the_maximum_over_all_ranks_is_that_of_the_whole_sequence(grid, choices, mask):
    q, k, v = tensors()
    groups = in_process.groups(**grid)
    seen = oracle.visible(mask, LENGTH)
    rule = mb.masks.Causal() if mask == "causal" else mb.masks.Dense(seen.numpy())
    shards = [apart(x, choices.get("layout", "zigzag"), groups.size) for x in (q, k, v)]
    found = torch.full((HEADS,), -math.inf, dtype=torch.float64)
    in_process.attention(
        *shards, groups=groups, mask=rule, kernel="reference", max_logits=found, **choices
    )
    scale = choices.get("softmax_scale", 6**-0.5)
    wanted = by_hand(q, k, seen, scale, softcap=choices.get("softcap"))
    assert oracle.worst(found, wanted) < 1e-10


def test_it_is_raised_from_call_to_call_and_a_sink_does_not_count():
    q, k, v = (x.float() for x in tensors())
    groups, seen = in_process.groups(intra=2), oracle.visible("causal", LENGTH)
    shards = [apart(x, "zigzag", 2) for x in (q, k, v)]
    found = torch.full((HEADS,), -math.inf)
    sink = torch.full((HEADS,), 99.0)
    wanted = by_hand(q, k, seen, 6**-0.5)
    plan = in_process.prepare(*shards, groups=groups, kernel="reference", max_logits=found)
    for factor, largest in ((1.0, 1.0), (0.1, 1.0), (2.0, 2.0)):
        scaled = [factor * x for x in shards[0]]
        in_process.attention(scaled, *shards[1:], plan=plan, max_logits=found, sink=sink)
        assert oracle.worst(found, largest * wanted) < 1e-5


def test_a_checkpoint_that_runs_a_part_again_records_no_less():
    shards = [[x.requires_grad_() for x in apart(x, "striped", 2)] for x in tensors()]
    groups, seen = in_process.groups(intra=2), oracle.visible("causal", LENGTH)
    found = torch.full((HEADS,), -math.inf, dtype=torch.float64)

    def layer(group, *qkv):
        return mb.attention(
            *qkv, groups=group, layout="striped", kernel="reference", max_logits=found
        )

    outs = in_process.checkpoint(groups, layer, groups.ranks, *shards, keep=0.5)
    torch.stack(outs).sum().backward()
    q, k = (x.detach() for x in tensors()[:2])
    assert oracle.worst(found, by_hand(q, k, seen, 6**-0.5)) < 1e-10


def test_kernels_that_cannot_tell_are_refused_and_auto_passes_them_by():
    x = torch.zeros(8, 1, 2, 16)
    for name in ("aten", "auto"):
        with pytest.raises(ValueError, match=r"kernel aten does not return .*kernel='reference'"):
            registry.make(name, x, x, x, maximum=True)
    assert registry.make("reference", x, x, x, maximum=True).name == "reference"
    assert registry.make("auto", x, x, x).name == "aten"


def test_a_kernel_of_an_operator_asserts_that_nothing_needs_the_maximum():
    x = torch.zeros(8, 1, 2, 16)
    kernel = registry.make("aten", x, x, x)
    with pytest.raises(AssertionError, match="kernel aten does not return the largest scores"):
        kernel.forward(x, x, x, (), Scoring(1.0), x, x[..., 0], max_logits=torch.zeros(2))


@pytest.mark.parametrize(
    "wrong",
    [torch.zeros(3), torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2, requires_grad=True),
     torch.zeros(2, device="meta"),
         torch.zeros(2, 2)[:, 0], torch.zeros(1).expand(2), True],
)  # fmt: skip
def test_another_tensor_is_refused(wrong):
    x, groups = torch.zeros(8, 1, 2, 16), in_process.groups(intra=1)
    with pytest.raises(
        ValueError, match=r"max_logits must be a contiguous torch.float32 tensor \[2\]"
    ):
        in_process.attention([x], [x], [x], groups=groups, kernel="reference", max_logits=wrong)


def test_a_valid_tensor_is_not_printed(monkeypatch):
    """The text of a CUDA tensor has its values, so printing it would synchronize."""

    def printed(self, **named):
        raise AssertionError("max_logits was printed")

    monkeypatch.setattr(torch.Tensor, "__repr__", printed)
    check_max_logits(torch.zeros(2), torch.zeros(8, 1, 2, 16))


def test_a_plan_made_without_it_says_so():
    x, groups = torch.zeros(8, 1, 2, 16), in_process.groups(intra=1)
    plan = in_process.prepare([x], [x], [x], groups=groups)
    with pytest.raises(ValueError, match=r"kernel aten of this plan does not return.*mb\.prepare"):
        in_process.attention([x], [x], [x], plan=plan, max_logits=torch.zeros(2))
