"""Arguments that selections and sparse attention refuse, with equal errors on every rank."""

from dataclasses import replace

import pytest
import torch

import megatron_burst as mb
from megatron_burst.plugins.sparse import rules
from megatron_burst.plugins.testing import in_process

S, B, D, TOP_K = 32, 1, 4, 3
LAYOUT = mb.layout.make("zigzag", cp_size=2)
GROUPS = in_process.groups(intra=2)


def tensors(*sizes, rows=S // 2):
    return [[torch.ones(rows, B, *size, dtype=torch.float64) for _ in range(2)] for size in sizes]


def index(heads=2, key_heads=1):
    return tensors((heads, D), (key_heads, D), (heads,))


def select(*arguments, **named):
    arguments = arguments or index()
    options = {"rule": "dsa", "top_k": TOP_K, "groups": GROUPS, "layout": LAYOUT} | named
    return in_process.select(*arguments, **options)


MSA = rules.Msa(block=4)
SELECTING = {
    "top_k must be a positive integer, got 0": {"top_k": 0},
    "top_k must be .* got 2.5": {"top_k": 2.5},
    "rule must be one of dsa, qsa, moba, msa, nsa, or": {"rule": "best"},
    "top_k must be at least 3 .the number of blocks that rule Nsa always": {
        "rule": "nsa",
        "top_k": 2,
    },
    "rule: means must divide its block of 64 .* got 5": {"rule": rules.Nsa(means=5)},
    "got <class .*Dsa": {"rule": rules.Dsa},
    "rule: block must be a positive integer, got 0": {"rule": rules.Moba(block=0)},
    "algorithm: sparse attention needs .* got 'token_ring'": {"algorithm": "token_ring"},
    "algorithm must be one of": {"algorithm": "circle"},
    "layout striped cuts the blocks of 4": {
        "rule": rules.Qsa(), "layout": mb.layout.make("striped", cp_size=2),
    },
    "layout zigzag cuts the blocks of 16": {"rule": rules.Qsa(block=16)},
    "supports Causal, Full and Documents.* got Window": {
        "rule": rules.Qsa(), "mask": mb.masks.Window(8, 0),
    },
    "start at multiples of 4": {
        "rule": rules.Qsa(), "mask": mb.masks.Documents([0, 6, S]) & mb.masks.Causal(),
    },
    "groups must be made with mb.Groups": {"groups": None},
    "layout is for 4 ranks": {"layout": mb.layout.make("zigzag", cp_size=4)},
    "does not share heads between ranks": {"groups": in_process.groups(intra=2, ulysses=2)},
    "plan must be made by mb.prepare": {"plan": 3, "groups": None, "layout": None},
    "plan cannot be combined with": {"plan": 3},
}  # fmt: skip


@pytest.mark.parametrize("words", SELECTING)
def test_selections_that_are_refused(words):
    with pytest.raises(ValueError, match=words):
        select(**SELECTING[words])


INDEX = {
    "index_weights: rule Dsa requires a tensor": (*index()[:2], None),
    "index_weights: rule Msa requires None": (*index(),),
    "one index key head, got 2": (*index(2, 2),),
    "index_weights must have shape": (*index()[:2], index(3)[2]),
    "index_weights must have .* torch.float64, got .* torch.float32": (
        *index()[:2],
        [x.float() for x in index()[2]],
    ),
    "index_q must be a tensor": ([None, None], *index()[1:]),
    "index_q and index_k .here named q and k.: k: .* must divide": (*index(3, 2),),
}


@pytest.mark.parametrize("words", INDEX)
def test_index_tensors_that_are_refused(words):
    with pytest.raises(ValueError, match=words):
        select(*INDEX[words], rule=MSA if "Msa" in words else "dsa")


def attend(selections, q=None, **named):
    sizes = (4, D), (2, D), (2, D)
    options = {"groups": GROUPS} | named
    return in_process.sparse_attention(*(q or tensors(*sizes)), selections, **options)


def changed(**fields):
    return [replace(each, **fields) for each in select()]


def with_ids(change):
    ids = select()[0].ids.clone()
    return changed(ids=change(ids))


ATTENDING = {
    "selection must be an mb.Selection": lambda: attend([None, None]),
    "ids must be int32": lambda: attend(with_ids(torch.Tensor.long)),
    "ids must be -1 .* or positions from 0 to 31, got ids from -1 to 32": lambda: attend(
        with_ids(lambda x: x.masked_fill(x == 2, 32))),
    "ids must be -1 .* or positions from 0 to 31, got ids from -2": lambda: attend(
        with_ids(lambda x: x - 1)),
    "must not be empty, got": lambda: attend(with_ids(lambda x: x[..., :0])),
    "must be in ascending order": lambda: attend(with_ids(lambda x: x.flip(-1))),
    "ids have .rows, batch. \\(12, 1\\)": lambda: attend(with_ids(lambda x: x[:12])),
    "ids have 3 heads, which must divide the 4": lambda: attend(
        with_ids(lambda x: x.expand(-1, -1, 3, -1))),
    "block must be a positive divisor": lambda: attend(changed(block=5)),
    "made for layout .*Contiguous": lambda: attend(
        changed(layout=mb.layout.make("contiguous", cp_size=2)), groups=None, plan=PLAN),
    "made for mask Full": lambda: attend(changed(mask=mb.masks.Full()), groups=None, plan=PLAN),
    "kernel must be one of auto, aten, triton, reference": lambda: attend(
        select(), kernel="flash"),
    "kernel triton (needs the package triton|runs on cuda tensors, got cpu)": lambda: attend(
        select(), kernel="triton"),
    "value_width requires v=None": lambda: attend(select(), value_width=2),
    "number of columns of k below its width 4": lambda: attend(
        select(), [*tensors((4, D), (1, D)), None], value_width=4),
    "sink must be a floating-point tensor": lambda: attend(select(), sink=torch.ones(3)),
    "plan: sparse attention has no softcap": lambda: attend(
        select(), groups=None, plan=in_process.prepare(
            *tensors((4, D), (2, D), (2, D)), groups=GROUPS, layout=LAYOUT, softcap=2.0,
            kernel="reference")),
    "algorithm: sparse attention needs": lambda: attend(select(), algorithm="tile"),
}  # fmt: skip
PLAN = in_process.prepare(*tensors((4, D), (2, D), (2, D)), groups=GROUPS, layout=LAYOUT)


@pytest.mark.parametrize("words", ATTENDING)
def test_attention_that_is_refused(words):
    with pytest.raises(ValueError, match=words):
        ATTENDING[words]()


def test_a_plan_has_the_scale():
    arguments = tensors((4, D), (2, D), (2, D))
    for x in arguments[0]:
        x.copy_(torch.arange(x.numel()).view_as(x) / 50)
    arguments[1] = [torch.arange(x.numel()).view_as(x) / 50.0 for x in arguments[1]]
    arguments[1] = [x.double() for x in arguments[1]]
    arguments[2] = arguments[1]
    plan = in_process.prepare(*arguments, groups=GROUPS, layout=LAYOUT, softmax_scale=0.3)
    (own, *_), (other, *_) = (
        in_process.sparse_attention(*arguments, select(), **named)
        for named in ({"plan": plan}, {"groups": GROUPS, "scale": 0.3})
    )
    assert torch.equal(own, other)
    assert not torch.equal(own, attend(select(), arguments)[0])


def test_it_is_differentiated_once():
    q, k, v = tensors((4, D), (2, D), (2, D))
    q = [x.requires_grad_() for x in q]
    outs = attend(select(), [q, k, v])
    with pytest.raises(RuntimeError, match=r"mb\.sparse_attention cannot be differentiated twice"):
        torch.autograd.grad(outs[0].sum(), q[0], create_graph=True)
