"""cuDNN's calls of many packs: few shapes, and the results of dense attention."""

import numpy as np
import oracle
import pytest
import torch
from cudnn_stand_in import StandIn
from kernel_runs import assert_exact, run, tensors
from torch._subclasses.fake_tensor import FakeTensorMode

import megatron_burst as mb
from megatron_burst.cli.doctor import kernels as doctor
from megatron_burst.kernels import operators_cuda, registry, rounded
from megatron_burst.kernels.aten import AtenKernel
from megatron_burst.kernels.base import Scoring
from megatron_burst.kernels.joined import joined
from megatron_burst.kernels.operators import Lengths, TileVisibility
from megatron_burst.kernels.operators_cuda import CudaCudnn
from megatron_burst.layout import Span
from megatron_burst.masks import Causal, Documents, Full
from megatron_burst.masks.tiles import Tile, Tiles
from megatron_burst.plugins.testing import in_process

GPU = torch.device("cuda:0")
NAMES = ("_cudnn_attention_forward", "_cudnn_attention_backward")
pytestmark = pytest.mark.skipif(
    not all(hasattr(torch.ops.aten, name) for name in NAMES), reason="torch has no such operator"
)
# 1100 rows: 1152 of the tensors; calls of 2 sequences up to 1152, or of 8 up to 288
SHAPE = rounded.CallShape(8, 300)
ENDS = [0, 3, 40, 41, 329, 600, 700, 930, 931, 1000, 1100]


class OnCpu(CudaCudnn):
    """The operator as the package calls it, with tensors that Python can compute."""

    device = "cpu"
    dtypes = (torch.float64,)


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setattr(operators_cuda, "_no_sequences", lambda device: None)
    found = StandIn()
    monkeypatch.setattr(operators_cuda, "aten", found)
    return found


def made():
    return AtenKernel("aten_cudnn", OnCpu(GPU))


def dense(ends, causal=True):
    own, place = np.searchsorted(ends, np.arange(ends[-1]), side="right"), np.arange(ends[-1])
    seen = own[:, None] == own
    return torch.from_numpy(seen & (place[:, None] >= place) if causal else seen)


def test_sizes():
    assert [rounded.rounded_up(n) for n in (1, 256, 257, 1100, 20480, 32767, 32768, 32769)] == [
        256, 256, 288, 1152, 20480, 32768, 32768, 36864,
    ]  # fmt: skip
    assert rounded.shapes(32768) == [(128, 512), (32, 2048), (8, 8192), (2, 32768)]
    assert rounded.shapes(1152) == [(8, 288), (2, 1152)]
    assert rounded.shapes(256) == [(2, 256)]


@pytest.mark.parametrize("travelling", [False, True], ids=["own", "travelling"])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (3, 1)])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
def test_documents(causal, heads, travelling, stand_in):
    """Values of another width, and heads that are slices of larger tensors."""
    inputs = [x[:, :, :n] for x, n in zip(
        tensors(1100, 1, (5, 5), (8, 16)), (heads[0], heads[1], heads[1], heads[0]), strict=True
    )]  # fmt: skip
    mask = Documents(ENDS) & Causal() if causal else Documents(ENDS)
    out, _, *grads = oracle.attention(*inputs, dense(ENDS, causal))
    assert_exact(run(made(), mask, *inputs, travelling=travelling), (out, *grads))
    assert len(stand_in.calls) == 2 * 2  # of ten documents
    longest = {(len(x["cum_seq_q"]) - 1, x["max_q"], x["max_k"]) for x in stand_in.calls}
    assert longest == {(8, 288, 288)}
    totals = {x[name].shape[0] for x in stand_in.calls for name in ("query", "key", "value")}
    assert totals == {1152}


PADDED = np.cumsum([0, 12, 24, 12, 360, 600, 60, 12, 120])  # multiples of 2 x 3 ranks
ODD = [0, 5, 6, 31, 380, 381, 899, 1196, 1200]


@pytest.mark.parametrize("side", ["kv", "query"])
@pytest.mark.parametrize(
    ("layout", "ends"),
    [("zigzag of documents", PADDED), ("zigzag", ODD), ("balanced", ODD), ("contiguous", PADDED)],
    ids=lambda x: x if isinstance(x, str) else "odd" if x is ODD else "padded",
)
def test_three_ranks(layout, ends, side, stand_in, monkeypatch):
    """Rows without columns, columns without rows, and the lse of the whole sequence."""
    monkeypatch.setattr(rounded, "SMALLEST", 16)
    given = {"cu_seqlens": ends} if layout in ("zigzag of documents", "balanced") else {}
    gaps = layout == "zigzag of documents"
    layout = mb.layout.make(layout.partition(" ")[0], cp_size=3, **given)
    q, k, v, dout = tensors(1200, 1, (2, 1), (8, 8))
    out, _, *grads = oracle.attention(q, k, v, dout, dense(ends))
    parts = [[mb.shard(x, layout, r, dim=0) for r in range(3)] for x in (q, k, v, dout)]
    shards = [[part.clone().requires_grad_() for part in each] for each in parts[:3]]
    kernel = made()
    monkeypatch.setitem(registry.KERNELS, "aten_cudnn", lambda device, beside_rings: kernel)
    outs = in_process.attention(
        *shards, groups=in_process.groups(intra=3), algorithm="ring", kernel="aten_cudnn",
        layout=layout, mask=Documents(ends) & Causal(), side=side,
    )  # fmt: skip
    torch.autograd.backward(outs, parts[3])
    assert oracle.worst(mb.unshard(outs, layout, dim=0), out) < 1e-11
    for each, expected in zip(shards, grads, strict=True):
        assert oracle.worst(mb.unshard([x.grad for x in each], layout, dim=0), expected) < 1e-11
    assert len({graph.sequences for graph in kernel.operator.graphs} & {2, 8, 32}) > 1
    if gaps:
        empty = [[row.diff().min() for row in ends_of(call)] for call in stand_in.calls]
        assert min(rows[0] for rows in empty) == min(rows[1] for rows in empty) == 0


def ends_of(call):
    return call["cum_seq_q"], call["cum_seq_k"]


def tile(row, column, rows, columns, triangle=False):
    return Tile(slice(row, row + rows, 1), slice(column, column + columns, 1), triangle=triangle)


def test_calls_by_hand():
    """One document of 600 tokens beside many short ones, with unused rows between two of them."""
    sizes = [600, *[50] * 4, 40]
    at = np.cumsum([0, *sizes])
    at[3:] += 30  # rows that nobody uses
    tiles = [tile(n, n, m, m, True) for n, m in zip(at, sizes, strict=False)]
    (part,) = joined(Tiles.of(tiles))
    first, second = rounded.rounded([part], 1024, 1024)
    assert list(first.tiles) == tiles[:2]
    assert list(second.tiles) == tiles[2:]
    assert first.span == tile(0, 0, 650, 650, True)
    assert second.span == tile(650, 650, 220, 220, True)
    rows, columns, idle = second.lengths.on(torch.device("cpu"))
    assert rows.tolist() == [650, 700, 730, 730, 780, 830, 870, 870, 870]
    assert columns.tolist() == [650, 700, 700, 730, 780, 830, 870, 870, 870]
    assert idle.tolist() == [False] * 50 + [True] * 30 + [False] * 140
    assert (second.lengths.longest, second.lengths.total) == ((256, 256), 1024)
    assert first.lengths.on(torch.device("cpu"))[0].tolist() == [0, 600, 650]
    assert first.lengths.longest == (1024, 1024)


def test_unused_rows_at_the_ends_of_a_call_are_left_out():
    """The first call is full after the first document: the second begins at a document."""
    tiles = [tile(0, 0, 600, 600), tile(630, 600, 300, 300), tile(960, 900, 20, 20)]
    (part,) = joined(Tiles.of(tiles))
    calls = rounded.rounded([part], 1024, 1024)
    assert [call.span for call in calls] == tiles
    assert [call.lengths.sizes.tolist() for call in calls] == [
        [[600, 600]], [[300, 300]], [[20, 20]]
    ]  # fmt: skip


def test_tiles_that_cannot_join_stay_single():
    table = Tile(slice(0, 4, 1), slice(0, 4, 1), table=np.eye(4, dtype=bool))
    steps = Tile(slice(0, 8, 2), slice(0, 8, 1))
    calls = rounded.rounded([table, steps, tile(0, 8, 4, 9)], 300, 300)
    assert calls[:2] == [table, steps]
    assert calls[2].lengths.sizes.tolist() == [[4, 9]]
    assert calls[2].lengths.longest == (320, 320)


@pytest.mark.parametrize("rows", [300, 512])
def test_the_operator_returns_as_many_rows_as_it_gets(rows, stand_in):
    """With lengths that are rounded, or are not."""
    operator = OnCpu(GPU)
    q, k, v, dout = (x.permute(1, 2, 0, 3) for x in tensors(rows, 1, (4, 2), (8, 16)))
    sizes = [(100, 50), (0, 20), (150, 80)]
    for lengths in (Lengths(sizes), rounded.RoundedLengths(sizes, (20, 7), SHAPE, 512)):
        shown = TileVisibility(lengths=lengths)
        out, lse = operator.forward(q, k, v, shown, 0.5)
        assert (out.shape, lse.shape) == (dout.shape, q.shape[:3])
        lse = lse.permute(2, 0, 1).contiguous().permute(1, 2, 0)  # as kernels store it
        grads = operator.backward(dout, q, k, v, out, lse, shown, 0.5)
        assert [x.shape for x in grads] == [x.shape for x in (q, k, v)]
    largest = [(call["max_q"], call["max_k"]) for call in stand_in.calls]
    assert largest == [(256, 256)] * 2 + [(300, 300)] * 2


def test_a_batch_is_computed_document_by_document(stand_in, monkeypatch):
    """So are widths above 128, and tensors whose offsets exceed int32."""
    mask, spans = Documents(ENDS) & Causal(), [Span(0, 1, 1100)]
    work = made().works_for(mask, [(spans, spans)])[0]
    assert sum(len(tuple(item.separate)) for item in work) == len(ENDS) - 1
    one = torch.empty(1, 2, 1100, 8, device="meta")
    for item in work:
        assert item.visibility.lengths.fit(one, one, one)
        two = torch.empty(2, 2, 1100, 8, device="meta")
        wide = torch.empty(1, 2, 1100, 192, device="meta")
        large = torch.empty(1100, 1, 2**21, 8, device="meta").permute(1, 2, 0, 3)[:, :2]
        for x in (two, wide, large):
            assert not item.visibility.lengths.fit(x, x, x)
        assert not item.visibility.lengths.fit(one, one, wide)
    monkeypatch.setattr(operators_cuda, "_no_sequences", lambda device: "none")
    assert len(made().works_for(mask, [(spans, spans)])[0]) == len(ENDS) - 1


def test_masks_that_repeat_keep_calls_without_sequences(stand_in):
    for mask in (Full(), Causal()):
        (item,) = made().works_for(mask, [([Span(0, 1, 64)], [Span(0, 1, 64)])])[0]
        assert item.visibility.lengths is None


def lengths_of(pack, rows):
    """A pack of documents, by what a few data sets look like, cut at `rows`."""
    random = np.random.default_rng(pack)
    median, spread = ((300, 0.8), (1000, 1.0), (2000, 1.8), (8000, 1.75))[pack % 4]
    ends = [0]
    while ends[-1] < rows:
        ends.append(min(rows, ends[-1] + int(random.lognormal(np.log(median), spread)) + 1))
    return ends


def test_200_packs_need_a_handful_of_graphs(stand_in):
    """Of own keys and of another rank's, whose number changes with every pack."""
    stand_in.computes = False
    kernel, rows, calls, documents = made(), 8192, 0, 0
    q, k = (torch.zeros(rows, 1, 1, 8, dtype=torch.float64) for _ in range(2))
    for pack in range(200):
        ends = lengths_of(pack, rows)
        mask = Documents([*ends, 2 * rows]) & Causal()
        for keys in (rows, 1 + int(np.random.default_rng(pack).integers(rows))):
            spans = [Span(0, 1, rows)], [Span(0, 1, keys)]
            work = kernel.works_for(mask, [spans])[0]
            out, lse = (torch.zeros(rows, 1, 1, *end, dtype=torch.float64) for end in ((8,), ()))
            kernel.forward(q, k[:keys], k[:keys], work, Scoring(1.0), out, lse)
            calls += len(work)
        documents += 2 * len(ends)
    assert len(kernel.operator.graphs) <= 6, kernel.operator.graphs  # 3 shapes, triangles or not
    assert calls < documents / 2.5
    # Memory that cuDNN reserves in backward, in rows
    most = max(graph.sequences * max(graph.longest) for graph in kernel.operator.graphs)
    assert most <= 2 * rows


@pytest.mark.parametrize(
    ("schema", "version", "capability", "words"),
    [
        (("seqused_k",), 92500, (9, 0), None),
        (("seqused_k",), 92800, (10, 3), None),
        ((), 92500, (9, 0), r"requires torch 2\.14 or newer, got "),
        (None, 92500, (9, 0), r"requires torch 2\.14 or newer, got "),
        (("seqused_k",), 92400, (9, 0), r"requires cuDNN 9\.25 or newer, got 9\.24"),
        (("seqused_k",), None, (9, 0), r"requires cuDNN 9\.25 or newer, got 0\.0"),
        (("seqused_k",), 92500, (8, 0), r"requires Hopper or Blackwell, got .* \(8, 0\)"),
    ],
)
def test_why_documents_need_separate_calls(schema, version, capability, words, monkeypatch):
    class Named:
        def __init__(self, **given):
            self.__dict__.update(given)

    arguments = [Named(name=name) for name in ("query", *(schema or ()))]
    operator = Named(default=Named(_schema=Named(arguments=arguments)))
    found = Named() if schema is None else Named(_cudnn_attention_forward=operator)
    monkeypatch.setattr(operators_cuda, "aten", found)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    operator = CudaCudnn(GPU)
    assert operator.joins == (words is None)
    if words is not None:
        with pytest.raises(ValueError, match=words):
            raise ValueError(operator.separate)


@pytest.mark.parametrize("words", ["requires cuDNN 9.25 or newer, got 9.24", None])
def test_a_kernel_by_name_says_why_documents_need_separate_calls(words, monkeypatch):
    monkeypatch.setattr(operators_cuda, "_no_sequences", lambda device: words)
    finding = doctor._kernel("aten_cudnn", GPU, [0.001, 0.001], 0.02)
    assert (words is not None) == ("packed document" in finding.what)
    with FakeTensorMode():
        x = torch.empty(4, 1, 2, 8, dtype=torch.bfloat16, device=GPU)
        for mask, told in ((Documents([0, 4]), True), (Causal(), False), (None, False)):
            kernel = registry.make("aten_cudnn", x, x, x, mask=mask)
            assert len(kernel.passed_over) == (told and words is not None)
            assert all(text.endswith(str(words)) for text in kernel.passed_over)


def test_auto_never_takes_it_for_documents(monkeypatch):
    monkeypatch.setattr(operators_cuda, "_no_sequences", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92800)
    assert "aten_cudnn" in registry.automatic(GPU, Causal())
    assert "aten_cudnn" not in registry.automatic(GPU, Documents([0, 4]) & Causal())
