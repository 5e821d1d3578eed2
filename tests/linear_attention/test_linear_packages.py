"""Packages of linear attention: our arguments against the signatures and semantics of releases.

No kernel of the packages runs here. Stand-ins written by hand compute the documented functions
token by token. `linear_signatures.json` holds the parameters of every release, which
`linear_signatures.py` read from the sources.
"""

import inspect
import json
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
import recurrences
import torch
from recorded_signatures import signature
from test_linear_forms import CUTS, FORMS, assert_exact, states

from megatron_burst.kernels.packages import NotInstalled
from megatron_burst.linear_attention import forms
from megatron_burst.linear_attention.kernels import fla, mamba, registry
from megatron_burst.linear_attention.kernels import sequences as packages
from megatron_burst.linear_attention.kernels.base import LinearInputs, RankPieces

RECORD = json.loads((Path(__file__).parent / "linear_signatures.json").read_text())
# Releases that want a decay of a form that has none.
REFUSED = {("linear", release) for release in ("v0.1.0", "v0.2.0")}
CALLS = [
    (form.name, entry["releases"][0], entry)
    for form in forms.FORMS.values()
    for entry in RECORD[form.fla]
]


def fitted(path, names, optional, text):
    constants = packages.PACKAGES[path.partition(".")[0]].constants
    return packages.fit("there.f", signature(named(text)), names, optional, constants)


def named(text):
    """Remove **kwargs, on which the fit must not depend."""
    return ", ".join(one for one in text.split(", ") if not one.startswith("**"))


def fla_fit(form, text):
    names = fla.names(forms.FORMS[form])
    return fitted(forms.FORMS[form].fla, names, (fla.ON_THE_HOST,), text)


# --- signatures ----------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "release", "entry"), CALLS)
def test_our_arguments_fit_every_release_we_take(form, release, entry):
    if (form, release) in REFUSED:
        with pytest.raises(ValueError, match=r"^there\.f requires g, which megatron_burst"):
            fla_fit(form, entry["parameters"])
        return
    fit = fla_fit(form, entry["parameters"])
    given = LinearInputs(*recurrences.case(form, 5), 0.3)
    arguments = fit.arguments(fla.arguments(given, (2, 3), None, True))
    bound = signature(named(entry["parameters"])).bind(**arguments).arguments
    assert bound["q"].shape == bound["k"].shape == (1, 10, 4, 5)
    assert bound["cu_seqlens"].tolist() == [0, 2, 5, 7, 10]
    assert bound["output_final_state"] is True
    assert bound["scale"] == 0.3
    assert bound.get("head_first", False) is False
    assert ("head_first" in bound) == ("head_first=" in entry["parameters"])
    assert (fla.ON_THE_HOST in bound) == (f"{fla.ON_THE_HOST}=" in entry["parameters"])
    assert entry["returns"] in ("o, final_state", "ChunkKDAFunction.apply")


@pytest.mark.parametrize("entry", RECORD[mamba.FUNCTION], ids=lambda entry: entry["releases"][0])
def test_our_arguments_fit_every_release_of_mamba(entry):
    fit = fitted(mamba.FUNCTION, mamba.NAMES, (), entry["parameters"])
    given = LinearInputs(*recurrences.case("scalar_decay", 5), 0.3)
    arguments = fit.arguments(mamba.arguments(given, None))
    bound = signature(entry["parameters"]).bind(**arguments).arguments
    assert bound["x"].shape == (2, 5, 4, 3)
    assert bound["B"].shape == bound["C"].shape == (2, 5, 2, 5)


def test_the_newest_releases_are_recorded():
    for path, entries in RECORD.items():
        newest = "v0.6.0" if path.startswith("fla.") else "main 2026"
        assert entries[-1]["releases"][-1].startswith(newest), path
    assert set(RECORD) == {form.fla for form in forms.FORMS.values()} | {mamba.FUNCTION}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("q, k, v, scale=, initial_state=, output_final_state=", "has no parameter cu_seqlens, g"),
        ("q, k, v, g, scale=, initial_state=, final=, cu_seqlens=", "parameter output_final_state"),
        (
            "q, k, v, g, sink, scale=, initial_state=, output_final_state=, cu_seqlens=",
            "requires sink, which megatron_burst does not pass",
        ),
    ],
)
def test_planted_changes_are_refused(text, words):
    with pytest.raises(ValueError, match=rf"^there\.f .*{words}"):
        fla_fit("scalar_decay", text)


def test_what_is_hidden_in_keywords_counts_as_lacking():
    def hidden(q, k, v, g, **kwargs):
        raise AssertionError

    with pytest.raises(ValueError, match="has no parameter scale"):
        packages.fit("f", inspect.signature(hidden), fla.names(forms.FORMS["scalar_decay"]))


# --- what tensors mean there ---------------------------------------------------------------


def chunk_function(**given):
    """Compute the function that flash-linear-attention documents.

    q, k, v are [B, T, H, .], g is the logarithm of the decay, and states are [N, H, K, V] of N
    sequences. cu_seqlens contains their bounds if B is 1. The result o is [B, T, H, V].
    """
    q, k, v = given["q"], given["k"], given["v"]
    bounds, state = given["cu_seqlens"], given["initial_state"]
    assert given.get("head_first") is not True
    assert q.shape == k.shape
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    assert q.shape[:3] == v.shape[:3]
    if bounds is not None:
        assert q.shape[0] == 1
        assert bounds.dtype == torch.int64
    cuts = [0, q.shape[1]] if bounds is None else bounds.tolist()
    sequences = [(row, i, j) for row in range(len(q)) for i, j in pairwise(cuts)]
    assert state is None or state.shape == (len(sequences), *q.shape[2:], v.shape[-1])
    o, ends = torch.zeros_like(v), []
    for n, (row, i, j) in enumerate(sequences):
        s = v.new_zeros(*q.shape[2:], v.shape[-1]) if state is None else state[n]
        for t in range(i, j):
            value = v[row, t]
            if given.get("g") is not None:
                stored = given["g"][row, t].exp()
                s = s * (stored[..., None] if stored.dim() == 2 else stored[:, None, None])
            if given.get("beta") is not None:
                value = (value - (s * k[row, t][..., None]).sum(1)) * given["beta"][row, t][:, None]
            s = s + k[row, t][..., None] * value[:, None]
            o[row, t] = given["scale"] * (s * q[row, t][..., None]).sum(1)
        ends.append(s)
    return o, torch.stack(ends) if given["output_final_state"] else None


def chunk_scan(**given):
    """Compute the function that Mamba documents.

    x is [b, s, h, p], dt [b, s, h], A [h], B and C [b, s, g, n], and states are [b, h, p, n].
    """
    x, dt, decay = given["x"], given["dt"], given["A"]
    shared = x.shape[2] // given["B"].shape[2]
    keys, queries = (given[name].repeat_interleave(shared, 2) for name in "BC")
    s = given["initial_states"]
    s = x.new_zeros(*x.shape[:1], *x.shape[2:], keys.shape[-1]) if s is None else s
    out = []
    for t in range(x.shape[1]):
        step = dt[:, t][..., None, None]
        s = (step * decay[:, None, None]).exp() * s
        s = s + step * x[:, t][..., None] * keys[:, t][:, :, None]
        out.append((s * queries[:, t][:, :, None]).sum(-1))
    assert given["return_final_states"] is True
    return torch.stack(out, 1), s


def fla_runs(form, release=-1):
    """Run the stand-in with the signature of the oldest (0) or the newest (-1) release.

    It accepts shared heads if that release does, and is called once per row.
    """
    text = RECORD[forms.FORMS[form].fla][release]["parameters"]
    shares = release == -1 and form in ("gated_delta_rule", "kda")

    def function(**given):
        assert (given["q"].shape[2] < given["v"].shape[2]) == shares
        rows.append(given["v"].shape[0] * given["v"].shape[1])
        return chunk_function(**given)

    rows = []
    function.__signature__ = signature(named(text))
    loaded = fla_fit(form, text)._replace(function=function)

    def run(given, cut):
        return fla.run(loaded, forms.FORMS[form], given, cut)

    run.rows = rows
    return run


def mamba_runs():
    text = RECORD[mamba.FUNCTION][-1]["parameters"]
    loaded = fitted(mamba.FUNCTION, mamba.NAMES, (), text)._replace(function=chunk_scan)
    return lambda given, cut: mamba.run(loaded, forms.FORMS["scalar_decay"], given, cut)


RUNS = {form: fla_runs(form) for form in FORMS} | {"mamba_ssm": mamba_runs()}
RUNS["gated_delta_rule, early"] = fla_runs("gated_delta_rule", 0)


@pytest.mark.parametrize("cut", ["one", "several", "none mapped"])
@pytest.mark.parametrize("name", RUNS)
def test_packages_compute_the_recurrence(name, cut):
    """A stand-in with our arguments gives outputs, maps, final states and gradients."""
    form = "scalar_decay" if name == "mamba_ssm" else name.partition(",")[0]
    cut = {
        "one": ((6,), (True,)),
        "several": ((1, 4, 2), (True, False, True)),
        "none mapped": ((3, 2), (False, False)),
    }[cut]
    own, true = (recurrences.leaves(recurrences.case(form, sum(cut[0]))) for _ in range(2))
    requested = [i for i, mapped in enumerate(cut[1]) if mapped]
    entering, other = states(own, len(cut[0])), states(own, len(cut[0]), seed=6)
    starts, starts_too = (entering.clone().requires_grad_() for _ in range(2))
    made = RUNS[name]
    run = made(LinearInputs(*own, 0.3), RankPieces(*cut))
    out, ends = run.outputs(starts), recurrences.applied(run.maps, other)[requested]
    if name != "mamba_ssm":  # whose pieces are called one by one
        assert sum(made.rows) == sum(cut[0]) * 2  # each row of both batch entries once
        made.rows.clear()
    out_too, _ = recurrences.pieces(true, cut[0], starts_too, 0.3)
    ends_too = recurrences.pieces(true, cut[0], other, 0.3)[1][requested]
    assert_exact((out, ends), (out_too, ends_too))
    got = recurrences.gradients((out, ends), (*own, starts))
    assert_exact(got, recurrences.gradients((out_too, ends_too), (*true, starts_too)))


def test_mamba_takes_a_decay_of_zero_as_a_small_one():
    given = recurrences.case("scalar_decay", 40)
    given = given._replace(decay=torch.zeros_like(given.decay))
    run = mamba_runs()(LinearInputs(*given, 0.3), RankPieces((40,), (True,)))
    out, _ = recurrences.pieces(given, (40,), states(given, 1), 0.3)
    torch.testing.assert_close(run.outputs(states(given, 1)), out, rtol=1e-4, atol=1e-4)


# --- what is installed ---------------------------------------------------------------------


def plant(monkeypatch, path, function):
    """Install a package with one function."""
    parts = path.split(".")
    for i in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:i]), ModuleType(".".join(parts[:i])))
    setattr(sys.modules[".".join(parts[:-1])], parts[-1], function)


def test_an_installed_function_is_called(monkeypatch):
    def chunk_gla(q, k, v, g, scale=None, initial_state=None, output_final_state=False,
                  cu_seqlens=None, head_first=True):  # fmt: skip
        return chunk_function(**locals())

    form = forms.FORMS["vector_decay"]
    plant(monkeypatch, form.fla, chunk_gla)
    given = recurrences.case("vector_decay", 7)
    run = fla.FlaKernel().run(
        form, LinearInputs(*given, 0.3), RankPieces(*CUTS["one"])._replace(lengths=(7,))
    )
    out, _ = recurrences.pieces(given, (7,), states(given, 1), 0.3)
    assert_exact((run.outputs(states(given, 1)),), (out,))


def test_packages_that_do_not_fit_are_refused_by_name(monkeypatch):
    form = forms.FORMS["kda"]
    words = r"^kernel fla: flash-linear-attention is not installed .*; install .*kernel='torch'"
    with pytest.raises(NotInstalled, match=words):
        fla.function(form)
    plant(monkeypatch, form.fla, lambda q, k, v: None)
    with pytest.raises(ValueError, match=r"kernel fla: fla.ops.kda.chunk_kda has no parameter"):
        fla.function(form)
    plant(monkeypatch, form.fla, None)
    with pytest.raises(ValueError, match=r"kernel fla: fla.ops.kda has no function chunk_kda"):
        fla.function(form)
    monkeypatch.setitem(sys.modules, "fla.ops.kda", None)
    with pytest.raises(ValueError, match=r"flash-linear-attention cannot be imported: Module"):
        fla.function(form)
    with pytest.raises(NotInstalled, match=r"kernel mamba_ssm: Mamba is not installed"):
        mamba.function()


class OnCuda:
    """Tensor of a GPU with shape, dtype and device only."""

    is_cuda, device = True, torch.device("cuda")

    def __init__(self, like):
        self.shape, self.dtype = like.shape, like.dtype


def on_cuda(form, dtype=torch.bfloat16):
    given = LinearInputs(*recurrences.case(form, 2, dtype=dtype), 0.3)
    return given._replace(q=OnCuda(given.q), k=OnCuda(given.k), v=OnCuda(given.v))


def test_auto_takes_flash_linear_attention_on_cuda_where_it_is_installed(monkeypatch):
    form = forms.FORMS["kda"]
    plant(monkeypatch, form.fla, inspect_as(RECORD[form.fla][-1]["parameters"]))
    assert registry.choose("auto", form, on_cuda("kda")) == ("fla", "")
    given = LinearInputs(*recurrences.case("kda", 2), 0.3)
    assert registry.choose("auto", form, given) == ("torch", "")


def test_auto_says_why_it_does_without_it_on_cuda(monkeypatch):
    """No warning if torch's operators were requested by name."""
    form = forms.FORMS["kda"]
    words = "uses kernel 'torch', not 'fla'.*flash-linear-attention is not installed.*install"
    with pytest.warns(UserWarning, match=words):
        chosen, why = registry.choose("auto", form, on_cuda("kda"))
    assert chosen == "torch"
    assert why.startswith("kernel fla: flash-linear-attention is not installed")
    assert registry.choose("torch", form, on_cuda("kda")) == ("torch", "")
    with pytest.raises(ValueError, match="kernel fla: flash-linear-attention is not installed"):
        registry.choose("fla", form, on_cuda("kda"))
    with pytest.raises(ValueError, match="kernel mamba_ssm: Mamba is not installed"):
        registry.choose("mamba_ssm", forms.FORMS["scalar_decay"], on_cuda("scalar_decay"))
    plant(monkeypatch, form.fla, inspect_as(RECORD[form.fla][-1]["parameters"]))
    with pytest.warns(
        UserWarning, match="requires q, k and v all in bfloat16 or all in float16, got f"
    ):
        assert registry.choose("auto", form, on_cuda("kda", torch.float32))[0] == "torch"
    plant(monkeypatch, form.fla, lambda q, k, v: None)
    with pytest.raises(ValueError, match=r"fla.ops.kda.chunk_kda has no parameter"):
        registry.choose("auto", form, on_cuda("kda"))


def inspect_as(text):
    """Return a function with these parameters."""

    def function(**given):
        return chunk_function(**given)

    function.__signature__ = signature(named(text))
    return function


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {},
            "requires q, k and v all in bfloat16 or all in float16, got float64, float64, float64",
        ),
        ({"v": torch.zeros(2, 2, 4, 3).half()}, "all in float16, got bfloat16, bfloat16, float16"),
        ({"k": torch.zeros(2, 2, 2, 264).bfloat16()}, "supports key widths up to 256, got 264"),
    ],
)
def test_tensors_that_packages_cannot_serve_are_refused(changed, words):
    dtype = torch.bfloat16 if changed else torch.float64
    given = LinearInputs(*recurrences.case("linear", 2, dtype=dtype), 0.3)
    assert words in fla.unfit(given._replace(**changed))
    assert (
        fla.unfit(LinearInputs(*recurrences.case("linear", 2, dtype=torch.bfloat16), 0.3)) is None
    )


def test_mamba_computes_one_form():
    for form in forms.FORMS.values():
        given = LinearInputs(*recurrences.case(form.name, 2), 0.3)
        refused = mamba.MambaKernel().refusal(form, given)
        scalar = form.name == "scalar_decay"
        assert ("CUDA devices" if scalar else f"got form {form.name}") in refused
