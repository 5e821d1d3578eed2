"""Mamba mixers: the CPU replacement of mamba_ssm, against the recurrence written out."""

import inspect
from functools import partial
from types import SimpleNamespace

import mamba_ranks
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("megatron.core.models.hybrid.hybrid_block")

from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.ssm.mamba_mixer import MambaMixer

from megatron_burst.megatron.linear import delta_net, mamba, state_layers
from megatron_burst.megatron.patching import PatchSet
from megatron_burst.plugins.testing.mamba import GatedNorm, split_conv1d_scan

BATCH, TOKENS, HEADS, WIDTH, GROUPS, STATE, CONVOLUTION = 2, 11, 6, 3, 2, 5, 4
INNER, CHANNELS = HEADS * WIDTH, HEADS * WIDTH + 2 * GROUPS * STATE


def drawn(*shape, seed=0):
    draw = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=draw, dtype=torch.float64)


def written_out(projected, weight, bias, dt_bias, A, D):
    """Return [b, l, h * p], computed token by token, with indices as in the definition."""
    out = torch.zeros(*projected.shape[:2], INNER, dtype=torch.float64)
    for b in range(len(projected)):
        state = torch.zeros(HEADS, WIDTH, STATE, dtype=torch.float64)
        for t in range(projected.shape[1]):
            z = projected[b, t, :INNER]
            mixed = bias.clone()
            for back in range(min(CONVOLUTION, t + 1)):
                row = projected[b, t - back, INNER : INNER + CHANNELS]
                mixed = mixed + weight[:, CONVOLUTION - 1 - back] * row
            mixed = mixed / (1 + (-mixed).exp())
            x, keys, queries = mixed.split((INNER, GROUPS * STATE, GROUPS * STATE))
            for head in range(HEADS):
                own = head // (HEADS // GROUPS) * STATE
                step = F.softplus(projected[b, t, INNER + CHANNELS + head] + dt_bias[head])
                row = x[head * WIDTH : (head + 1) * WIDTH]
                state[head] = (step * A[head]).exp() * state[head] + torch.outer(
                    step * row, keys[own : own + STATE]
                )
                y = state[head] @ queries[own : own + STATE] + D[head] * row
                gate = z[head * WIDTH : (head + 1) * WIDTH]
                out[b, t, head * WIDTH : (head + 1) * WIDTH] = y * gate / (1 + (-gate).exp())
    return out


def parameters():
    return (
        drawn(CHANNELS, CONVOLUTION), drawn(CHANNELS), drawn(HEADS), -drawn(HEADS, seed=1).exp(),
        drawn(HEADS, seed=2),
    )  # fmt: skip


def test_the_stand_in_for_the_fused_kernel():
    projected = drawn(BATCH, TOKENS, INNER + CHANNELS + HEADS)
    weight, bias, dt_bias, A, D = parameters()
    found = split_conv1d_scan(
        projected, weight, bias, dt_bias, A, D, 4, headdim=WIDTH, ngroups=GROUPS
    )
    expected = written_out(projected, weight, bias, dt_bias, A, D)
    assert (found - expected).abs().max() < 1e-12
    wide = D[:, None].expand(HEADS, WIDTH)
    assert torch.equal(
        found, split_conv1d_scan(projected, weight, bias, dt_bias, A, wide, 4, ngroups=GROUPS)
    )
    with pytest.raises(ValueError, match=r"packed batches: .* use --burst-linear auto"):
        split_conv1d_scan(projected, *parameters(), 4, headdim=WIDTH, seq_idx=torch.zeros(1))


@pytest.mark.parametrize("before", [False, True])
def test_the_stand_in_for_the_gated_norm(before):
    x, z = drawn(3, 8), drawn(3, 8, seed=1)
    norm = GatedNorm(8, eps=1e-5, group_size=4, norm_before_gate=before, dtype=torch.float64)
    norm.weight.data.copy_(drawn(8))
    expected, gate = torch.zeros_like(x), z / (1 + (-z).exp())
    for row in range(3):
        for first in (0, 4):
            part = slice(first, first + 4)
            gated = x[row, part] if before else x[row, part] * gate[row, part]
            out = gated / ((gated**2).mean() + 1e-5).sqrt() * norm.weight[part]
            expected[row, part] = out * gate[row, part] if before else out
    assert (norm(x, z) - expected).abs().max() < 1e-12


def test_other_mixers_are_refused_by_name():
    class GatedDeltaProductMixer:
        def __init__(self, config, pg_collection=None):
            self.built = True

    refuse = partial(state_layers.refuse_states, "GatedDeltaProductMixer", "only these can")
    PatchSet("other").wrap(GatedDeltaProductMixer, "__init__", ["config"], refuse)
    group = SimpleNamespace(cp=SimpleNamespace(size=lambda: 2))
    ours = SimpleNamespace(burst=SimpleNamespace(algorithm="burst", linear="auto"))
    with pytest.raises(
        ValueError, match=r"^GatedDeltaProductMixer cannot pass its state .*only .*: use --bu"
    ):
        GatedDeltaProductMixer(ours, pg_collection=group)
    ours.burst.linear = "megatron"
    assert GatedDeltaProductMixer(ours, pg_collection=group).built
    assert hasattr(MambaMixer, "_ssm_training")  # what stands in is for this path


@pytest.mark.parametrize(
    ("layout", "linear", "packed"),
    [
        ("zigzag", "scan", False),
        ("contiguous", "all_gather", True),
        pytest.param("zigzag", "ring", True, marks=pytest.mark.slow),
        pytest.param("contiguous", "two_level", False, marks=pytest.mark.slow),
        pytest.param("balanced", "auto", True, marks=pytest.mark.slow),
    ],
)
def test_a_mixer_over_four_ranks_against_the_recurrence(four, layout, linear, packed):
    for errors in four(mamba_ranks.worst_errors, layout, linear, packed):
        assert len(errors) == 10
        assert {name: error for name, error in errors.items() if not error < 1e-10} == {}


def test_a_mixer_over_a_prefix_tree_against_the_recurrence(four):
    for errors in four(mamba_ranks.errors_over_a_tree):
        assert len(errors) == 10
        assert {name: error for name, error in errors.items() if not error < 1e-10} == {}


@pytest.mark.parametrize("layer", [mamba, delta_net])
@pytest.mark.parametrize("name", ["inference_context", "inference_params"])
def test_inference_with_states_that_travel_is_refused(layer, name):
    """Megatron's forward would read this rank's rows as the whole sequence."""
    kind = MambaMixer if layer is mamba else GatedDeltaNet
    forward = partial(state_layers.forward, layer.KIND, inspect.unwrap(kind.forward))
    split = SimpleNamespace(_burst_states=object())
    given = {"hidden_states": torch.zeros(2, 1, 4), name: object()}
    given |= {"attention_mask": None} if layer is delta_net else {}
    with pytest.raises(ValueError, match=f"{name}: this layer passes its state"):
        forward(split, **given)


@pytest.mark.parametrize(("layer", "kind"), [(mamba, MambaMixer), (delta_net, GatedDeltaNet)])
def test_a_subclass_with_methods_of_its_own_is_refused_by_name(layer, kind):
    """They would run on this rank's rows only, or not run."""

    class Own(kind):
        def forward(self, hidden_states):
            return hidden_states

    class Rule(kind):
        def _ssm_training(self, *given):
            return given

        _setup_variant_attrs = _ssm_training

    class Named(kind):
        pass

    def original(self, config, layer_number=1, pg_collection=None):
        raise AssertionError("built")

    built = partial(state_layers.construct, layer.KIND, original)
    group = SimpleNamespace(cp=SimpleNamespace(size=lambda: 2))
    ours = SimpleNamespace(burst=SimpleNamespace(algorithm="burst", linear="auto"))
    with pytest.raises(ValueError, match=r"^Own: .* would not run forward of Own"):
        built(Own.__new__(Own), ours, pg_collection=group)
    with pytest.raises(ValueError, match=r"^Rule: .* would not run _\w+ of Rule"):
        built(Rule.__new__(Rule), ours, pg_collection=group)
    with pytest.raises(AssertionError, match="built"):
        built(Named.__new__(Named), ours, pg_collection=group)


def test_a_mixer_in_bfloat16_is_as_exact_as_on_one_rank(four):
    for ours, one in four(mamba_ranks.errors_in_bfloat16):
        assert 0 < ours["out"] < 2 * one["out"]
        assert 0 < ours["hidden"] < 2 * one["hidden"]
