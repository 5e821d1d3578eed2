"""Attention of whole DeepSeek-V4 layers over ranks against dense layers, in float64.

Three kinds of layers: a window; a window and all compressed keys; a window and selected compressed
keys. Outputs and all gradients are within 1e-10 on 1, 2, 4 and 8 ranks; selected keys are equal.
"""

from dataclasses import replace

import compressed_oracle
import oracle
import pytest
import torch
from compressed_layer import Placed, attend, gradients, joined, masks, plans, split
from compressed_oracle import INDEX, ROWS, SHARED, LayerShape, keys_of_documents

import megatron_burst as mb
from megatron_burst.plugins.sparse.attention import selected_plan
from megatron_burst.plugins.testing import in_process

LENGTH, KEYS = 96, 32
ALL = {*ROWS, *SHARED}
# Documents of 3 rows (less than a window), none, 1 row, and a last one that may be padding.
BOUNDS = (0, 3, 3, 30, 31, 77, 96)
KINDS = {
    "window": LayerShape("window", LENGTH, KEYS, 4, (0, LENGTH), (0, 24), 5),
    "csa": LayerShape("csa", LENGTH, KEYS, 4, (0, LENGTH), (0, 24), 5, overlap=True, scale=0.3),
    "hca": LayerShape("hca", LENGTH, 16, 12, (0, LENGTH), (0, 8), 7, compressed_heads=3),
    "dense": LayerShape("hca", LENGTH, KEYS, 4, (0, LENGTH), (0, 24), 5, overlap=True, sink=False),
}  # fmt: skip
CASES = [  # ranks, layout of rows, layout of compressed keys, documents
    ((1, 1), "contiguous", "contiguous", "padded"),
    ((1, 2), "zigzag", "zigzag", "one"),
    ((2, 1), "striped", "contiguous", "pack"),
    ((2, 2), "zigzag", "striped", "padded"),
    ((1, 4), "balanced", "balanced", "pack"),
    ((2, 4), "contiguous", "zigzag", "one"),
    ((2, 4), "balanced", "contiguous", "padded"),
]  # fmt: skip


def packed(shape, documents):
    """The shape with one document, a pack, or a pack with padding."""
    if documents == "one":
        return replace(shape, key_bounds=keys_of_documents((0, LENGTH), shape.ratio))
    ends = keys_of_documents(BOUNDS, shape.ratio)
    if documents == "pack":
        return replace(shape, bounds=BOUNDS, key_bounds=ends)
    # Keys that are padding: one of the empty document, one of a short one, and at the end.
    ends = tuple(end + (n > 1) + (n > 3) for n, end in enumerate(ends))
    return replace(shape, bounds=BOUNDS, key_bounds=ends, padding=(5,))


def placed_of(shape, ranks, layout, key_layout):
    def made(name, bounds, length):
        bounds = [*bounds, length] if bounds[-1] < length else list(bounds)
        documents = {"cu_seqlens": bounds} if name == "balanced" else {}
        layout = mb.layout.make(name, cp_size=ranks, **documents)
        return layout, [layout.positions(rank, length).tolist() for rank in range(ranks)]

    return Placed(
        *made(layout, shape.bounds, shape.length), *made(key_layout, shape.key_bounds, shape.keys)
    )


def made(kind, case):
    """(shape, groups, layouts, masks) of a case."""
    (inter, intra), layout, key_layout, documents = case
    shape = packed(KINDS[kind], documents)
    groups = in_process.groups(inter=inter, intra=intra)
    placed = placed_of(shape, inter * intra, layout, key_layout)
    return shape, groups, placed, masks(shape, documents != "one", documents == "padded")


def outer(shape, seed):
    """Gradients of the output and of the loss."""
    make = torch.Generator().manual_seed(seed)
    size = shape.length, shape.batch, shape.heads, shape.width
    return torch.randn(size, generator=make).double(), torch.randn(
        size[:2], generator=make
    ).double()


def run(groups, shape, shards, both, **options):
    """Results of `attend` by kind: outputs, losses and ids of all ranks."""

    def of_rank(x, both):
        return attend(shape, x, both, **options)

    return zip(*in_process.on_ranks(groups, of_rank, shards, both), strict=True)


def backward(results, whole, placed):
    """Differentiate results of all ranks, given the gradients of the whole sequence."""
    parts = [x[rows] for x in whole for rows in placed.positions]
    pairs = [pair for pair in zip(results, parts, strict=True) if pair[0].requires_grad]
    torch.autograd.backward(*map(list, zip(*pairs, strict=True)))


def check_ids(shape, placed, ids, expected):
    for rank, rows in enumerate(placed.positions):
        assert ids[rank].dtype == torch.int32
        rows = [expected[t] for t in rows]
        padded = [[[some + [-1] * (shape.top_k - len(some))] for some in row] for row in rows]
        assert ids[rank].tolist() == padded


def check_gradients(shards, placed, expected, names=ALL):
    for name, gradient in gradients(shards, placed).items():
        wanted = expected[name] if name in names else None
        if wanted is None:
            assert gradient is None or not gradient.any(), name
            continue
        assert oracle.worst(gradient, wanted) < 1e-10, name


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_dense_layers(kind, case):
    shape, groups, placed, layer_masks = made(kind, case)
    tensors, (dout, _) = compressed_oracle.draw(shape, groups.size), outer(shape, 1)
    expected = compressed_oracle.solve(shape, tensors, dout)
    shards = split(tensors, placed, ALL)
    both = plans(groups, shape, placed, layer_masks, ALL)
    outs, _, ids = run(groups, shape, shards, both)
    assert oracle.worst(joined(outs, placed.positions), expected["out"]) < 1e-10
    if kind == "csa":
        check_ids(shape, placed, ids, expected["ids"])
    backward(outs, [dout], placed)
    assert all(shards[0][name].grad is None for name in INDEX)
    check_gradients(shards, placed, expected)


def selected(x, plan):
    """Compressed keys of the indexer, and the ids that it selects, on one rank."""
    parts = (x[f"index_{name}"] for name in ("values", "gates", "bias"))
    keys = mb.compress(*parts, plan=plan, overlap=True)
    index = x["index_q"], keys.unsqueeze(2), x["index_weights"]
    return keys, mb.select(*index, rule="dsa", top_k=3, plan=plan).ids


@pytest.mark.parametrize(
    ("dtype", "ties"),
    [
        (torch.float32, False),
        (torch.bfloat16, False),
        (torch.bfloat16, True),
        (torch.float64, True),
    ],
)
def test_selected_keys_do_not_depend_on_the_ranks(dtype, ties):
    """Bitwise: selected ids, and compressed keys. Of equal scores the lower key is selected."""
    whole = packed(KINDS["csa"], "padded")
    tensors, first = compressed_oracle.draw(whole, 7, dtype, ties), None
    for case in (CASES[n] for n in (0, 1, 4, 6)):
        shape, groups, placed, layer_masks = made("csa", (*case[:-1], "padded"))
        both = plans(groups, shape, placed, layer_masks, set(), dtype)
        shards, compressed = split(tensors, placed, set()), [plan.compressed for plan in both]
        keys, ids = zip(*in_process.on_ranks(groups, selected, shards, compressed), strict=True)
        found = joined(keys, placed.key_positions), joined(ids, placed.positions)
        first = first or found
        assert all(map(torch.equal, found, first))
    if ties:  # all numbers are exact in every dtype
        wide = {name: x.double() for name, x in tensors.items()}
        expected = compressed_oracle.solve(whole, wide, outer(whole, 1)[0])
        check_ids(shape, placed, ids, expected["ids"])
        parts = (wide[f"index_{name}"] for name in ("values", "gates", "bias"))
        assert torch.equal(first[0].double(), compressed_oracle.compressed_keys(*parts, whole))


@pytest.mark.parametrize("top_k", [2, KEYS])
@pytest.mark.parametrize("case", [CASES[n] for n in (0, 2, 6)], ids=str)
def test_loss_of_the_indexer_over_compressed_keys(case, top_k):
    """Beside attention; with `top_k` of all keys, the loss of the dense phase."""
    shape, groups, placed, layer_masks = made("csa", case)
    shape = replace(shape, top_k=top_k)
    tensors, (dout, dloss) = compressed_oracle.draw(shape, 3), outer(shape, 4)
    expected = compressed_oracle.solve(shape, tensors, dout, dloss)
    shards = split(tensors, placed, ALL)
    both = plans(groups, shape, placed, layer_masks, ALL)
    outs, losses, ids = run(groups, shape, shards, both, with_loss=True)
    assert oracle.worst(joined(outs, placed.positions), expected["out"]) < 1e-10
    assert oracle.worst(joined(losses, placed.positions)[..., 0], expected["loss"]) < 1e-10
    check_ids(shape, placed, ids, expected["ids"])
    backward([*outs, *losses], [dout, dloss.unsqueeze(-1)], placed)
    check_gradients(shards, placed, expected)


def sliced(x):
    """The same numbers, every second column of a larger tensor."""
    return x.repeat_interleave(2, dim=-1)[..., ::2]


def batch_first(x):
    return x.transpose(0, 1).contiguous().transpose(0, 1)


@pytest.mark.parametrize(
    ("kind", "frozen", "strided"),
    [
        ("csa", {"kv", "sink"}, sliced), ("csa", {"values", "gates", "bias"}, batch_first),
        ("hca", {"q", "values"}, batch_first), ("dense", {"gates", "bias"}, sliced),
        ("csa", {"q", "kv", "bias"}, batch_first), ("hca", ALL, sliced),
        ("csa", ALL - {"sink"}, sliced),
    ],
)  # fmt: skip
def test_frozen_and_strided_tensors(kind, frozen, strided):
    shape, groups, placed, layer_masks = made(kind, CASES[2])
    tensors, (dout, _) = compressed_oracle.draw(shape, 5), outer(shape, 6)
    expected = compressed_oracle.solve(shape, tensors, dout)
    shards = split(tensors, placed, ALL - frozen, strided)
    both = plans(groups, shape, placed, layer_masks, ALL - frozen)
    outs, _, _ = run(groups, shape, shards, both, swapped=True)
    assert oracle.worst(joined(outs, placed.positions), expected["out"]) < 1e-10
    if frozen == ALL:
        assert not outs[0].requires_grad
        return
    backward(outs, [dout], placed)
    check_gradients(shards, placed, expected, ALL - frozen)


def test_a_plan_of_training_serves_tensors_without_gradients():
    for kind in ("csa", "hca"):
        shape, groups, placed, layer_masks = made(kind, CASES[1])
        tensors, (dout, _) = compressed_oracle.draw(shape, 5), outer(shape, 6)
        both = plans(groups, shape, placed, layer_masks, ALL)
        outs, _, _ = run(groups, shape, split(tensors, placed, set()), both)
        expected = compressed_oracle.solve(shape, tensors, dout)["out"]
        assert oracle.worst(joined(outs, placed.positions), expected) < 1e-10


def test_calls_in_flight():
    """Layers of two packs, and two calls with one plan; backward in another order."""
    calls, groups = [], in_process.groups(inter=2, intra=2)
    for number, (kind, documents) in enumerate(
        [("csa", "padded"), ("hca", "pack"), ("csa", "one"), ("window", "pack")]
    ):
        shape = packed(KINDS[kind], documents)
        placed = placed_of(shape, 4, "zigzag", "contiguous")
        both = plans(groups, shape, placed, masks(shape, documents != "one"), ALL)
        for seed in (number, number + 10):
            tensors, (dout, _) = compressed_oracle.draw(shape, seed), outer(shape, seed)
            shards = split(tensors, placed, ALL)
            outs, _, ids = run(groups, shape, shards, both, label=f"call {seed}")
            calls.append((shape, placed, tensors, dout, shards, outs, ids))
    for n in (3, 0, 5, 7, 2, 1, 6, 4):
        shape, placed, tensors, dout, shards, outs, ids = calls[n]
        expected = compressed_oracle.solve(shape, tensors, dout)
        backward(outs, [dout], placed)
        assert oracle.worst(joined(outs, placed.positions), expected["out"]) < 1e-10
        check_gradients(shards, placed, expected)
        if shape.kind == "csa":
            check_ids(shape, placed, ids, expected["ids"])


@pytest.mark.parametrize("kind", ["csa", "hca"])
def test_sequences_shorter_than_a_window_have_no_compressed_keys(kind):
    shape = LayerShape(kind, 16, 0, 20, (0, 16), (0, 0), 5, overlap=True)
    rows, keys = (mb.layout.make(name, cp_size=2) for name in ("zigzag", "contiguous"))
    placed = Placed(rows, [rows.positions(rank, 16).tolist() for rank in (0, 1)], keys, [[], []])
    tensors, (dout, _) = compressed_oracle.draw(shape, 8), outer(shape, 9)
    groups, shards = in_process.groups(intra=2), split(tensors, placed, ALL)
    both = plans(groups, shape, placed, masks(shape, documents=False), ALL)
    outs, _, _ = run(groups, shape, shards, both)
    expected = compressed_oracle.solve(shape, tensors, dout)
    assert oracle.worst(joined(outs, placed.positions), expected["out"]) < 1e-10
    backward(outs, [dout], placed)
    check_gradients(shards, placed, expected)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"key_layout": "zigzag"}, r"selection: made for key_layout Contiguous\(cp_size=1\), but"),
        ({"mask": mb.masks.Compressed(5)}, r"selection: made for mask Compressed\(stride=4"),
        ({"layout": "striped"}, "selection: made for layout "),
    ],
)
def test_a_selection_of_another_plan_is_refused(change, error):
    groups = mb.Groups.single()
    q, k, weights = torch.randn(16, 1, 2, 4), torch.randn(4, 1, 1, 4), torch.randn(16, 1, 2)
    options = {"key_layout": "contiguous", "mask": mb.masks.Compressed(4), "groups": groups}
    plan, other = (mb.prepare(q, k, k, **o) for o in (options, options | change))
    selection = mb.select(q, k, weights, rule="dsa", top_k=2, plan=plan)
    with pytest.raises(ValueError, match=error):
        selected_plan(q, k, k, selection, plan=other)
