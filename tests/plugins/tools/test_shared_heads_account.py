"""The account of ranks that share heads, of sharded states, of latent attention and hybrids."""

from dataclasses import replace

import pytest
import torch

from megatron_burst.execution import function, ring
from megatron_burst.plugins.testing import in_process
from megatron_burst.plugins.tools.advise.account.memory import account, states_of
from megatron_burst.plugins.tools.advise.account.operators import (
    Core,
    LayerSizes,
    attention_half,
    mixer_half,
)
from megatron_burst.plugins.tools.advise.account.rings import core_of, intra_of, on_ring
from megatron_burst.plugins.tools.advise.account.tape import Tape
from megatron_burst.plugins.tools.advise.settings import Settings
from megatron_burst.plugins.tools.advise.shapes import models

LLAMA = models.named("llama3-8b")
SMALL = models.Model("small", 4, 64, 4, 2, 224, 256)
K = 1024


def saved(half):
    """Bytes that a half leaves for backward, its result left out."""
    tape = Tape()
    half.forward(tape, grad=True)
    return tape.moments[-1].bytes - half.sizes[half.result]


@pytest.mark.parametrize(("ulysses", "kv_heads"), [(2, 4), (2, 1), (4, 2)])
def test_sizes_on_the_ring_are_those_of_the_running_code(monkeypatch, ulysses, kv_heads):
    """What the ring gets, and what stays for backward, in elements."""
    cp, rows, heads, width = 4, 16, 4, 8
    seen, kept, whole = [], [], function.forward
    rings = ring.forward_rings

    def made(job, run, call, q, keys, *rest):
        seen.append([tuple(t.shape) for t in (q, *keys)])
        return rings(job, run, call, q, keys, *rest)

    def forward(*args):
        out, left = whole(*args)
        kept.append(sum(t.numel() for t in left[:4]))
        return out, left

    monkeypatch.setattr(ring, "forward_rings", made)
    monkeypatch.setattr(function, "forward", forward)
    groups = in_process.groups(inter=1, intra=cp, ulysses=ulysses)
    q, k, v = (
        [torch.randn(rows, 1, n, width, requires_grad=True) for _ in range(cp)]
        for n in (heads, kv_heads, kv_heads)
    )
    in_process.attention(q, k, v, groups=groups, algorithm="hybrid" if ulysses < cp else "ulysses")
    model = replace(SMALL, heads=heads, kv_heads=kv_heads, head_dim=width, value_dim=width)
    run = Settings(seq=cp * rows, cp=cp, ulysses=ulysses, algorithm="hybrid")
    x = on_ring(LayerSizes.of(model, run), run)
    here = rows * ulysses
    shapes = [(here, 1, x.heads, width), *[(here, 1, x.kv_heads, width)] * 2]
    assert seen == [shapes] * cp
    half = attention_half(LayerSizes.of(model, run), rows, core_of(LayerSizes.of(model, run), run))
    elements = (
        sum(half.sizes[name] for name in ("q on the ring", "kv on the ring", "out on the ring")) / 2
    )
    assert kept == [elements] * cp


def test_shared_heads_by_hand():
    """Llama 3 8B over 8 ranks, 8 of which share heads: no ring; the same q, k, v, out and lse stay
    as without, k and v once more than needed nowhere, as there are 8 of them."""
    run = Settings(seq=64 * K, cp=8, ulysses=8, algorithm="ulysses")
    x, rows = LayerSizes.of(LLAMA, run), 8 * K
    core = core_of(x, run)
    assert (core.forward, core.backward) == (0, 0)
    assert core.sums == rows * 4 * (4096 + 2 * 1024)  # dq, dk and dv in fp32
    half = attention_half(x, rows, core)
    tensors = 4096 + 4096 + 2 * 1024 + 2 * 4096  # norm, q, k and v, out there and here
    assert saved(half) == rows * (2 * tensors + 4 * 32 + 4)
    twice = replace(run, seq=128 * K, cp=16, ulysses=16)
    copied = attention_half(x, rows, core_of(x, twice))
    assert saved(copied) - saved(half) == rows * 2 * 2 * 1024  # 16 ranks, 8 heads of keys


@pytest.mark.parametrize(
    ("fields", "intra"),
    [({"ulysses": 2}, 4), ({"ulysses": 8}, 1), ({"ulysses": 2, "placement": "context_first"}, 8),
     ({"ulysses": 2, "inner": 2}, 2), ({}, 8)],
)  # fmt: skip
def test_ranks_of_an_inner_ring(fields, intra):
    assert intra_of(Settings(seq=64 * K, cp=32, intra=8, **fields)) == intra


def test_a_grid_has_fewer_buffers_than_a_ring_of_all_its_ranks():
    """One ring of 4 within a node; 32 in two levels have a buffer for what travels between nodes
    besides. Rows are 8 times as long with an eighth of the heads."""
    ring, grid = (
        core_of(LayerSizes.of(LLAMA, run), run)
        for run in (
            Settings(seq=512 * K, cp=32, intra=8),
            Settings(seq=512 * K, cp=32, intra=8, ulysses=8, placement="context_first"),
        )
    )
    assert grid.sums == ring.sums
    assert 0 < grid.forward < ring.forward
    assert 0 < grid.backward < ring.backward


def test_sharded_states_by_hand():
    """FSDP over DP x CP; experts over what expert-parallel ranks leave."""
    model = models.named("qwen3-30b-a3b")
    run = Settings(seq=64 * K, cp=8, dp=4, ep=8, fsdp=True)
    states, host = states_of(model, run, 0)
    experts = 48 * 128 * 3 * 2048 * 768
    own = (model.parameters - experts) / 32 + experts / 32
    assert states["parameters"] == pytest.approx(2 * own, rel=1e-6)
    assert states["gradients"] == pytest.approx(4 * own, rel=1e-6)
    assert states["optimizer"] == pytest.approx(12 * own, rel=1e-6)
    layer = 2048 * 128 * (2 * 32 + 2 * 4) + 2048 * 128 + 128 * 3 * 2048 * 768 // 8
    peaks = {moment.phase: moment.items for moment in account(model, run).peaks}
    # Two layers of parameters in bf16 and the gradients of one in fp32, then the head's weight.
    assert peaks["forward of layer 0"]["gathered weights"] == layer * (2 * 2 + 4)
    assert peaks["LM head and loss"]["gathered weights"] == 2 * 151936 * 2048
    assert host == 0
    gone, host = states_of(model, replace(run, optimizer_offload=0.5), 0)
    assert gone["optimizer"] == pytest.approx(6 * own, rel=1e-6)
    assert host == pytest.approx(6 * own, rel=1e-6)


def test_what_latent_attention_saves():
    """DeepSeek-V3 on 8 tensor-parallel ranks: narrow rows before and after their norm, then 16
    heads of q and k 192 wide and of v and out 128 wide; of its share of rows the norms."""
    model = models.named("deepseek-v3")
    x, rows = LayerSizes.of(model, Settings(seq=4 * K, tp=8)), 4 * K
    low = 1536 + 512 + 64
    share = 2 * (7168 + 2 * low) + 4 + 8
    whole = 2 * 16 * (192 + 192 + 128 + 128) + 4 * 16
    assert saved(attention_half(x, rows, Core(keys=rows))) == rows // 8 * share + rows * whole


def test_windows_take_the_memory_of_full_attention():
    model = models.named("gpt-oss-20b")
    run = Settings(seq=128 * K, cp=8, tp=2)
    full = account(replace(model, pattern=""), run, every=False)
    assert account(model, run, every=False).peak.bytes == full.peak.bytes


def test_layers_of_a_hybrid():
    """Only attention leaves a store; a search sees what the whole step shows."""
    model = models.named("nemotron-h-8b")
    run = Settings(seq=256 * K, tp=2, cp=4, store=1.0)
    whole = account(model, run)
    rows = 64 * K
    top = next(m for m in whole.peaks if m.phase == "recompute of layer 51")
    assert top.items["attention store"] == 4 * rows * (2048 * 2 + 16 * 4)
    assert top.items["layer inputs"] == 52 * rows // 2 * 4096 * 2
    assert account(model, run, every=False).peak.bytes == whole.peak.bytes
    x = LayerSizes.of(model, run)
    # x, a statistic; projected, convolved (values and 8 groups of keys and queries), dt of 64 heads
    # in fp32, results, gated results; two states of 64 x 128 x 64
    kept = 4096 // 2 * 2 + 4 / 2
    kept += 2 * (18560 // 2 + (8192 + 2 * 1024) // 2 + 2 * 8192 // 2) + 4 * 64
    assert saved(mixer_half(x, rows)) == rows * kept + 2 * 64 * 128 * 64 * 4


def test_a_delta_rule_keeps_its_arguments():
    """Gated delta net: besides, the keys and queries after their norm, and beta; every 64 rows a
    state while it runs, in backward with its gradient."""
    model, rows = models.named("qwen3-next-80b-a3b"), 8 * K
    x = LayerSizes.of(model, Settings(seq=rows))
    keys, values = 2 * 16 * 128, 32 * 128
    kept = 2 * 2048 + 4 + 2 * (12352 + 2 * keys + values + 2 * values) + 4 * (32 + 32)
    state = 32 * 128 * 128
    assert saved(mixer_half(x, rows)) == rows * kept + 2 * state * 4
    tape, half = Tape(), mixer_half(x, rows)
    half.forward(tape, grad=False)
    most = max(sum(moment.items.values()) for moment in tape.moments)
    chunks = rows // 64 * state * 2
    linear = rows * (2 * (12352 + 2 * keys + 2 * values) + 4 * 64)
    assert most == linear + chunks + 2 * 2 * state * 4
    cpu = mixer_half(LayerSizes.of(model, Settings(seq=rows, path="cpu")), rows)
    (op,) = (op for op in cpu.ops if op.name == "linear attention")
    assert op.back_before == {"attention half": 2 * 2 * chunks + 2 * state * 4}


@pytest.mark.parametrize("name", ["qwen3-next-80b-a3b", "deepseek-v3", "nemotron-h-8b"])
@pytest.mark.parametrize(
    "more", [{}, {"recompute": "none"}, {"sequence_chunks": 8, "mlp_tiles": 8, "offload": 1.0},
             {"path": "cpu"}],
)  # fmt: skip
def test_every_way_through_every_kind_of_layer_ends_with_nothing_left(name, more):
    found = account(models.named(name), Settings(seq=64 * K, tp=2, cp=4, **more))
    left = {item: size for item, size in found.moments[-1].items.items() if size}
    assert set(left) == set(found.states)
