"""The final norm in tiles: results and memory, without ranks."""

import pytest
import torch
from megatron.core.transformer.transformer_block import TransformerBlock

import megatron_burst as mb
import megatron_burst.megatron as burst
from benchmarks.memory.live import LiveTensors


class Block:
    """A block after `_build_layers` that has only its final norm."""

    def __init__(self, norm, tiles):
        self.norm, self.final_layernorm = norm, None
        self.config = type("Config", (), {"burst": mb.BurstConfig(mlp_tiles=tiles)})()


@pytest.fixture
def built(monkeypatch):
    def build_layers(self):
        self.final_layernorm = self.norm

    monkeypatch.setattr(TransformerBlock, "_build_layers", build_layers)
    burst.uninstall()
    burst.install("zigzag")

    def build(norm, tiles):
        block = Block(norm, tiles)
        TransformerBlock._build_layers(block)
        return block.final_layernorm

    yield build
    burst.uninstall()


def norms():
    drawn = torch.randn(64, dtype=torch.float64)
    for cls in (torch.nn.RMSNorm, torch.nn.LayerNorm):
        norm = cls(64, eps=1e-5).double()
        norm.weight.data.copy_(drawn)
        yield norm


def run(norm, x, gradient):
    norm.zero_grad()
    x = x.clone().requires_grad_()
    out = norm(x)
    out.backward(gradient)
    return out.detach(), x.grad, *(p.grad.clone() for p in norm.parameters())


@pytest.mark.parametrize("rows", [37, 3])
def test_tiles_change_no_number(built, rows):
    x, gradient = torch.randn(2, rows, 2, 64, dtype=torch.float64)
    for norm in norms():
        expected = run(norm, x, gradient)
        calls = []
        norm.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        assert built(norm, 5) is norm
        for mine, right in zip(run(norm, x, gradient), expected, strict=True):
            assert (mine - right).abs().max() < 1e-13
        assert calls == [1]  # of Megatron's module, not of every tile


def test_one_tile_and_identities_are_left_alone(built):
    norm = torch.nn.RMSNorm(64)
    for module, tiles in ((norm, 1), (torch.nn.Identity(), 8), (None, 8)):
        assert built(module, tiles) is module
        assert module is None or "forward" not in vars(module)


def test_of_its_working_set_one_tile_is_left(built):
    rows, width, peaks = 4096, 256, []
    unit = rows * width * 2
    for tiles in (1, 16):
        norm = built(torch.nn.RMSNorm(width, eps=1e-5).bfloat16(), tiles)
        x = torch.randn(rows, 1, width, dtype=torch.bfloat16, requires_grad=True)
        gradient = torch.randn_like(x)
        with LiveTensors(states=norm.parameters()) as live:
            norm(x).backward(gradient)
        peaks.append(live.peak.bytes / unit)
    whole, tile = peaks
    assert tile < 4 + whole / 16 + 0.1  # input, output, their gradients; and a tile
    assert tile < 0.35 * whole
