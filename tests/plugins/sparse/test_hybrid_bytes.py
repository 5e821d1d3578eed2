"""Hybrid attention: bytes sent beside benchmarks/sparse/hybrid.py and by hand; memory bounds."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import megatron_burst as mb
from benchmarks.sparse.hybrid import Layer
from megatron_burst import registry
from megatron_burst.plugins.sparse import kernels, pairs
from megatron_burst.plugins.sparse.attention import selected_plan
from megatron_burst.plugins.sparse.window_layout import WindowLayout
from megatron_burst.plugins.testing import in_process
from megatron_burst.plugins.tools.advise.account.rings import key_algorithm
from megatron_burst.plugins.tools.advise.settings import Settings
from megatron_burst.plugins.tools.advise.shapes.layer_kinds import (
    CSA,
    HCA,
    KEY_WINDOW,
    Hybrid,
    Indexer,
)
from megatron_burst.schedule.dry_run import dry_run

NODES, PER_NODE, S, HEADS, WIDTH, INDEX, WINDOW, TOP_K = 2, 2, 128, 2, 12, 8, 9, 3
RANKS, RATIO, FP32 = NODES * PER_NODE, 4, 4
ROWS = S // RANKS
LONG = 256


def tensors(rows, *size):
    return [torch.randn(rows, 1, *size, requires_grad=True) for _ in range(RANKS)]


class Run:
    """One layer's attention on all ranks; `sent` has the bytes of the mean rank by set of keys."""

    def __init__(self, kind, layout, algorithm, nodes=NODES, seq=S):
        self.groups = in_process.groups(inter=nodes, intra=RANKS // nodes)
        self.kind, self.algorithm, self.seq, self.sent, self.plans = kind, algorithm, seq, {}, {}
        self.layout = mb.layout.make(layout, cp_size=RANKS)
        self.rows = seq // RANKS
        self.q, kv = tensors(self.rows, HEADS, WIDTH), tensors(self.rows, 1, WIDTH)
        window = self.prepared("window", kv, mask=mb.masks.Window(WINDOW - 1, 0), algorithm="burst")
        self.attend("window", kv, window)

    def prepared(self, name, keys, **options):
        plan = self.plans[name] = in_process.prepare(
            self.q, keys, None, groups=self.groups, layout=self.layout, **options
        )
        return plan

    def counted(self, function):
        """The result of a function, and the bytes that the mean rank sent."""
        for rank in self.groups.ranks:
            rank.counters.reset()
        result = function()
        counts = [rank.counters.intra + rank.counters.inter for rank in self.groups.ranks]
        return result, sum(counts) / RANKS

    def both(self, name, function):
        """Run forward and backward, and record their bytes."""
        out, forward = self.counted(function)
        _, backward = self.counted(lambda: torch.autograd.backward([x.sum() for x in out]))
        self.sent[name] = forward, backward

    def attend(self, name, keys, plan):
        sets = [(keys, None, plan)]
        self.both(name, lambda: in_process.joint_attention(self.q, sets, groups=self.groups))

    def compressed(self):
        """Make compressed keys and attend to them; return `sent`."""
        csa, mask = self.kind == "CSA", mb.masks.Compressed(RATIO)
        key_layout = WindowLayout(self.layout, mask, self.seq)
        keys = tensors(key_layout.rows, 1, WIDTH)
        algorithm = self.algorithm if csa else "burst"
        plan = self.prepared(
            "compressed", keys, mask=mask, key_layout=key_layout, algorithm=algorithm, side="kv",
            kernel="reference" if csa else "auto",
        )  # fmt: skip

        def compress():
            found = []
            for width in (WIDTH, *[INDEX] * csa):
                columns = width * (1 + csa)
                x, gates = tensors(self.rows, columns), tensors(self.rows, columns)
                bias = torch.zeros(RATIO, columns)
                found += in_process.compress(x, gates, bias, plan=plan, overlap=csa)
            return found

        self.both("compress", compress)
        if not csa:
            self.attend("compressed", keys, plan)
            return self.sent
        index = (
            tensors(self.rows, 2, INDEX),
            tensors(key_layout.rows, 1, INDEX),
            tensors(self.rows, 2),
        )
        named = {"rule": "dsa", "plan": plan}
        chosen, sent = self.counted(lambda: in_process.select(*index, top_k=TOP_K, **named))
        self.sent["index"] = sent, 0

        def attention():
            return in_process.on_ranks(self.groups, sparse, self.q, keys, chosen, plan.ranks)

        def sparse(q, k, selection, plan):
            made = selected_plan(q, k, None, selection, plan=plan)
            return mb.joint_attention(q, [(k, None, made)], return_lse=True)

        (out, lse), forward = self.counted(lambda: zip(*attention(), strict=True))
        _, backward = self.counted(lambda: torch.autograd.backward([x.sum() for x in out]))
        self.sent["compressed"] = forward, backward
        lse = [x.detach() for x in lse]
        self.both(
            "loss",
            lambda: in_process.indexer_loss(*index, self.q, keys, chosen, lse=lse, **named),
        )
        return self.sent


@pytest.mark.parametrize("algorithm", ["burst", "multicast"])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("kind", ["window", "CSA", "HCA"])
def test_counts_of_the_benchmark_are_the_bytes_sent(kind, layout, algorithm):
    if kind != "CSA" and algorithm == "multicast":
        pytest.skip("only CSA layers choose between these algorithms")
    layer = Layer(
        kind, RATIO if kind != "window" else 0, S, RANKS, PER_NODE, layout, FP32, FP32, algorithm,
        HEADS, WIDTH, WINDOW, INDEX,
    )  # fmt: skip
    expected = {name: tuple(sent) for name, sent in layer.sent().items()}
    run = Run(kind, layout, algorithm)
    assert (run.sent if kind == "window" else run.compressed()) == expected


def test_counts_by_hand():
    """Contiguous rows: a rank receives WINDOW - 1 rows, and the compressed keys before its own."""
    sent = Run("HCA", "contiguous", "burst", nodes=1).compressed()
    keys, row = S // RATIO // RANKS, WIDTH * FP32
    mean = (0 + 1 + 2 + 3) / RANKS * keys * row
    halo = 3 * (WINDOW - 1) * row / RANKS
    assert sent["window"] == (halo, 2 * halo)  # keys again, and their gradients
    assert sent["compress"] == (0, 0)
    assert sent["compressed"] == (mean, 2 * mean)
    few, most = Layer("HCA", RATIO, S, RANKS, item=FP32, width=WIDTH, window=WINDOW).rivals()
    assert few.forward == few.backward == (3 * keys + WINDOW) * row
    assert most.forward == most.backward == 3 * (ROWS + keys) * row


class Largest(TorchDispatchMode):
    """Size of the largest storage of a result, in fp32 numbers."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        actual = func(*args, **(kwargs or {}))
        for each in actual if isinstance(actual, (tuple, list)) else (actual,):
            if isinstance(each, torch.Tensor):
                self.most = max(self.most, each.untyped_storage().nbytes() // FP32)
        return actual


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("kind", ["CSA", "HCA"])
def test_two_chunks_of_compressed_keys_and_no_tensor_of_rows_and_keys(monkeypatch, kind, layout):
    monkeypatch.setattr(pairs, "TILE", 1 << 8)  # elements
    monkeypatch.setattr(kernels, "_bytes", lambda device: 1 << 12)
    run = Run(kind, layout, "burst", nodes=1, seq=LONG)
    with Largest() as seen:
        run.compressed()
    plans = [run.plans["compressed"].ranks[0]]
    plans += run.groups.cache.get("sparse", {}).values()  # selection, attention and loss
    assert len(plans) == (5 if kind == "CSA" else 1)
    for schedule in (schedule for plan in plans for schedule in plan.schedules):
        assert max(dry_run(schedule, rank).most.get("kv", 0) for rank in range(RANKS)) <= 2
    rows, keys = LONG // RANKS, LONG // RATIO
    assert rows * HEADS * WIDTH <= seen.most < rows * keys


@pytest.mark.parametrize(
    ("algorithm", "ratio", "selects", "width", "on_cuda", "expected"),
    [
        ("burst", 0, False, 256, True, ("burst", False)),
        ("burst", 0, False, 512, False, ("burst", False)),
        ("burst", 0, False, 512, True, ("multicast", True)),
        ("burst", 4, True, 64, False, ("multicast", True)),
        ("burst", 4, False, 64, True, ("burst", False)),
        ("burst", 128, False, 64, False, ("prefetch", False)),
        ("burst", 128, False, 512, True, ("prefetch", True)),
        ("double_ring", 128, False, 64, False, ("double_ring", False)),
        ("auto", 128, False, 64, False, ("auto", False)),
    ],
)
def test_training_and_advise_send_keys_alike(algorithm, ratio, selects, width, on_cuda, expected):
    options = mb.BurstConfig(algorithm=algorithm)
    hybrid_keys = registry.required("hybrid_keys", "this test")
    assert hybrid_keys(options, ratio, selects, width, on_cuda) == expected
    kind, index = {0: KEY_WINDOW, 4: CSA, 128: HCA}[ratio], Indexer(2, 8, 3)
    model = Hybrid(index if selects else None)
    run = Settings(seq=1024, cp=2, algorithm=algorithm, path="gpu" if on_cuda else "cpu")
    sent, joined = key_algorithm(run, model, kind, width)
    assert (sent or "auto", bool(joined)) == expected
