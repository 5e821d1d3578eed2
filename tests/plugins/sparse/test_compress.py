"""`mb.compress` against loops over documents, windows and columns, in float64."""

import oracle
import pytest
import torch

import megatron_burst as mb
from megatron_burst.plugins.testing import in_process

B, C, M = 2, 3, 4
BOUNDS, KEYS = [0, 13, 13, 39, 48], [0, 3, 3, 9, 12]  # the last document has a padding key
LAYOUTS = [
    (1, "zigzag", "contiguous"), (2, "zigzag", "zigzag"), (2, "contiguous", "contiguous"),
    (2, "striped", "zigzag"), (3, "contiguous", "striped"), (4, "balanced", "contiguous"),
]  # fmt: skip


def by_hand(values, gates, bias, packed, overlap):
    """The compressed keys of the whole sequence, one after the other."""
    bounds, keys = (BOUNDS, KEYS) if packed else ([0, 48], [0, 12])
    found = []
    for low, high, first, last in zip(bounds, bounds[1:], keys, keys[1:], strict=False):
        for w in range(last - first):
            begin = low + w * M
            if begin + M > high:
                found.append(torch.zeros(B, C, dtype=torch.float64))
                continue
            own = slice(C, 2 * C) if overlap else slice(0, C)
            terms = [(begin + j, j, own) for j in range(M)]
            if overlap and w:
                terms += [(begin - M + j, j, slice(0, C)) for j in range(M)]
            weight = torch.stack([gates[t, :, part] + bias[j, part] for t, j, part in terms]).exp()
            total = sum(weight[n] * values[t, :, part] for n, (t, _, part) in enumerate(terms))
            found.append(total / weight.sum(0))
    return torch.stack(found)


def made(ranks, layout, key_layout, packed):
    groups = in_process.groups(intra=ranks)
    layout = mb.layout.make(
        layout, cp_size=ranks, **{"cu_seqlens": BOUNDS} if layout == "balanced" else {}
    )
    key_layout = mb.layout.make(key_layout, cp_size=ranks)
    mask = mb.masks.Compressed(M)
    if packed:
        mask = mb.masks.Compressed(M, cu_seqlens=BOUNDS, key_cu_seqlens=KEYS)
    q = [torch.empty(48 // ranks, B, 1, 4, dtype=torch.float64) for _ in range(ranks)]
    k = [torch.empty(12 // ranks, B, 1, 4, dtype=torch.float64) for _ in range(ranks)]
    plan = in_process.prepare(
        q, k, k, groups=groups, layout=layout, key_layout=key_layout, mask=mask
    )
    return groups, layout, key_layout, plan


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("ranks", "layout", "key_layout"), LAYOUTS)
def test_equals_loops(ranks, layout, key_layout, packed, overlap):
    _, layout, key_layout, plan = made(ranks, layout, key_layout, packed)
    torch.manual_seed(ranks)
    columns = C * (1 + overlap)
    values, gates = (
        torch.randn(48, B, columns, dtype=torch.float64, requires_grad=True) for _ in range(2)
    )
    bias = torch.randn(M, columns, dtype=torch.float64, requires_grad=True)
    wanted = by_hand(values, gates, bias, packed, overlap)
    gradient = torch.randn_like(wanted)
    expected = torch.autograd.grad(wanted, (values, gates, bias), gradient)
    shards = [
        [mb.shard(x.detach(), layout, rank).requires_grad_() for rank in range(ranks)]
        for x in (values, gates)
    ]
    own = bias.detach().clone().requires_grad_()
    got = [in_process.compress(*shards, own, plan=plan, overlap=overlap, label=n) for n in (0, 1)]
    for keys in got:  # two in flight
        torch.autograd.backward(keys, [mb.shard(gradient, key_layout, r) for r in range(ranks)])
    assert oracle.worst(mb.unshard(got[1], key_layout), wanted.detach()) < 1e-12
    for parts, whole in zip(shards, expected, strict=False):
        assert oracle.worst(mb.unshard([x.grad for x in parts], layout), 2 * whole) < 1e-12
    assert oracle.worst(own.grad, 2 * expected[2]) < 1e-12


@pytest.mark.parametrize(("overlap", "windows"), [(False, 0), (True, 1)])
def test_only_windows_of_other_ranks_are_sent(overlap, windows):
    """With contiguous rows and keys, only the window before the first own window is sent."""
    groups, _, _, plan = made(3, "contiguous", "contiguous", False)
    groups.ranks[0].counters.reset()
    columns = C * (1 + overlap)
    x = [torch.randn(16, B, columns, dtype=torch.float64) for _ in range(3)]
    in_process.compress(x, x, torch.zeros(M, columns).double(), plan=plan, overlap=overlap)
    assert groups.counters.intra == windows * M * B * C * 8 * 2


def test_low_precision_is_summed_in_float32():
    _, _, _, plan = made(2, "zigzag", "zigzag", False)
    torch.manual_seed(0)
    values, gates = ([torch.randn(24, B, C).bfloat16() for _ in range(2)] for _ in range(2))
    bias = torch.randn(M, C)
    low = in_process.compress(values, gates, bias, plan=plan)
    wide = in_process.compress(
        [x.double() for x in values], [x.double() for x in gates], bias.double(), plan=plan
    )
    for got, wanted in zip(low, wide, strict=True):
        assert got.dtype == torch.bfloat16
        assert torch.equal(got, wanted.float().bfloat16())


ROWS = torch.randn(12, 2, 6, dtype=torch.float64)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"plan": None}, "plan must be made by mb.prepare"),
        ({"gates": ROWS[:, :, :4]}, "gates must have the shape and dtype of values"),
        ({"values": ROWS[:8], "gates": ROWS[:8]}, "values must have the 12 rows, batch 2"),
        (
            {"values": ROWS[..., :3], "gates": ROWS[..., :3], "overlap": True},
            "positive even number of columns",
        ),
        ({"bias": torch.zeros(3, 6)}, r"bias must be \(4, 6\) on cpu, got \(3, 6\)"),
        ({"overlap": 1}, "overlap must be True or False"),
        ({"mask": mb.masks.Full()}, r"plan with mask mb.masks.Compressed\(m\)"),
        ({"mask": mb.masks.Compressed(2, 4)}, "windows without gaps or overlaps"),
        ({"key_layout": "replicated"}, "keys that are split over ranks, got key_layout=Replicated"),
    ],
)
def test_refusals(change, error):
    q, k = ROWS[:, :, None], torch.zeros(5, 2, 1, 6, dtype=torch.float64)
    options = {"key_layout": "contiguous", "mask": mb.masks.Compressed(4)}
    options |= {name: change[name] for name in options if name in change}
    plan = mb.prepare(q, k, k, groups=mb.Groups.single(), **options)
    arguments = {"values": ROWS, "gates": ROWS, "bias": torch.zeros(4, 6), "plan": plan}
    arguments |= {name: x for name, x in change.items() if name not in options}
    with pytest.raises(ValueError, match=error):
        mb.compress(**arguments)
