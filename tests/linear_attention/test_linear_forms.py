"""Forms of linear attention on one rank against the recurrence written by hand.

The tests compare outputs, maps of pieces and all gradients.
"""

import pytest
import recurrences
import torch
from recurrences import SHAPES
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.memory.live import LiveTensors
from megatron_burst.linear_attention import forms
from megatron_burst.linear_attention.kernels import chunkwise, registry
from megatron_burst.linear_attention.kernels.base import LinearInputs, RankPieces

FORMS = list(SHAPES)
SCALE = 0.3
# lengths of pieces, and which need a map
CUTS = {
    "one": ((70,), (True,)),
    "even": ((64, 64), (True, False)),
    "uneven": ((1, 67, 3, 130), (True, False, True, True)),
    "nobody asks": ((5, 66), (False, False)),
    "empty": ((0, 3, 0), (True, True, True)),
}


def computed(form, kernel, given, cut, entering, scale=SCALE):
    """Return outputs and maps by a kernel."""
    run = registry.run(forms.FORMS[form], kernel, LinearInputs(*given, scale), RankPieces(*cut))
    return run.outputs(entering), run.maps


def states(given, pieces, seed=5):
    """Return random states [p, b, h, d, w]."""
    (b, h, w), d = given.v.shape[1:], given.k.shape[-1]
    made = torch.Generator().manual_seed(seed)
    return torch.randn(pieces, b, h, d, w, generator=made, dtype=torch.float64)


def assert_exact(got, truth):
    for own, true in zip(got, truth, strict=True):
        assert own.shape == true.shape
        torch.testing.assert_close(own, true, rtol=1e-10, atol=1e-10)


def assert_recurrence(form, kernel, given, cut, entering):
    """Compare outputs, results of the requested maps for any states, and gradients."""
    assert_equal(form, kernel, given, cut, entering, recurrence(given, cut, entering))


def recurrence(tensors, cut, entering):
    """Return outputs, final states of the requested pieces for other states, and gradients."""
    true, starts = recurrences.leaves(tensors), entering.clone().requires_grad_()
    out, _ = recurrences.pieces(true, cut[0], starts, SCALE)
    _, ends = recurrences.pieces(true, cut[0], states(tensors, len(cut[0]), seed=6), SCALE)
    ends = ends[list(cut[1])]
    return out.detach(), ends.detach(), *recurrences.gradients((out, ends), (*true, starts))


def assert_equal(form, kernel, tensors, cut, entering, expected):
    """Compare a kernel with the results of `recurrence`."""
    own, starts = recurrences.leaves(tensors), entering.clone().requires_grad_()
    out, maps = computed(form, kernel, own, cut, starts)
    ends = recurrences.applied(maps, states(tensors, len(cut[0]), seed=6))[list(cut[1])]
    assert_exact((out, ends), expected[:2])
    assert_exact(recurrences.gradients((out, ends), (*own, starts)), expected[2:])


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("form", FORMS)
def test_the_chunkwise_form_is_the_recurrence(form, cut, monkeypatch):
    """As a whole, and in segments of a limited number of chunks."""
    tensors = recurrences.case(form, sum(cut[0]))
    entering = states(tensors, len(cut[0]))
    expected = recurrence(tensors, cut, entering)
    for most in (None, 1, 2):
        with monkeypatch.context() as patch:
            segmented(patch, tensors, most)
            assert_equal(form, "torch", tensors, cut, entering, expected)


def segmented(monkeypatch, given, most):
    """Limit the chunks of a segment; None means no limit."""
    wide = max(given.v.itemsize, 4)
    chunk = chunkwise.SIZE * given.v[0, ..., 0].numel() * given.k.shape[-1] * wide
    if most is not None:
        monkeypatch.setattr(chunkwise, "SEGMENT_BYTES", most * chunk)


class Solves(TorchDispatchMode):
    """Number of rows of triangular systems that were solved."""

    rows = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "triangular" in str(function):
            self.rows += args[0].shape[:-1].numel()
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("most", [None, 1, 2])
@pytest.mark.parametrize("form", ["delta_rule", "gated_delta_rule", "kda"])
def test_maps_and_outputs_share_what_is_solved(form, most, monkeypatch):
    """Each row of each head is solved once in forward and once in backward."""
    cut = ((130, 5, 64), (True, False, True))
    given = recurrences.leaves(recurrences.case(form, sum(cut[0])))
    segmented(monkeypatch, given, most)
    starts = states(given, len(cut[0])).requires_grad_()
    once = (3 + 1 + 1) * chunkwise.SIZE * 2 * 4  # chunks, batch entries and heads
    with Solves() as forward:
        out, maps = computed(form, "torch", given, cut, starts)
        total = out.sum() + sum(x.sum() for x in maps)
    with Solves() as backward:
        total.backward()
    assert (forward.rows, backward.rows) == (once, once)


@pytest.mark.parametrize("form", ["gated_delta_rule", "kda"])
def test_backward_of_a_long_shard_holds_few_tensors_like_q(form, monkeypatch):
    """Backward holds at most ten times q: all gradients, and the work of one of 32 segments.

    All chunks at once need 22 times q (gated delta rule) and 46 times q (KDA).
    """
    rows, width = 128 * chunkwise.SIZE, 64
    made = recurrences.case(form, rows, b=1, g=1, h=1, d=width, w=width, dtype=torch.float32)
    given, cut = recurrences.leaves(made), ((rows,), (True,))
    segmented(monkeypatch, given, 4)
    starts = states(given, 1).float().requires_grad_()
    with LiveTensors(states=[x for x in (*given, starts) if x is not None]) as live:
        out, maps = computed(form, "torch", given, cut, starts)
        total = out.sum() + sum(x.sum() for x in maps if x is not None)
        before = live.bytes["device"]
        live.begin("backward")
        total.backward()
        live.begin("after")
    assert live.peaks["backward"].bytes - before <= 10 * given.q.nbytes


@pytest.mark.parametrize("form", FORMS)
def test_the_reference_kernel_is_the_recurrence(form):
    cut = CUTS["empty"] if form == "linear" else ((2, 5), (True, True))
    given = recurrences.case(form, sum(cut[0]))
    assert_recurrence(form, "reference", given, cut, states(given, len(cut[0])))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 1), (1, 1, 3, 2, 1), (3, 3, 3, 1, 4)])
def test_narrow_widths_and_shared_heads(form, shape):
    b, g, h, d, w = shape
    given = recurrences.case(form, 20, b=b, g=g, h=h, d=d, w=w)
    assert_recurrence(form, "torch", given, ((20,), (True,)), states(given, 1))


@pytest.mark.parametrize("form", FORMS)
def test_gradients_by_differences(form):
    given = recurrences.leaves(recurrences.case(form, 5, b=1, g=1, h=2, d=2, w=2))
    entering = states(given, 2).requires_grad_()
    tensors = [x for x in (*given, entering) if x is not None]

    def function(*changed):
        parts = iter(changed)
        tensors = [None if x is None else next(parts) for x in given]
        out, maps = computed(form, "torch", tensors, ((3, 2), (True, True)), next(parts))
        return (out, *(x for x in maps if x is not None))

    assert torch.autograd.gradcheck(function, tensors)


def test_the_map_of_nobody_is_zero():
    given = recurrences.case("kda", 10)
    for kernel in ("torch",):
        _, maps = computed("kda", kernel, given, ((4, 6), (False, True)), states(given, 2))
        assert not maps.transition[0].any()
        assert not maps.increment[0].any()
        assert maps.transition[1].any()


@pytest.mark.parametrize("form", FORMS)
def test_a_rank_without_rows_has_maps_of_no_pieces(form):
    given = recurrences.leaves(recurrences.case(form, 0))
    whole = recurrences.case(form, 3)
    for kernel in ("torch", "reference"):
        out, maps = computed(form, kernel, given, ((), ()), states(given, 0))
        _, other = computed(form, kernel, whole, ((3,), (True,)), states(whole, 1))
        assert out.shape == (0, 2, 4, 3)
        for own, one in zip(maps, other, strict=True):
            assert (own is None) == (one is None)
            assert own is None or (0, *one.shape[1:]) == own.shape


@pytest.mark.parametrize("frozen", ["q", "k", "v", "beta", "entering"])
def test_frozen_tensors_get_no_gradient(frozen):
    given = recurrences.leaves(recurrences.case("gated_delta_rule", 9))
    entering = states(given, 1).requires_grad_()
    for name in LinearInputs._fields[:5]:
        if name == frozen:
            getattr(given, name).requires_grad_(False)
    entering.requires_grad_(frozen != "entering")
    out, maps = computed("gated_delta_rule", "torch", given, ((9,), (True,)), entering)
    (out.sum() + maps.increment.sum()).backward()
    for name, x in {**given._asdict(), "entering": entering}.items():
        assert (x.grad is None) == (name == frozen)


def test_nothing_is_kept_but_the_arguments():
    """A call keeps only tensors of its caller and the entering states."""
    given = recurrences.leaves(recurrences.case("kda", 130, dtype=torch.float32))
    entering = states(given, 1).float().requires_grad_()
    held_bytes = {x.data_ptr() for x in (*given, entering)}
    stored = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: stored.append(x) or x, lambda x: x):
        computed("kda", "torch", given, ((130,), (True,)), entering)
    assert len(stored) > 5
    assert {x.data_ptr() for x in stored} <= held_bytes


def test_precision_is_not_autocasts_business():
    given = recurrences.leaves(recurrences.case("kda", 20, dtype=torch.float32))
    entering = states(given, 1).float()
    cut = ((20,), (True,))
    out, maps = computed("kda", "torch", given, cut, entering)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        other, others = computed("kda", "torch", given, cut, entering)
    for own, one in zip((out, *maps), (other, *others), strict=True):
        assert torch.equal(own, one)
    expected = torch.autograd.grad(out.sum(), given, retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # a user's backward may be inside it
        actual = torch.autograd.grad(other.sum(), given)
    for own, one in zip(expected, actual, strict=True):
        assert torch.equal(own, one)


def test_second_derivatives_are_refused():
    given = recurrences.leaves(recurrences.case("linear", 3))
    out, _ = computed("linear", "torch", given, ((3,), (False,)), states(given, 1))
    with pytest.raises(RuntimeError, match="linear attention cannot be differentiated twice"):
        torch.autograd.grad(out.sum(), given.q, create_graph=True)


# --- names -----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_the_form_is_read_off_its_arguments(form):
    given = recurrences.case(form, 2)
    assert forms.select_form(given.decay, given.beta).name == form
    assert forms.select_form(given.decay, given.beta, form).name == form
    if SHAPES[form][0] == "":
        assert forms.select_form(given.decay[0, 0], given.beta).name == form


@pytest.mark.parametrize(
    ("form", "name", "words"),
    [
        ("kda", "mamba", "form must be one of auto, linear, .*, got 'mamba'"),
        ("kda", None, "form must be one of auto, .*, got None"),
        (
            "linear",
            "kda",
            r"form kda requires decay \[s, b, h, d\], got decay None and requires beta",
        ),
        (
            "kda",
            "delta_rule",
            r"requires decay=None, got decay of shape \[2, 2, 4, 5\]; .* selects kda",
        ),
        ("delta_rule", "linear", r"form linear requires beta=None, got beta of shape \[2, 2, 4\]"),
        (
            "linear",
            "scalar_decay",
            r"requires decay \[s, b, h\], or \[h\] .*'auto', which selects linear",
        ),
    ],
)
def test_forms_that_do_not_fit_are_refused(form, name, words):
    given = recurrences.case(form, 2)
    with pytest.raises(ValueError, match=words):
        forms.select_form(given.decay, given.beta, name)


@pytest.mark.parametrize(
    ("decay", "beta", "words"),
    [
        (torch.zeros(2, 2), None, r"decay must be a tensor of logar.*got decay of shape \[2, 2\]"),
        (0.9, None, r"decay must be .*, got decay 0.9"),
        (None, torch.zeros(4), r"beta must be a tensor \[s, b, h\], or None .* of shape \[4\]"),
        (None, 0.5, r"beta must be .*, got beta 0.5"),
    ],
)
def test_arguments_of_no_form_are_refused(decay, beta, words):
    with pytest.raises(ValueError, match=words):
        forms.select_form(decay, beta)


def test_kernels_are_chosen_by_name():
    given, form = LinearInputs(*recurrences.case("linear", 2), 1.0), forms.FORMS["linear"]
    assert registry.choose("auto", form, given)[0] == "torch"
    assert registry.choose("reference", form, given)[0] == "reference"
    with pytest.raises(ValueError, match=r"kernel must be one of auto, torch, .*, got 'cuda'"):
        registry.choose("cuda", form, given)
    words = "kernel fla runs on CUDA devices, got tensors on cpu; kernel='torch' supports all forms"
    with pytest.raises(ValueError, match=words):
        registry.choose("fla", form, given)
