"""FlashAttention packages: do our arguments fit the signatures of their releases, and our tensors
what their sources say of them? No kernel of theirs runs here; where FlashAttention 4 is installed,
it compiles.

`flash_signatures.json` holds the parameters of every release, read from the sources by
`flash_signatures.py`.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import oracle
import pytest
import torch
from kernel_runs import HEADS, MASKS, assert_exact, run, tensors
from recorded_signatures import signature

import megatron_burst as mb
from megatron_burst.cli.doctor import installed
from megatron_burst.kernels import aten, flash, registry
from megatron_burst.kernels import flash_packages as packages
from megatron_burst.kernels.aten import AtenKernel
from megatron_burst.kernels.packages import NotInstalled, Signature
from megatron_burst.layout import Span
from megatron_burst.masks import Window

TESTS = Path(__file__).parent
RECORD = json.loads((TESTS / "flash_signatures.json").read_text())
# The first release we take; what the one before it lacks.
FIRST = {
    "flash2": ("v2.7.0", "_flash_attn_forward wants window_size, which is not known here"),
    "flash3": ("main 2025-01-07", "_flash_attn_forward has no parameter num_splits"),
    "flash4": ("fa4-v4.0.0.beta5", "_flash_attn_bwd has no parameter dlse"),
}


def function(text):
    """Something callable that shows this signature, and must not be called."""

    def shown():
        raise AssertionError("nobody calls a recorded signature")

    shown.__signature__ = signature(text)
    return shown


def fitted(name, entry):
    both = (function(entry[kind]) for kind in ("forward", "backward"))
    return packages.fitted(packages.PACKAGES[name], "there", *both)


def entries():
    for name, found in RECORD.items():
        releases = [(release, entry) for entry in found for release in entry["releases"]]
        yield from ((name, release, entry) for release, entry in releases)


def taken():
    """Entries from the first release that we take."""
    for name, found in RECORD.items():
        first = [any(r.startswith(FIRST[name][0]) for r in entry["releases"]) for entry in found]
        yield from ((name, entry) for entry in found[first.index(True) :])


def ids(values):
    return [f"{name} {entry['releases'][0]}" for name, entry in values]


def given(name):
    """What both functions are given, for small tensors [b, h, s, d], under our names."""
    q, k, v, dout = (x.permute(1, 2, 0, 3) for x in tensors(6, 2, (4, 2), (8, 8)))
    lse = torch.rand(6, 2, 4).permute(1, 2, 0)
    takes_delta = packages.PACKAGES[name].takes_delta
    out = lse + 1 if takes_delta else torch.rand_like(dout)
    forward = flash.forward_given(q, k, v, True, (3, 0), 0.25)
    backward = flash.backward_given(dout, q, k, v, out, lse, True, (3, 0), 0.25, takes_delta)
    return (q, k, v, dout, out, lse), forward, backward


# --- signatures ----------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "entry"), list(taken()), ids=ids(taken()))
def test_our_arguments_fit_every_release_we_take(name, entry):
    loaded = fitted(name, entry)
    (q, *_, out, lse), forward, backward = given(name)
    first = signature(entry["forward"]).bind(**loaded.forward.arguments(forward)).arguments
    second = signature(entry["backward"]).bind(**loaded.backward.arguments(backward)).arguments
    for call in (first, second):
        assert call["softmax_scale"] == 0.25
        assert (call["is_causal"] if "is_causal" in call else call["causal"]) is True
        if loaded.windows:
            assert (call["window_size_left"], call["window_size_right"]) == (3, 0)
        assert call["q"].shape == (2, 6, 4, 8)
        assert call["k"].shape == (2, 6, 2, 8)
        assert call["q"].data_ptr() == q.data_ptr()
    stats = second.get("softmax_lse", second.get("lse"))
    assert stats.is_contiguous()
    assert torch.equal(stats, lse)
    assert second["deterministic"] is False
    assert [second[x].shape for x in ("dq", "dk", "dv")] == [second[x].shape for x in "qkv"]
    if name == "flash4":
        assert not second["out"].any()
        assert second["out"].shape == second["dout"].shape
        assert torch.equal(second["dlse"], -out)
        assert second["dlse"].is_contiguous()
    else:
        assert torch.equal(second["out"], out.transpose(1, 2))
    results = entry["results"].split(", ")
    assert results[0] == "out"
    assert results[1] in ("lse", "softmax_lse")


@pytest.mark.parametrize(("beside_rings", "free"), [(False, 0), (True, 16)])
def test_package_3_leaves_multiprocessors_to_nccl_beside_rings(beside_rings, free, monkeypatch):
    """In every release, and where the operator is made by name."""
    calls = []

    def record(kind):
        def call(**given):
            calls.append((kind, given.get("sm_margin", "not given")))
            return given["q"], given["q"][..., 0].transpose(1, 2)

        return call

    def both_passes(name, entry):
        loaded = fitted(name, entry)
        loaded = loaded._replace(
            forward=loaded.forward._replace(function=record("forward")),
            backward=loaded.backward._replace(function=record("backward")),
        )
        monkeypatch.setattr(flash, "load", lambda asked: loaded)
        operator = registry.KERNELS[name](torch.device("cuda"), beside_rings).operator
        (q, k, v, dout, out, lse), _, _ = given(name)
        operator.forward(q, k, v, True, None, None, 0.25)
        operator.backward(dout, q, k, v, out, lse, True, None, None, 0.25)

    entries_of_3 = [one for one in taken() if one[0] == "flash3"]
    for name, entry in entries_of_3:
        both_passes(name, entry)
    assert calls == [("forward", free), ("backward", free)] * len(entries_of_3)
    calls.clear()
    for name in ("flash2", "flash4"):
        both_passes(name, RECORD[name][-1])
    assert {found for _, found in calls} == {"not given"}


@pytest.mark.parametrize(
    ("ranks", "algorithm", "beside_rings"),
    [(1, "burst", False), (2, "burst", True), (2, "auto", True), (2, "ulysses", False)],
)
def test_kernels_are_told_whether_tensors_travel_meanwhile(
    ranks, algorithm, beside_rings, monkeypatch
):
    told, make = set(), registry.KERNELS["aten"]
    monkeypatch.setitem(registry.KERNELS, "aten", lambda *args: told.add(args[1]) or make(*args))
    x = [torch.zeros(8, 1, 2, 8) for _ in range(ranks)]
    ulysses = ranks if algorithm == "ulysses" else 1
    groups = mb.Groups.in_process(intra=ranks, ulysses=ulysses)
    rates = mb.Rates(1e9, 1e9, compute=1e9) if algorithm == "auto" else None
    mb.prepare(x, x, x, groups=groups, kernel="aten", algorithm=algorithm, rates=rates)
    assert told == {beside_rings}


def test_releases_that_take_windows():
    """All but those of FlashAttention 3 before December 2025, which take a pair of one name."""
    without = [(name, entry) for name, entry in taken() if not fitted(name, entry).windows]
    assert {name for name, _ in without} == {"flash3"}
    assert all("window_size=" in entry["forward"].split(", ") for _, entry in without)
    assert fitted("flash3", RECORD["flash3"][-1]).windows


def fits(name, entry):
    try:
        fitted(name, entry)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("name", FIRST)
def test_releases_are_taken_from_the_first_that_fits_to_the_newest(name):
    accepted = [release for n, release, entry in entries() if n == name and fits(name, entry)]
    assert accepted[0].startswith(FIRST[name][0])
    assert accepted[-1].startswith("main 2026")
    assert sum(len(entry["releases"]) for n, entry in taken() if n == name) == len(accepted)


@pytest.mark.parametrize("name", FIRST)
def test_releases_before_are_refused_by_name(name):
    words = FIRST[name][1]
    refused = [entry for entry in RECORD[name] if not fits(name, entry)]
    with pytest.raises(ValueError, match=rf"^there\.{words}"):
        fitted(name, refused[-1])


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ("q, k, v, scale", r"^there.f has no parameter softmax_scale, causal"),
        ("q, k, v, softmax_scale, causal, sink, tree", "wants sink, tree, which is not known"),
    ],
)
def test_functions_that_do_not_fit_are_refused(parameters, words):
    wanted = packages.Function("f", {})
    with pytest.raises(ValueError, match=words):
        packages.fit("there", function(parameters), wanted, packages.FORWARD)


def test_a_function_that_hides_its_parameters_is_refused():
    wanted = packages.Function("f", {})
    hidden = lambda *args, **kwargs: None  # noqa: E731
    with pytest.raises(ValueError, match=r"there\.f takes more than it names"):
        packages.fit("there", hidden, wanted, packages.FORWARD)


def test_an_operator_of_torch_shows_the_parameters_of_its_function():
    """Since 2.7 and 2025-12 the functions of packages 2 and 3 are such operators."""

    @torch.library.custom_op("megatron_burst_test::shown", mutates_args=())
    def shown(q: torch.Tensor, window_size_left: int, softcap: float = 0.0) -> torch.Tensor:
        return q.clone()

    assert list(Signature("shown", shown).named) == ["q", "window_size_left", "softcap"]


def test_gradients_that_may_differ_are_said_to():
    deterministic = {
        release: fitted("flash3", entry).deterministic
        for name, release, entry in entries()
        if name == "flash3" and fits(name, entry)
    }
    assert [r[:15] for r, sure in deterministic.items() if sure][:1] == ["main 2025-12-04"]
    assert not deterministic["v2.8.3"]
    assert fitted("flash2", RECORD["flash2"][-1]).deterministic
    assert fitted("flash4", RECORD["flash4"][-1]).deterministic


# --- what is not there, or does not fit ------------------------------------------------------


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """Puts a file where package 4 has its functions."""
    modules = ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface")

    def plant(text):
        folder = tmp_path / str(len(list(tmp_path.iterdir()))) / "flash_attn" / "cute"
        folder.mkdir(parents=True)
        for package in (folder, folder.parent):
            (package / "__init__.py").touch()
        (folder / "interface.py").write_text(text)
        monkeypatch.syspath_prepend(folder.parents[1])
        for module in modules:
            sys.modules.pop(module, None)

    kept = {module: sys.modules[module] for module in modules if module in sys.modules}
    yield plant
    for module in modules:
        sys.modules.pop(module, None)
    sys.modules.update(kept)


@pytest.mark.parametrize("name", packages.PACKAGES)
def test_a_package_that_is_absent_is_named(name):
    if packages.PACKAGES[name].version is not None:
        pytest.skip("it is installed")
    x = torch.zeros(4, 1, 1, 8)
    title, package = packages.PACKAGES[name].title, packages.PACKAGES[name].distribution
    words = rf"^kernel {name}: {title} is not installed \(package {package}\); .*kernel='auto'"
    with pytest.raises(NotInstalled, match=words):
        registry.make(name, x, x, x)
    with pytest.raises(ValueError, match=words):
        mb.attention([x], [x], [x], groups=mb.Groups.in_process(intra=1), kernel=name)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import not_there_at_all", "ModuleNotFoundError: No module named 'not_there_at_all'"),
        ("raise OSError('libcudart.so:\\n no such file')", "OSError: libcudart.so: no such file"),
        ("_flash_attn_bwd = 1", "flash_attn.cute.interface has no function _flash_attn_fwd"),
    ],
)
def test_a_package_that_cannot_be_used_is_named(text, words, planted):
    planted(text)
    with pytest.raises(ValueError, match=rf"^kernel flash4: .*{words}.*install flash-attn-4"):
        packages.load("flash4")


def test_the_doctor_says_what_it_found(planted):
    absent = list(installed.flash_attention())
    assert [one.topic for one in absent] == [f"FlashAttention {n}" for n in (2, 3, 4)]
    if not any(package.version for package in packages.PACKAGES.values()):
        assert {one.what for one in absent} == {"not installed, and not needed"}
    older = next(entry for entry in RECORD["flash4"] if "fa4-v4.0.0.beta4" in entry["releases"])
    newer = RECORD["flash4"][-1]
    for entry, level, words in [
        (older, "note", "not usable: .*_flash_attn_bwd has no parameter dlse"),
        (newer, "ok", "its functions fit --burst-kernel flash4"),
    ]:
        planted(
            f"def _flash_attn_fwd({entry['forward'].replace('=', '=None')}): ...\n"
            f"def _flash_attn_bwd({entry['backward'].replace('=', '=None')}): ...\n"
        )
        found = list(installed.flash_attention())[2]
        assert found.level == level
        assert re.search(words, found.what), found


@pytest.mark.parametrize(
    ("name", "major", "width", "deterministic", "words"),
    [
        ("flash2", 7, 64, False, "capability 8 on, got 7"),
        ("flash2", 8, 264, False, "widths up to 256, got 264"),
        ("flash2", 12, 256, True, None),
        ("flash3", 10, 64, False, "capability 8 to 9, got 10"),
        ("flash3", 9, 256, False, None),
        ("flash3", 9, 256, True, "up to 192 where gradients must be deterministic, got 256"),
        ("flash3", 9, 192, True, None),
        ("flash4", 8, 64, False, "capability 9 to 12, got 8"),
        ("flash4", 9, 256, True, None),
        ("flash4", 10, 128, True, None),
        ("flash4", 10, 192, False, "up to 128 on compute capability 10, got 192"),
        ("flash4", 12, 64, True, "no deterministic gradients on compute capability 12"),
        ("flash4", 12, 64, False, None),
    ],
)
def test_devices_and_widths_that_a_package_does_not_serve(name, major, width, deterministic, words):
    reason = flash.unfit(name, major, width, deterministic)
    assert reason is None if words is None else words in reason


@pytest.mark.slow
@pytest.mark.skipif(packages.PACKAGES["flash4"].version is None, reason="it is not installed")
@pytest.mark.parametrize(
    ("major", "widths", "words"),
    [
        (9, (128, 128), "compiled"),
        (9, (192, 128), "compiled"),
        (9, (256, 256), "compiled"),
        (10, (64, 64), "compiled"),
        (10, (128, 128), "compiled"),
        (10, (192, 128), r"\(192, 192\) is not supported"),
        (10, (256, 256), "does not support dlse"),
    ],
)
def test_package_4_compiles_for_what_we_pass(major, widths, words):
    """Where it is installed: its own checks, and the compiler's; and it refuses as `unfit` does."""
    reason = flash.unfit("flash4", major, max(widths), False)
    assert (reason is None) == (words == "compiled")
    arch = {"FLASH_ATTENTION_ARCH": f"sm_{major}0", "CUTE_DSL_ARCH": f"sm_{major}0a"}
    masks = ("full", "causal") if major == 9 else ("causal",)
    done = subprocess.run(
        [sys.executable, str(TESTS / "flash4_compiles.py"), *map(str, widths), *masks],
        env=os.environ
        | arch
        | {"FLASH_ATTENTION_NUM_SMS": "132", "PYTHONPATH": str(TESTS.parents[1])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert re.search(words, done.stdout + done.stderr), done.stderr[-3000:]


# --- an operator that takes delta ------------------------------------------------------------


def weights(q, k, v, lse, scale, causal, left, right):
    """In [b, s, h, d]: k and v for every query head, and exp(score - lse) as [b, h, s, t]. Of a
    window: row s - 1 sees column t - 1, and columns as far from there as the window says."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bshd,bthd->bhst", q, k) * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    if left is not None:
        assert not causal
        assert left >= 0 <= right  # less would be no limit to some packages
        rows, columns = scores.shape[-2:]
        ahead = (torch.arange(columns) - columns) - (torch.arange(rows) - rows)[:, None]
        scores = scores.masked_fill((ahead < -left) | (ahead > right), float("-inf"))
    lse = torch.logsumexp(scores, dim=-1) if lse is None else lse
    return k, v, torch.exp(scores - lse.unsqueeze(-1)), lse


def forward_by_hand(
    q, k, v, softmax_scale, causal, return_lse, window_size_left=None, window_size_right=None
):
    """What package 4's forward computes, in float64."""
    sides = window_size_left, window_size_right
    _, v, p, lse = weights(q, k, v, None, softmax_scale, causal, *sides)
    return torch.einsum("bhst,bthw->bshw", p, v), lse, None, None


def backward_by_hand(
    q, k, v, out, dout, lse, dq, dk, dv, softmax_scale, causal, deterministic, dlse,
    window_size_left=None, window_size_right=None,
):  # fmt: skip
    """What package 4's backward computes, in float64, with the gradient of lse."""
    sides = window_size_left, window_size_right
    keys, values, p, _ = weights(q, k, v, lse, softmax_scale, causal, *sides)
    d = (dout * out).sum(-1).transpose(1, 2) - dlse
    ds = p * (torch.einsum("bshw,bthw->bhst", dout, values) - d.unsqueeze(-1)) * softmax_scale
    grads = (
        torch.einsum("bhst,bthd->bshd", ds, keys),
        torch.einsum("bhst,bshd->bthd", ds, q),
        torch.einsum("bhst,bshw->bthw", p, dout),
    )
    for into, grad in zip((dq, dk, dv), grads, strict=True):
        into.copy_(grad.unflatten(2, (into.shape[2], -1)).sum(3))


class ByHand(flash.Flash):
    """Package 4 on the CPU: the arguments and the shapes are ours, the arithmetic by hand."""

    device = "cpu"
    dtypes = (torch.float64,)
    multiple = 1

    def unfit(self, device, width):
        return None


def by_hand():
    package = packages.PACKAGES["flash4"]
    loaded = packages.fitted(package, "by hand", forward_by_hand, backward_by_hand)
    return AtenKernel("by hand", ByHand("flash4", package, loaded))


@pytest.mark.parametrize("travelling", [False, True], ids=["own", "travelling"])
@pytest.mark.parametrize("widths", [(4, 4), (5, 3), (3, 5)], ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_an_operator_that_takes_delta_is_the_oracle(mask, heads, widths, travelling, monkeypatch):
    kernel = by_hand()
    monkeypatch.setattr(aten, "stand_in", None)  # must not be called
    inputs = tensors(12, 2, heads, widths)
    truth = oracle.attention(*inputs, oracle.visible(mask, 12))
    got = run(kernel, MASKS[mask], *inputs, travelling=travelling)
    assert_exact(got, (truth[0], *truth[2:]))


@pytest.mark.parametrize("travelling", [False, True], ids=["own", "travelling"])
@pytest.mark.parametrize(
    "window", [(0, 0), (3, 0), (3, 2), (1, None), (8, 1), (9, 0), (20, 0)], ids=str
)
@pytest.mark.parametrize(
    "spans",  # of queries, of keys
    [
        ([Span(0, 1, 12)], [Span(0, 1, 12)]),
        ([Span(0, 1, 5), Span(7, 1, 7)], [Span(0, 1, 5), Span(7, 1, 7)]),  # zigzag
        ([Span(1, 3, 12)], [Span(2, 3, 12)]),  # striped: the own position is not there
        ([Span(2, 3, 12)], [Span(1, 3, 12)]),
    ],
    ids=str,
)
def test_windows_of_an_operator_are_the_oracle(spans, window, travelling):
    """Local bands: aligned to the last row and column, cropped where rows see nothing."""
    inputs = tensors(12, 2, (4, 2), (5, 3))
    rows, columns = (np.concatenate([span.positions() for span in side]) for side in spans)
    ahead = torch.from_numpy(columns[None, :] - rows[:, None])
    left, right = window
    seen = (ahead >= -left) & ((ahead <= right) if right is not None else True)
    truth = oracle.attention(*inputs, seen)
    q_spans, k_spans = spans
    kernel = by_hand()
    if not seen.any():
        assert kernel.work_for(Window(left, right), q_spans, k_spans) is None
        return
    got = run(
        kernel, Window(left, right), *inputs, spans=q_spans, travelling=travelling, k_spans=k_spans
    )
    assert_exact(got, (truth[0], *truth[2:]))
