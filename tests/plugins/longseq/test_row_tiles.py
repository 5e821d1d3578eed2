"""Row-wise functions in tiles of rows, compared with handwritten gradients in fp64."""

import contextlib
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

import megatron_burst as mb
from benchmarks.memory.live import LiveTensors
from megatron_burst.plugins.longseq.tiles import ParameterSums
from megatron_burst.recompute.tile_counts import MIN_TILE_TOKENS, automatic, dense_width, moe_width

ROWS, BATCH, IN, WIDE, OUT = 11, 2, 5, 7, 3
MIXED = ["keep", "recompute", "move", "recompute"]


class Host:
    """Host memory like `mb.HostMemory` that copies and counts all saved tensors."""

    def __init__(self):
        self.moved = 0

    @contextlib.contextmanager
    def saved(self, fraction):
        assert fraction == 1.0

        def pack(tensor):
            self.moved += 1
            return tensor.detach().clone()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda copy: copy):
            yield


def inputs(dtype=torch.float64):
    draw = torch.Generator().manual_seed(0)

    def rand(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype)

    x, scale, dy = rand(ROWS, BATCH, IN), rand(ROWS, BATCH), rand(ROWS, BATCH, OUT)
    return x, scale, rand(WIDE, IN), rand(OUT, WIDE), dy


def by_hand(x, scale, a, b, dy):
    """Return y = scale * tanh(x a^T) b^T and its gradients from their formulas."""
    t = torch.tanh(torch.einsum("sbi,wi->sbw", x, a))
    z = torch.einsum("sbw,ow->sbo", t, b)
    dz = dy * scale[..., None]
    dh = torch.einsum("sbo,ow->sbw", dz, b) * (1 - t * t)
    da = torch.einsum("sbw,sbi->wi", dh, x)
    db = torch.einsum("sbo,sbw->ow", dz, t)
    return [z * scale[..., None], torch.einsum("sbw,wi->sbi", dh, a), (dy * z).sum(-1), da, db]


def run(tiles, fates=None, host=None, again=1):
    """Return output and gradients with tiles; `again` is the number of backwards."""
    x, scale, a, b, dy = inputs()
    for tensor in (x, scale, a, b):
        tensor.requires_grad_()
    calls = []

    def fn(x, factor, scale, names):
        assert (factor, names) == (2.0, ["whole"])
        calls.append(len(x))
        return scale[..., None] * torch.tanh(x @ a.T) @ b.T * factor / 2

    y = mb.tiled(
        fn, x, 2.0, scale, ["whole"], parameters=[a, b, a], tiles=tiles, fates=fates, host=host
    )
    for number in range(again):
        grads = torch.autograd.grad(y, [x, scale, a, b], dy, retain_graph=number < again - 1)
    return [y.detach(), *grads], calls


def worst(found):
    pairs = zip(found, by_hand(*inputs()), strict=True)
    return max(float((one - other).abs().max()) for one, other in pairs)


@pytest.mark.parametrize("tiles", [1, 2, 4, ROWS, 14])
@pytest.mark.parametrize("fate", ["keep", "move", "recompute"])
def test_any_number_of_tiles(tiles, fate):
    found, calls = run(tiles, [fate] * tiles, Host())
    assert worst(found) < 1e-10
    lengths = [ROWS // tiles + (i < ROWS % tiles) for i in range(tiles)]
    assert calls == lengths + lengths[::-1] * (fate == "recompute")  # empty ones are called too


def test_every_tile_has_its_own_fate():
    host = Host()
    found, calls = run(4, MIXED, host)
    assert worst(found) < 1e-10
    assert calls == [3, 3, 3, 2, 2, 3]  # in backward the second and the last, last first
    assert host.moved > 0
    assert run(4)[1] == [3, 3, 3, 2, 2, 3, 3, 3]


def test_nothing_of_moved_tiles_stays():
    """If all tiles are moved, the memory of the input is freed with its last reference."""
    memory = mb.HostMemory(2**20, strict=True)
    host = SimpleNamespace(saved=lambda fraction: memory.saved(fraction, min_bytes=0))
    weight, x = torch.full((3,), 2.0, requires_grad=True), torch.arange(12.0).view(4, 3)
    leaf = x.clone().requires_grad_()
    hidden = leaf * 1.0
    place = weakref.ref(hidden.untyped_storage())
    fates = ["move"] * 2
    y = mb.tiled(lambda t: (t * weight).sin(), hidden, parameters=[weight], tiles=2,
                 fates=fates, host=host)  # fmt: skip
    del hidden
    memory.drain()
    gc.collect()
    assert place() is None
    assert memory.used > 0
    y.sum().backward()
    assert torch.allclose(leaf.grad, 2 * (2 * x).cos())
    assert torch.allclose(weight.grad, (x * (2 * x).cos()).sum(0))
    assert memory.used == 0


def test_slices_of_ones_own():
    found, calls = run([slice(0, 1), slice(1, 8), slice(8, 8), slice(8, 11)])
    assert worst(found) < 1e-10
    assert calls == [1, 7, 0, 3, 3, 0, 7, 1]


def test_a_second_backward_is_right_or_refused():
    """It is refused if the first backward freed a graph."""
    found, calls = run(4, again=2)
    assert worst(found) < 1e-10
    assert calls == [3, 3, 3, 2] + 2 * [2, 3, 3, 3]
    with pytest.raises(RuntimeError, match='freed the graph of a tile with the fate "keep" or'):
        run(4, MIXED, Host(), again=2)
    x = torch.ones(4, 2, requires_grad=True)
    y = mb.tiled(torch.sin, x, parameters=())
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()
    with pytest.raises(RuntimeError, match=r"mb\.tiled cannot be differentiated twice"):
        torch.autograd.grad(mb.tiled(torch.sin, x, parameters=()).sum(), x, create_graph=True)


def test_parameters_arrive_once_and_are_summed_in_fp32():
    """A sum of 256 ones in bf16 stops at 256; each tile adds one, and one hook sees 300."""
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    arrived = []
    weight.register_post_accumulate_grad_hook(lambda p: arrived.append(float(p.grad)))
    x = torch.ones(300, 1, dtype=torch.bfloat16)
    mb.tiled(lambda t: t * weight, x, parameters=[weight], tiles=300).sum().backward()
    assert arrived == [300.0]


def test_first_gradients_are_not_written_to():
    """x + p gets the same tensor as both gradients; a sum must not be written to it."""
    p, x = torch.zeros(2, 3, requires_grad=True), torch.zeros(4, 3, requires_grad=True)
    dy = torch.arange(12.0).view(4, 3)
    mb.tiled(lambda t: t + p, x, parameters=[p], tiles=2).backward(dy)
    assert torch.equal(x.grad, torch.arange(12.0).view(4, 3))
    assert torch.equal(p.grad, dy[:2] + dy[2:])


@pytest.mark.parametrize("fate", ["keep", "recompute"])
def test_frozen_inputs_and_parameters(fate):
    layer, x = torch.nn.Linear(3, 3), torch.randn(4, 3)
    layer.bias.requires_grad_(False)
    y = mb.tiled(layer, x, tiles=3, fates=[fate] * 3)
    y.sum().backward()
    assert x.grad is None
    assert layer.bias.grad is None
    assert torch.allclose(layer.weight.grad, x.sum(0).expand(3, 3))
    layer.requires_grad_(False)
    assert not mb.tiled(layer, x, tiles=3, fates=[fate] * 3).requires_grad
    x.requires_grad_()
    mb.tiled(layer, x, tiles=3, fates=[fate] * 3).sum().backward()
    assert torch.allclose(x.grad, layer.weight.sum(0).expand(4, 3))


@pytest.mark.parametrize("fate", ["keep", "recompute"])
def test_unused_and_integer_inputs(fate):
    x = torch.randn(4, 3, requires_grad=True)
    unused, ids = torch.randn(4, requires_grad=True), torch.arange(4)
    asked = {"parameters": (), "tiles": 3, "fates": [fate] * 3}
    y = mb.tiled(lambda t, _, i: t * i[:, None], x, unused, ids, **asked)
    y.sum().backward()
    assert torch.equal(x.grad, ids[:, None].expand(4, 3).float())
    assert unused.grad is None or not unused.grad.any()
    mb.tiled(lambda t: torch.ones(len(t)), x, **asked).sum().backward()  # has no gradient
    with torch.no_grad():
        assert torch.equal(mb.tiled(torch.sin, x, parameters=(), tiles=3), x.sin())


def test_autocast_holds_in_the_recompute_too():
    layer, x = torch.nn.Linear(3, 3), torch.randn(4, 3, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = mb.tiled(layer, x, tiles=2, fates=["recompute", "keep"])
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    want = layer.weight.to(torch.bfloat16).float().sum(0).to(torch.bfloat16)
    assert torch.equal(x.grad, want.float().expand(4, 3))
    assert torch.allclose(layer.weight.grad, x.sum(0).expand(3, 3), rtol=2e-2, atol=2e-2)


def test_fused_weight_gradients():
    """Linear layers of Megatron and Transformer Engine add to main_grad.

    They return a tensor of the right shape and arbitrary content to autograd.
    """
    sums_of = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(3))
    sums_of[0].grad_added_to_main_grad = True
    sums = ParameterSums(sums_of)
    nonsense = torch.full((2,), float("nan"))
    for _ in range(3):
        sums.add([nonsense, torch.ones(3)])
    first, second = sums.result()
    assert first is nonsense
    assert second.tolist() == [3.0] * 3
    sums.add([None, None])
    assert sums.result()[1].tolist() == [3.0] * 3


REFUSED = {
    "parameters must be a list or tuple of tensors.* got str": {"parameters": "all"},
    "parameters must be a list or tuple of tensors.* got Tensor": {"parameters": torch.ones(1)},
    "fates must be a list with one of keep, move, recompute per tile, got 3": {"fates": 3},
    r"fates must have 8 entries of keep, move, recompute, got .\[1\]": {"fates": [[1]] * 8},
    "parameters= is required": {"parameters": None},
    r"others\[1\] has shape \[3\]": {"others": (torch.ones(4), torch.ones(3))},
    "tiles must be an integer >= 1, got 0": {"tiles": 0},
    "tiles must be an integer >= 1, got True": {"tiles": True},
    "consecutive slices from 0 to 4": {"tiles": [slice(0, 2), slice(3, 4)]},
    "consecutive slices from 0 to 4, got .slice.0, 4, 2": {"tiles": [slice(0, 4, 2)]},
    r"consecutive slices from 0 to 4, got .slice.0, 3": {
        "tiles": [slice(0, 3), slice(3, 2), slice(2, 4)]
    },
    r"consecutive slices from 0 to 4, got .1, 3": {"tiles": [1, 3]},
    "tiles must be an integer >= 1, got 2.5": {"tiles": 2.5},
    "tiles must be an integer >= 1, got 'auto'": {"tiles": "auto"},
    "fn must be a function or a module, got None": {"fn": None},
    "x must be a tensor .*, got list": {"x": [1.0]},
    "host must be an mb.HostMemory, got 'cpu'": {"host": "cpu"},
    "same row shape and dtype": {"fn": lambda x: x[:, : int(x[0, 0])]},
    "fn drew random numbers": {"fn": torch.nn.functional.dropout},
    "fates must have 8 entries of keep, move, recompute": {"fates": ["keep"]},
    'fates contains "move", which requires host=': {"fates": ["move"] * 8},
    "must return a tensor of 1 rows": {"fn": torch.sum},
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_refused(words):
    asked = {"fn": lambda x, *_: x, "parameters": ()} | REFUSED[words]
    x = torch.arange(1.0, 5.0)[:, None].repeat(1, 5).requires_grad_()
    with pytest.raises(ValueError, match=words):
        mb.tiled(asked.pop("fn"), asked.pop("x", x), *asked.pop("others", ()), **asked)


def test_random_numbers_are_no_matter_where_no_tile_runs_again():
    x = torch.ones(64, 8, requires_grad=True)
    y = mb.tiled(torch.nn.functional.dropout, x, parameters=(), tiles=4, fates=["keep"] * 4)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())  # 2 where it was kept, 0 where not
    with torch.no_grad():
        mb.tiled(torch.nn.functional.dropout, x, parameters=(), tiles=4)


@pytest.mark.parametrize("fate", ["keep", "recompute"])
def test_a_forgotten_parameter_is_an_error(fate):
    forgotten, x = torch.ones(3, requires_grad=True), torch.ones(4, 3, requires_grad=True)
    with pytest.raises(ValueError, match=r"shape \[3\] that is neither an argument of fn"):
        mb.tiled(lambda t: t * forgotten, x, parameters=(), fates=[fate] * 8).sum().backward()
    with pytest.raises(ValueError, match=r"shape \[3\] that is neither an argument of fn"):
        mb.tiled(lambda t: t * forgotten, x.detach(), parameters=(), fates=[fate] * 8)
    made = forgotten * 2  # not a leaf: what made it is not looked at
    y = mb.tiled(lambda t: t * made, x, parameters=[made], fates=[fate] * 8)
    assert torch.autograd.grad(y.sum(), forgotten)[0].tolist() == [8.0] * 3


def test_hooks_on_parameters_are_refused():
    weight = torch.ones(3, requires_grad=True)
    weight.register_hook(lambda grad: grad)
    with pytest.raises(ValueError, match="register_post_accumulate_grad_hook"):
        mb.tiled(lambda t: t * weight, torch.ones(4, 3), parameters=[weight])


def test_an_error_in_a_tile_leaves_nothing_behind():
    x = torch.ones(4, 3, requires_grad=True)
    fail = [True]

    def fn(tile):
        if fail[0] and torch.is_grad_enabled():
            raise ArithmeticError("in the recompute")
        return tile * 2

    with pytest.raises(ArithmeticError):
        mb.tiled(fn, x, parameters=()).sum().backward()
    fail[0] = False
    mb.tiled(fn, x, parameters=()).sum().backward()
    assert torch.equal(x.grad, torch.full((4, 3), 2.0))


def test_automatic_numbers():
    """Llama 3 8B: per token 6 x 14336 elements of the MLP and 6 x 4096 of hidden states, which is
    27 times 4096; two TP ranks halve the first part."""
    width = dense_width(4096, 14336, gated=True)
    assert width == 6 * 14336 + 6 * 4096
    assert automatic(625_000, 4096, width) == 27
    assert automatic(8 * MIN_TILE_TOKENS + 1, 4096, width) == 8
    assert automatic(MIN_TILE_TOKENS - 1, 4096, width) == 1
    assert dense_width(4096, 14336, gated=True, tp=2) == 6 * 7168 + 6 * 4096
    assert dense_width(4096, 14336, gated=True, tp=2, gathered=True) == 6 * 14336 + 8 * 4096
    assert dense_width(64, 256, gated=False) == 4 * 256 + 6 * 64
    assert moe_width(64, 32, topk=2, shared=16, gated=True) == (
        2 * (6 * 32 + 4 * 64) + 6 * 16 + 6 * 64
    )


class SwiGLU(torch.nn.Module):
    """The MLP half of a Llama layer of width 64: norm, gated MLP, residual."""

    def __init__(self, hidden=64, ffn=224):
        super().__init__()
        self.norm = torch.nn.RMSNorm(hidden)
        self.fc1 = torch.nn.Linear(hidden, 2 * ffn, bias=False)
        self.fc2 = torch.nn.Linear(ffn, hidden, bias=False)

    def forward(self, x):
        gate, up = self.fc1(self.norm(x)).chunk(2, -1)
        return x + self.fc2(torch.nn.functional.silu(gate) * up)


def peaks(count):
    """Return the peak of live bytes in forward and backward without x, in tensors like x."""
    layer, x = SwiGLU(), torch.randn(4096, 64, requires_grad=True)
    for parameter in (x, *layer.parameters()):
        parameter.grad = torch.zeros_like(parameter)
    states = [x, x.grad, *layer.parameters(), *(p.grad for p in layer.parameters())]
    with LiveTensors(states=states) as live:
        live.begin("forward")
        y = mb.tiled(layer, x, tiles=count) if count else layer(x)
        live.begin("backward")
        y.backward(torch.ones_like(y))
    return [live.peaks[phase].bytes / (x.numel() * 4) for phase in ("forward", "backward")]


def test_the_working_set_is_that_of_a_tile():
    """`automatic` tiles need one [rows, hidden] tensor more than y, dy, dx at most.

    The sums over tiles and the weight gradients of one tile are extra.
    """
    weights = 2 * 3 * 64 * 224 / (4096 * 64)
    count = automatic(10**9, 64, dense_width(64, 224, gated=True))
    assert count == 27
    forward, backward = peaks(count)
    assert forward < 1 + 1
    assert backward < 3 + 1 + weights
    whole = peaks(0)
    assert whole[0] > 3.5 * 3
    assert whole[1] > 3.5 * 4
    assert peaks(8)[1] < 0.45 * whole[1]
