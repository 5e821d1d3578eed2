"""FlashAttention 4 with lists of blocks: every mask, in one call per pair of shards.

Lists and mask tensors are compared with dense matrices by an interpreter that is written by hand,
and attention by it with float64. No kernel of the package runs here. If it is installed, its mask
functions run on the CPU, and its kernels compile.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import oracle
import pytest
import torch
from block_interpreter import Interpreter, Masks, visible
from kernel_runs import assert_exact, run, tensors
from recorded_signatures import OnCpu, function, signature

import megatron_burst as mb
from megatron_burst.kernels import flash, masked_pairs, registry
from megatron_burst.kernels import flash_packages as packages
from megatron_burst.kernels.block_lists import BlockPairs, BlockSize, PairBlocks
from megatron_burst.masks import (
    BlockSparse,
    Causal,
    Dense,
    Dilated,
    Documents,
    Prefix,
    SameSpan,
    Tree,
    Window,
)  # fmt: skip
from megatron_burst.plugins.testing import in_process

TESTS = Path(__file__).parent
RECORD = json.loads((TESTS / "flash_signatures.json").read_text())["flash4"]
RANKS, LENGTH = 3, 900
ENDS = [0, 5, 6, 131, 280, 281, 520, 900]
LAYOUTS = ["contiguous", "zigzag", "striped", "balanced"]


def layout_of(name, ends=ENDS):
    given = {"cu_seqlens": ends} if name == "balanced" else {}
    return mb.layout.make(name, cp_size=RANKS, **given)


# --- masks, and dense matrices written by hand -------------------------------------------------


def subtrees(low, high, out, random):
    """Fill the bounds of a random subtree with the rows low to high: a segment, then children."""
    run = min(high - low, int(random.integers(1, 60)))
    out[low : low + run] = high
    low += run
    while low < high:
        child = min(high, low + int(random.integers(1, 300)))
        subtrees(low, child, out, random)
        low = child


def cases():
    random, q, k = np.random.default_rng(2), np.arange(LENGTH)[:, None], np.arange(LENGTH)[None]
    document = np.searchsorted(ENDS, np.arange(LENGTH), side="right")
    together, causal, near = document[:, None] == document, k <= q, (k >= q - 63) & (k <= q + 20)
    out = np.zeros(LENGTH, dtype=np.int64)
    subtrees(0, 640, out, random)
    subtrees(640, 850, out, random)  # padding follows
    below = causal & (q < out[None]) & (out[:, None] > 0)
    depth = below.sum(axis=1) - 1
    table = random.random((20, 20)) < 0.3
    noise = random.random((LENGTH, LENGTH)) < 0.3
    gap = causal & ((q < 100) | (q >= 480)) & ((k < 500) | (k >= 650))
    images = ((k >= 10) & (k < 60) & (q >= 10) & (q < 60)) | (
        (k >= 400) & (k < 700) & (q >= 400) & (q < 700)
    )
    return {
        "causal": (Causal(), causal),
        "window": (Window(63, 20), near),
        "documents": (Documents(ENDS) & Causal(), together & causal),
        "documents, window": (Documents(ENDS) & Window(63, 20), together & near),
        "padding": (Documents(ENDS, padding=[3, 6]) & Causal(),
                    together & causal & ~np.isin(document, [4, 7])[:, None]),
        "prefix": (Causal() | Prefix(200), causal | (k < 200)),
        "images": (Causal() | SameSpan([(10, 60), (400, 700)]), causal | images),
        "tree": (Tree(out), below),
        "tree, window": (Tree(out, window=40), below & (depth[:, None] - depth <= 40)),
        "blocks": (BlockSparse(table, 45) & Causal(), table[q // 45, k // 45] & causal),
        "dilated": (Dilated(4) & Causal(), ((q - k) % 4 == 0) & causal),
        "dense": (Dense(noise), noise),
        "gap": (Dense(gap), gap),
    }  # fmt: skip


CASES = cases()
INTERVALS = {"causal", "window", "documents", "documents, window", "padding", "prefix"}
SIZES = {  # of forward and backward, as the sources of the package check them
    (9, 64): ((128, 128), (128, 128)),
    (9, 128): ((128, 128), (128, 128)),
    (9, 192): ((128, 96), (128, 96)),
    (9, 256): ((128, 64), (128, 64)),
    (10, 64): ((256, 128), (256, 128)),
    (10, 128): ((256, 128), (256, 256)),
    (10, 192): ((256, 128), (256, 256)),
}


@pytest.mark.parametrize(("major", "width"), SIZES)
def test_sizes_of_blocks(major, width):
    found = [flash.block_size(major, by, width) for by in ("rows", "columns")]
    assert tuple(map(tuple, found)) == SIZES[major, width]


class Lists(NamedTuple):
    """Stands for the package's type of lists."""

    mask_block_cnt: torch.Tensor
    mask_block_idx: torch.Tensor
    full_block_cnt: torch.Tensor
    full_block_idx: torch.Tensor
    block_size: tuple[int, int]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_lists_and_mask_tensors_are_the_dense_mask(name, layout):
    """For all pairs of three ranks, sizes of blocks, and both passes."""
    mask, dense = CASES[name]
    layout = layout_of(layout)
    spans = [layout.spans(r, LENGTH) for r in range(RANKS)]
    positions = [layout.positions(r, LENGTH) for r in range(RANKS)]
    pairs, forms = BlockPairs(mask), set()
    plans = [
        (r, c, PairBlocks(pairs, pairs.add(spans[r], spans[c]))) for r in range(3) for c in range(3)
    ]
    for (r, c, plan), size in (
        (p, s) for p in plans for s in {x for y in SIZES.values() for x in y}
    ):
        wanted = torch.from_numpy(dense[positions[r][:, None], positions[c]])
        assert plan.shape == wanted.shape
        for number, by in enumerate(("rows", "columns")):
            call = plan.arguments(BlockSize(*size), by, torch.device("cpu"))
            forms.add(call.form)
            lists = Lists(*call.lists, tuple(call.size))
            mask_mod = getattr(Masks, call.form)
            seen = visible(lists, mask_mod, call.mask_tensors, wanted.shape, number)
            assert torch.equal(seen, wanted), (r, c, size, by)
    assert name not in INTERVALS or forms == {"intervals"}
    assert name not in ("blocks", "dense", "dilated") or "tables" in forms


def test_lists_have_no_block_without_visible_pairs_and_no_partial_block_that_is_full():
    """Otherwise results are right, but kernels compute more."""
    mask, dense = CASES["blocks"]
    span = mb.layout.Span(0, 1, LENGTH)
    pairs = BlockPairs(mask)
    plan = PairBlocks(pairs, pairs.add([span], [span]))
    count, index, full, _ = plan.arguments(BlockSize(128, 128), "rows", torch.device("cpu")).lists
    for i in range(len(count[0, 0])):
        cells = [dense[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)] for j in range(8)]
        some = [j for j, cell in enumerate(cells) if cell.any() and not cell.all()]
        assert index[0, 0, i, : count[0, 0, i]].tolist() == some
        assert full[0, 0, i] == sum(cell.all() for cell in cells)


def test_arrays_of_all_pairs_are_copied_once_per_pass(monkeypatch):
    copies, copy = [], masked_pairs.copy_together

    def noted(arrays, device):
        arrays = list(arrays)
        copies.append(len(arrays))
        return copy(arrays, device)

    monkeypatch.setattr(masked_pairs, "copy_together", noted)
    mask, layout = CASES["tree"][0], layout_of("zigzag")
    spans = [layout.spans(r, LENGTH) for r in range(RANKS)]
    pairs = BlockPairs(mask)
    plans = [PairBlocks(pairs, pairs.add(spans[0], spans[c])) for c in range(3)]
    for by in ("rows", "columns", "rows"):
        for plan in plans:
            plan.arguments(BlockSize(128, 128), by, torch.device("cpu"))
    assert copies == [3 * 2, 3 * 4, 3 * 4]  # mask tensors, lists of both passes


# --- attention ---------------------------------------------------------------------------------


def loaded(entry=RECORD[-1], interpreter=None, blocks=True):
    """Return the functions of a release, computed by hand."""
    package = packages.PACKAGES["flash4"]
    whole = packages.fitted(
        package, "there", function(entry["forward"]), function(entry["backward"])
    )
    names = {packages.LISTS: Lists, packages.SUBTILES: None} if blocks else {}
    whole = whole._replace(blocks=packages.fitted_blocks(whole, names, Masks))
    if interpreter is None:
        return whole

    def bound(call, text):
        return lambda **given: call(**signature(text).bind(**given).arguments)

    return whole._replace(
        forward=whole.forward._replace(function=bound(interpreter.forward, entry["forward"])),
        backward=whole.backward._replace(function=bound(interpreter.backward, entry["backward"])),
    )


def by_hand(monkeypatch, major, listed=True):
    """Return the kernel on a device, and its interpreter; `listed`: also for other masks."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    interpreter = Interpreter()
    operator = OnCpu("flash4", packages.PACKAGES["flash4"], loaded(interpreter=interpreter))
    kernel = flash.FlashKernel("flash4", operator, torch.device("cpu"))
    if listed:

        def listed_works(mask, pairs):
            return [kernel._listed(mask, *pair) for pair in pairs]

        monkeypatch.setattr(kernel, "works_for", listed_works)
    return kernel, interpreter


def rings():
    """Every mask under every layout; sides alternate, so each mask and each layout has both."""
    for i, name in enumerate(CASES):
        for j, layout in enumerate(LAYOUTS):
            yield name, layout, ("kv", "query")[(i + j) % 2]


@pytest.mark.parametrize(("name", "layout", "side"), list(rings()))
def test_rings_of_lists_are_the_oracle(name, layout, side, monkeypatch):
    """Over three ranks, GQA, two sequences, values of another width, on both devices."""
    mask, dense = CASES[name]
    q, k, v, dout = tensors(LENGTH, 2, (2, 1), (8, 4))
    out, _, *grads = oracle.attention(q, k, v, dout, torch.from_numpy(dense))
    layout = layout_of(layout)
    major = 9 if side == "kv" else 10
    kernel, interpreter = by_hand(monkeypatch, major)
    monkeypatch.setitem(registry.KERNELS, "flash4", lambda device, beside_rings: kernel)
    parts = [[mb.shard(x, layout, r, dim=0) for r in range(RANKS)] for x in (q, k, v, dout)]
    shards = [[part.clone().requires_grad_() for part in each] for each in parts[:3]]
    outs = in_process.attention(
        *shards, groups=in_process.groups(intra=RANKS), layout=layout, mask=mask, side=side,
        algorithm="ring", kernel="flash4",
    )  # fmt: skip
    torch.autograd.backward(outs, parts[3])
    assert oracle.worst(mb.unshard(outs, layout, dim=0), out) < 1e-11
    for each, wanted in zip(shards, grads, strict=True):
        assert oracle.worst(mb.unshard([x.grad for x in each], layout, dim=0), wanted) < 1e-11
    assert {kind for kind, *_ in interpreter.calls} == {"forward", "backward"}
    assert len(interpreter.calls) <= 2 * RANKS**2


@pytest.mark.parametrize("travelling", [False, True], ids=["own", "travelling"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("major", [9, 10])
def test_lse_of_the_whole_sequence_and_inputs_with_strides(major, heads, travelling, monkeypatch):
    """Backward gets lse that also covers other keys; rows that see nothing have -inf."""
    dense = CASES["gap"][1]
    kernel, interpreter = by_hand(monkeypatch, major)
    inputs = [
        x.transpose(0, 1).contiguous().transpose(0, 1) for x in tensors(LENGTH, 2, heads, (8, 8))
    ]
    truth = oracle.attention(*inputs, torch.from_numpy(dense))
    assert torch.isinf(truth[1]).any()
    got = run(kernel, Dense(dense), *inputs, travelling=travelling)
    assert_exact(got, (truth[0], *truth[2:]))
    packed = "tables_packed" if major == 10 else "tables"
    names = {"forward": getattr(Masks, packed), "backward": Masks.tables}
    assert all(function is names[kind] for kind, function, _ in interpreter.calls)
    assert len(interpreter.calls) == 2


# --- which masks use lists, and refusals -------------------------------------------------------


def blocks_of(kernel, mask):
    """Return for each call whether it has lists."""
    spans = [mb.layout.Span(0, 1, LENGTH)]
    return [
        work.visibility.blocks is not None for work in kernel.works_for(mask, [(spans, spans)])[0]
    ]


def test_masks_of_a_few_tiles_use_no_lists(monkeypatch):
    kernel, _ = by_hand(monkeypatch, 9, listed=False)
    for name in ("causal", "documents", "padding", "prefix"):
        assert not any(blocks_of(kernel, CASES[name][0])), name
    assert blocks_of(kernel, Window(63, 20)) == [False]
    assert not any(blocks_of(kernel, Causal() | SameSpan([(0, 450)])))
    for name in ("documents, window", "tree", "tree, window", "blocks", "dilated", "dense", "gap"):
        assert blocks_of(kernel, CASES[name][0]) == [True], name
    far = [mb.layout.Span(0, 1, 8)], [mb.layout.Span(500, 1, 8)]
    assert kernel.works_for(CASES["blocks"][0], [far])[0] is None
    # Positions with different strides are no band.
    assert kernel.works_for(
        Window(63, 20), [([mb.layout.Span(0, 1, 40)], [mb.layout.Span(0, 2, 40)])]
    )[0][0].visibility.blocks


@pytest.mark.parametrize(
    ("release", "major", "deterministic", "words"),
    [
        (False, 9, False, "requires flash-attn-4 4.0.0b22 or newer for lists of blocks"),
        (True, 12, False, "has no gradients for lists of blocks on compute capability 12"),
        (True, 10, True, "has no deterministic gradients for lists of blocks"),
    ],
)
def test_masks_that_need_lists_are_refused_by_name(
    release, major, deterministic, words, monkeypatch
):
    """Bands do not need lists."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    functions = loaded(blocks=release)
    operator = flash.Flash("flash4", packages.PACKAGES["flash4"], functions)
    kernel = flash.FlashKernel("flash4", operator, torch.device("cuda"))
    torch.use_deterministic_algorithms(deterministic)
    try:
        with pytest.raises(ValueError, match=rf"is not a band .*; kernel flash4 {words}$"):
            blocks_of(kernel, CASES["dense"][0])
        assert not any(blocks_of(kernel, CASES["documents, window"][0]))
    finally:
        torch.use_deterministic_algorithms(False)


def test_package_3_has_no_lists():
    entry = json.loads((TESTS / "flash_signatures.json").read_text())["flash3"][-1]
    functions = (function(entry[kind]) for kind in ("forward", "backward"))
    package = packages.PACKAGES["flash3"]
    operator = flash.Flash("flash3", package, packages.fitted(package, "there", *functions))
    kernel = flash.FlashKernel("flash3", operator, torch.device("cuda"))
    with pytest.raises(ValueError, match=r"is not a band .*; kernel flash3 has no lists of blocks"):
        blocks_of(kernel, CASES["dense"][0])


@pytest.mark.parametrize("name", sorted(set(CASES) - {"causal", "documents", "padding", "prefix"}))
def test_auto_takes_no_lists(name, monkeypatch):
    """No kernel of the package ran: `auto` takes it only where it takes few tiles."""
    mask = CASES[name][0]
    for capability in ((9, 0), (10, 0), (10, 3), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d, c=capability: c)
        order = registry.automatic(torch.device("cuda:0"), mask)
        if "flash4" in order:
            kernel, _ = by_hand(monkeypatch, capability[0], listed=False)
            assert not any(blocks_of(kernel, mask))


# --- compilations ------------------------------------------------------------------------------


def compile_key(mask_mod, tensors, lists):
    """Return the part of a key of the package's compiled kernels that could depend on a mask.

    From `_flash_attn_fwd`, `_flash_attn_bwd`, `get_aux_tensor_metadata` and
    `get_block_sparse_broadcast_pattern` of its sources: the function, dtype and dimensions of each
    tensor, which of its strides are 0 or 1, and the size of blocks.
    """
    static = [
        (x.dtype, tuple(s if s in (0, 1) else None for s in x.stride()[-1:]), x.dim())
        for x in tensors
    ]
    broadcast = [tuple(s == 0 for s in x.stride()) for x in lists[:4]]
    return str((mask_mod.__name__, static, broadcast, lists.block_size))


@pytest.mark.parametrize("window", [None, 63])
def test_20_packs_need_one_compilation_per_pass_and_form(window, monkeypatch):
    keys, numbers = {"forward": set(), "backward": set()}, set()
    kernel, interpreter = by_hand(monkeypatch, 10)
    for kind in keys:
        call = getattr(interpreter, kind)

        def noted(kind=kind, call=call, **given):
            lists = given["block_sparse_tensors"]
            keys[kind].add(compile_key(given["mask_mod"], given["aux_tensors"], lists))
            numbers.add((kind, lists.mask_block_idx.shape, lists.full_block_idx.shape))
            return call(**given)

        fitted = getattr(kernel.operator.loaded, kind)
        monkeypatch.setattr(
            kernel.operator,
            "loaded",
            kernel.operator.loaded._replace(**{kind: fitted._replace(function=noted)}),
        )
    inputs = tensors(LENGTH, 1, (1, 1), (4, 4))
    for seed in range(20):
        random = np.random.default_rng(seed)
        cuts = random.choice(np.arange(1, LENGTH), 3 + seed, replace=False)
        ends = [0, *sorted(cuts.tolist()), LENGTH]
        mask = Documents(ends) & (Causal() if window is None else Window(window, 0))
        run(kernel, mask, *inputs)
    assert {kind: len(found) for kind, found in keys.items()} == {"forward": 1, "backward": 1}
    assert window or len(numbers) > 2  # widths of the lists differ, but not the compiled code


# --- releases ----------------------------------------------------------------------------------


def test_releases_with_lists():
    """Both functions have the parameters in every release that we take."""
    usable = []
    for entry in RECORD:
        if "dlse=" not in entry["backward"].split(", "):
            continue  # we take no such release
        lists = {packages.LISTS: function(entry["lists"])}
        beside = {entry["beside"]: None} if entry["beside"] else {}
        blocks = packages.fitted_blocks(loaded(entry), lists | beside, Masks)
        usable += entry["releases"] if blocks is not None else []
        assert "pack_gqa=" in entry["forward"].split(", ")
    assert usable[0].replace(".beta", "b") == f"fa4-v{packages.PACKAGES['flash4'].blocks[1]}"
    assert usable[-1].startswith("main 2026")


def test_functions_without_lists_are_not_used_for_them():
    functions, names = loaded(), {packages.LISTS: Lists, packages.SUBTILES: None}
    for kind in ("forward", "backward"):
        fitted = getattr(functions, kind)
        fewer = {name: name for name in fitted.names if name not in packages.BLOCKS}
        without = functions._replace(**{kind: fitted._replace(names=fewer)})
        assert packages.fitted_blocks(without, names, Masks) is None
    with pytest.raises(ValueError, match="BlockSparseTensorsTorch has no parameter mask_block_cnt"):
        packages.fitted_blocks(functions, names | {packages.LISTS: function("a=")}, Masks)


INSTALLED = packages.PACKAGES["flash4"].version is not None
needs_package = pytest.mark.skipif(not INSTALLED, reason="flash-attn-4 is not installed")


def script(name, arch, *arguments):
    environment = {
        "FLASH_ATTENTION_ARCH": f"sm_{arch}", "CUTE_DSL_ARCH": f"sm_{arch}a",
        "FLASH_ATTENTION_NUM_SMS": "132", "PYTHONPATH": str(TESTS.parents[1]),
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, str(TESTS / name), *arguments],
        env=os.environ | environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@pytest.mark.slow
@needs_package
@pytest.mark.parametrize(("arch", "widths"), [
    ("90", (64, 64)), ("90", (128, 128)), ("90", (192, 128)), ("90", (256, 256)),
    ("100", (64, 64)), ("100", (128, 128)), ("100", (192, 128)),
])  # fmt: skip
def test_package_compiles_one_kernel_per_form_and_pass(arch, widths):
    done = script("flash4_compiles.py", arch, *map(str, widths), "windows", "packs", "blocks")
    found = re.findall(r"^(\w+) kernels (\d+) (\d+)$", done.stdout, re.MULTILINE)
    assert found == [("windows", "1", "1"), ("packs", "0", "0"), ("blocks", "1", "1")], done.stderr


@pytest.mark.slow
@needs_package
def test_mask_functions_of_the_package_on_the_cpu():
    done = script("flash4_masks_run.py", "90")
    assert done.stdout.split() == ["4", "functions", "agree"], done.stderr[-3000:]
