"""FlashAttention packages: our arguments fit the signatures of their releases.

Our tensors fit what their sources require. No kernel of theirs runs here; if FlashAttention 4 is
installed, it compiles. `flash_signatures.json` has the parameters of every release, read from the
sources by `flash_signatures.py`.
"""

import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import oracle
import pytest
import torch
from kernel_runs import HEADS, MASKS, assert_exact, run, tensors
from recorded_signatures import OnCpu, function, signature

import megatron_burst as mb
from megatron_burst.cli.doctor import installed
from megatron_burst.kernels import aten, flash, registry
from megatron_burst.kernels import flash_packages as packages
from megatron_burst.kernels.aten import AtenKernel
from megatron_burst.kernels.operators import Lengths, TileVisibility
from megatron_burst.kernels.packages import NotInstalled, Signature
from megatron_burst.layout import Span
from megatron_burst.masks import Window
from megatron_burst.plugins.testing import in_process

TESTS = Path(__file__).parent
RECORD = json.loads((TESTS / "flash_signatures.json").read_text())
# The first release we take; what the one before it lacks.
FIRST = {
    "flash3": ("main 2025-01-07", "_flash_attn_forward has no parameter num_splits"),
    "flash4": ("fa4-v4.0.0.beta5", "_flash_attn_bwd has no parameter dlse"),
}


def fitted(name, entry):
    both = (function(entry[kind]) for kind in ("forward", "backward"))
    return packages.fitted(packages.PACKAGES[name], "there", *both)


def entries():
    for name, found in RECORD.items():
        releases = [(release, entry) for entry in found for release in entry["releases"]]
        yield from ((name, release, entry) for release, entry in releases)


def taken():
    """Return the entries from the first supported release on."""
    for name, found in RECORD.items():
        first = [any(r.startswith(FIRST[name][0]) for r in entry["releases"]) for entry in found]
        yield from ((name, entry) for entry in found[first.index(True) :])


def ids(values):
    return [f"{name} {entry['releases'][0]}" for name, entry in values]


def recorded(name, entry, beside_rings=False):
    """Return the operator of a release whose functions record their arguments, and that list."""
    calls = []

    def note(kind, whole):
        def call(**given):
            calls.append(whole.bind(**given).arguments)
            q, v = calls[-1]["q"], calls[-1]["v"]
            return q.new_zeros(*q.shape[:-1], v.shape[-1]), q[..., 0].transpose(-1, -2)

        return call

    loaded = fitted(name, entry)
    loaded = loaded._replace(
        **{
            kind: getattr(loaded, kind)._replace(function=note(kind, signature(entry[kind])))
            for kind in ("forward", "backward")
        }
    )
    return flash.Flash(name, packages.PACKAGES[name], loaded, beside_rings), calls


def both_passes(operator, shown, batch=2):
    """Run forward and backward of small tensors; return q, lse, and out or delta."""
    q, k, v, dout = (x.permute(1, 2, 0, 3) for x in tensors(6, batch, (4, 2), (8, 8)))
    lse = torch.rand(6, batch, 4).permute(1, 2, 0)
    out = lse + 1 if operator.takes_delta else torch.rand_like(dout)
    result, stats = operator.forward(q, k, v, shown, 0.25)
    assert (result.shape, stats.shape) == (q.shape, q.shape[:3])
    grads = operator.backward(dout, q, k, v, out, lse, shown, 0.25)
    assert [grad.shape for grad in grads] == [x.shape for x in (q, k, v)]
    return q, lse, out


# --- signatures ----------------------------------------------------------------------------


@pytest.mark.parametrize("many", [False, True], ids=["one", "many"])
@pytest.mark.parametrize(("name", "entry"), list(taken()), ids=ids(taken()))
def test_our_arguments_fit_every_release_we_take(name, entry, many):
    """Also with a window, if supported, and with many sequences end to end."""
    operator, calls = recorded(name, entry)
    assert operator.joins
    lengths = Lengths([(1, 1), (3, 0), (0, 2), (2, 3)]) if many else None
    shown = TileVisibility(
        causal=True, window=(3, 0) if operator.windows else None, lengths=lengths
    )
    q, lse, out = both_passes(operator, shown, batch=1 if many else 2)
    end_to_end = lambda x: x.transpose(1, 2)[0] if many else x.transpose(1, 2)  # noqa: E731
    for call in calls:
        assert call["softmax_scale"] == 0.25
        assert (call["is_causal"] if "is_causal" in call else call["causal"]) is True
        if operator.windows:
            assert (call["window_size_left"], call["window_size_right"]) == (3, 0)
        if many:
            assert call["cu_seqlens_q"].tolist() == [0, 1, 4, 4, 6]
            assert call["cu_seqlens_k"].tolist() == [0, 1, 1, 3, 6]
            assert call["cu_seqlens_q"].dtype == call["cu_seqlens_k"].dtype == torch.int32
            assert (call["max_seqlen_q"], call["max_seqlen_k"]) == (3, 3)
            assert call.get("seqused_q") is call.get("sequed_q") is None
        else:
            assert call.get("cu_seqlens_q") is call.get("max_seqlen_k") is None
        assert call["q"].shape == end_to_end(q).shape
        assert call["k"].shape == (*call["q"].shape[:-2], 2, 8)
        assert call["q"].data_ptr() == q.data_ptr()
    _, second = calls
    stats = second.get("softmax_lse", second.get("lse"))
    assert stats.is_contiguous()
    assert torch.equal(stats, lse[0] if many else lse)
    assert second["deterministic"] is False
    assert [second[x].shape for x in ("dq", "dk", "dv")] == [second[x].shape for x in "qkv"]
    if name == "flash4":
        assert not second["out"].any()
        assert second["out"].shape == second["dout"].shape
        assert torch.equal(second["dlse"], -(out[0] if many else out))
        assert second["dlse"].is_contiguous()
    else:
        assert torch.equal(second["out"], end_to_end(out))
    results = entry["results"].split(", ")
    assert results[0] == "out"
    assert results[1] in ("lse", "softmax_lse")


def test_package_4_gets_zeros_that_are_filled_once_per_pass(monkeypatch):
    operator, calls = recorded("flash4", RECORD["flash4"][-1])
    filled = []
    fill = lambda *args, own=torch.zeros, **given: filled.append(args) or own(*args, **given)  # noqa: E731
    monkeypatch.setattr(torch, "zeros", fill)
    q, k, v, dout = (x.permute(1, 2, 0, 3) for x in tensors(6, 2, (4, 2), (8, 8)))
    lse = torch.rand(2, 4, 6)
    for _ in range(2):
        operator.forward(q, k, v, TileVisibility(), 1.0)
        for rows in (6, 6, 6, 3, 3):  # five pairs of a pass
            part = (x[:, :, :rows] for x in (dout, q, k, v, lse, lse))
            operator.backward(*part, TileVisibility(), 1.0)
            assert calls[-1]["out"].shape == calls[-1]["dout"].shape
            assert calls[-1]["out"].is_contiguous()
            assert not calls[-1]["out"].any()
    assert len(filled) == 4


@pytest.mark.parametrize(("beside_rings", "free"), [(False, 0), (True, 16)])
def test_package_3_leaves_multiprocessors_to_nccl_beside_rings(beside_rings, free, monkeypatch):
    """In every release, and if the operator is made by name."""
    for name, entry in taken():
        made, calls = recorded(name, entry)
        monkeypatch.setattr(flash, "load", lambda asked, loaded=made.loaded: loaded)
        operator = registry.KERNELS[name](torch.device("cuda"), beside_rings).operator
        both_passes(operator, TileVisibility(causal=True))
        given = [call.get("sm_margin", "not given") for call in calls]
        assert given == [free if name == "flash3" else "not given"] * 2


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
    groups = in_process.groups(intra=ranks, ulysses=ulysses)
    rates = mb.Rates(1e9, 1e9, compute=1e9) if algorithm == "auto" else None
    in_process.prepare(x, x, x, groups=groups, kernel="aten", algorithm=algorithm, rates=rates)
    assert told == {beside_rings}


def test_releases_that_take_windows():
    """All but FlashAttention 3 before December 2025, which has one parameter for both sides."""
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
    ("code", "words"),
    [
        (function("q, k, v, scale"), r"^there.f has no parameter softmax_scale, causal"),
        (function("q, k, v, softmax_scale, causal, sink, tree"),
         "requires sink, tree, which megatron_burst does not pass"),
        (lambda *args, **kwargs: None, r"there\.f has parameters that cannot be passed by name"),
    ],
    ids=["lacks", "wants", "hides"],
)  # fmt: skip
def test_functions_that_do_not_fit_are_refused(code, words):
    with pytest.raises(ValueError, match=words):
        packages.fit("there", code, packages.FlashFunction("f", {}), packages.FORWARD)


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
    assert fitted("flash4", RECORD["flash4"][-1]).deterministic


# --- what is not there, or does not fit ------------------------------------------------------


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """Create a file where package 4 has its functions."""
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
        in_process.attention([x], [x], [x], groups=in_process.groups(intra=1), kernel=name)


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
    assert [one.topic for one in absent] == [f"FlashAttention {n}" for n in (3, 4)]
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
        found = list(installed.flash_attention())[1]
        assert found.level == level
        assert re.search(words, found.what), found


@pytest.mark.parametrize(
    ("name", "major", "widths", "deterministic", "words"),
    [
        ("flash3", 7, 64, False, "capability 8 to 9, got 7"),
        ("flash3", 8, 264, False, "widths up to 256, got 264"),
        ("flash3", 8, (192, 128), False, "equal widths of keys and values"),
        ("flash3", 10, 64, False, "capability 8 to 9, got 10"),
        ("flash3", 9, 256, False, None),
        ("flash3", 9, 256, True, "up to 192 if gradients must be deterministic, got 256"),
        ("flash3", 9, 192, True, None),
        ("flash3", 9, (192, 128), True, None),
        ("flash3", 9, (160, 104), False, None),
        ("flash3", 9, (128, 64), False, "equal widths"),
        ("flash3", 8, (192, 128), False, "equal widths"),
        ("flash4", 8, 64, False, "capability 9 to 12, got 8"),
        ("flash4", 9, 256, True, None),
        ("flash4", 9, (192, 128), True, "equal widths"),
        ("flash4", 10, 128, True, None),
        ("flash4", 10, 192, False, "up to 128 on compute capability 10, got 192"),
        ("flash4", 10, (192, 128), False, None),
        ("flash4", 10, (64, 128), False, None),
        ("flash4", 10, (128, 192), False, "up to 128 on compute capability 10, got 192"),
        ("flash4", 12, 64, True, "no deterministic gradients on compute capability 12"),
        ("flash4", 12, 64, False, None),
        ("flash4", 12, (128, 64), False, "equal widths"),
    ],
)
def test_devices_and_widths_that_a_package_does_not_serve(
    name, major, widths, deterministic, words
):
    widths = (widths, widths) if isinstance(widths, int) else widths
    reason = flash.unfit(name, major, widths, deterministic)
    assert reason is None if words is None else re.search(words, reason)


def test_older_releases_of_package_3_take_one_width():
    """Before December 2025, signatures do not show whether backward supports two widths."""
    assert "equal widths" in flash.unfit("flash3", 9, flash.MLA, False, newer=False)


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
        (10, (192, 128), "compiled"),
        (10, (192, 192), r"\(192, 192\) is not supported"),
        (10, (256, 256), "does not support dlse"),
    ],
)
def test_package_4_compiles_for_what_we_pass(major, widths, words):
    """If installed, its checks and compiler accept our arguments, and refuse as `unfit` does."""
    served = (
        flash.unfit("flash4", major, widths, False),
        flash.unfit("flash4", major, (widths[0],) * 2, False),
    )
    assert (None in served) == (words == "compiled")  # as they are, or padded
    arch = {"FLASH_ATTENTION_ARCH": f"sm_{major}0", "CUTE_DSL_ARCH": f"sm_{major}0a"}
    masks = ("full", "causal", "documents") if major == 9 else ("causal", "documents")
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


# --- what they compute, written out ---------------------------------------------------------


def hidden(rows, columns, causal, left, right):
    """Return bool [rows, columns] of hidden pairs of one sequence.

    A window is aligned to the last row and column.
    """
    ahead = (torch.arange(columns) - columns) - (torch.arange(rows) - rows)[:, None]
    found = torch.zeros(rows, columns, dtype=torch.bool)
    if causal:
        assert rows == columns or not rows or not columns
        found |= ahead > 0
    if left is not None and left != -1:  # the one is package 4's word for no limit, the other 3's
        assert not causal
        assert left >= 0 <= right  # less would be no limit to some packages
        # package 2 takes a right edge from `columns` on for `columns`, from the last row
        assert rows <= columns or not columns
        found |= (ahead < -left) | (ahead > right)
    return found


def sequences(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
    """Return the slices of rows and columns of every sequence.

    Tensors are [b, s, h, d], or [s, h, d] with `longest` at least the longest sequence.
    """
    if cu_seqlens_q is None:
        return [(slice(None), slice(None))]
    ends = [x.tolist() for x in (cu_seqlens_q, cu_seqlens_k)]
    assert [each[-1] for each in ends] == [len(q), len(k)]
    sides = [[slice(a, b) for a, b in pairwise(each)] for each in ends]
    longest = [max(x.stop - x.start for x in side) for side in sides]
    assert longest[1] == max_seqlen_k
    assert longest[0] == max_seqlen_q or (longest[0], max_seqlen_q) == (1, 2)
    return list(zip(*sides, strict=True))


def weights(q, k, v, lse, scale, *shown):
    """Return k and v per query head, and exp(score - lse), of one sequence in [b, s, h, d]."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bshd,bthd->bhst", q, k) * scale
    scores = scores.masked_fill(hidden(*scores.shape[-2:], *shown), float("-inf"))
    lse = torch.logsumexp(scores, dim=-1) if lse is None else lse
    return k, v, torch.exp(scores - lse.unsqueeze(-1)), lse


class ByHand:
    """Both functions of a package in float64, with the parameters of its newest release.

    `written` is the result for rows without columns: 3 writes out 0 and lse -inf, 4 on sm_90
    anything.
    """

    def __init__(self, name, written):
        self.name, self.written, self.calls = name, written, []

    def forward(self, q, k, v, **given):
        many, shown, scale = self._read(q, k, given)
        self.calls.append(len(many))
        whole = (q, k, v) if q.dim() == 4 else [x[None] for x in (q, k, v)]
        b, s, h, _ = whole[0].shape
        out = q.new_full((b, s, h, v.shape[-1]), float("nan"))
        lse = q.new_full((b, h, s), float("nan"))
        for r, c in many:
            own = (whole[0][:, r], whole[1][:, c], whole[2][:, c])
            if own[1].shape[1]:
                _, values, p, lse[:, :, r] = weights(*own, None, scale, *shown)
                out[:, r] = torch.einsum("bhst,bthw->bshw", p, values)
            else:
                out[:, r], lse[:, :, r] = self.written
        return (out, lse) if q.dim() == 4 else (out[0], lse[0])

    def backward(self, dout, q, k, v, out, dq, dk, dv, dlse=None, lse=None, **given):
        many, shown, scale = self._read(q, k, given)
        lse = given.get("softmax_lse", lse)
        stats = [lse] if dlse is None else [lse, dlse]
        names = [dout, q, k, v, out, dq, dk, dv]
        if q.dim() == 3:
            names, stats = [x[None] for x in names], [x[None] for x in stats]
        dout, q, k, v, out, dq, dk, dv = names
        lse, dlse = stats[0], stats[-1] if dlse is not None else torch.zeros_like(stats[0])
        for r, c in many:
            keys, values, p, _ = weights(q[:, r], k[:, c], v[:, c], lse[:, :, r], scale, *shown)
            d = (dout[:, r] * out[:, r]).sum(-1).transpose(1, 2) - dlse[:, :, r]
            dp = torch.einsum("bshw,bthw->bhst", dout[:, r], values)
            ds = p * (dp - d.unsqueeze(-1)) * scale
            dq[:, r] = torch.einsum("bhst,bthd->bshd", ds, keys)
            for into, x, y in ((dk, ds, q), (dv, p, dout)):
                grad = torch.einsum("bhst,bshd->bthd", x, y[:, r])
                into[:, c] = grad.unflatten(2, (into.shape[2], -1)).sum(3)

    def _read(self, q, k, given):
        names = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"
        many = sequences(q, k, *(given[name] for name in names))
        causal = given["causal"] if "causal" in given else given["is_causal"]
        shown = causal, given["window_size_left"], given["window_size_right"]
        return many, shown, given["softmax_scale"]


def by_hand(name, written=(0.0, float("-inf"))):
    """Return the kernel, and the number of sequences of each forward call."""
    entry, written_out = RECORD[name][-1], ByHand(name, written)
    loaded = fitted(name, entry)
    loaded = loaded._replace(
        forward=loaded.forward._replace(function=written_out.forward),
        backward=loaded.backward._replace(function=written_out.backward),
    )
    operator = OnCpu(name, packages.PACKAGES[name], loaded)
    return AtenKernel("by hand", operator), written_out.calls


@pytest.mark.parametrize("travelling", [False, True], ids=["own", "travelling"])
@pytest.mark.parametrize("widths", [(4, 4), (5, 3), (3, 5)], ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_an_operator_that_takes_delta_is_the_oracle(mask, heads, widths, travelling, monkeypatch):
    kernel, _ = by_hand("flash4")
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
    """Local bands: aligned to the last row and column, cropped if rows see nothing."""
    inputs = tensors(12, 2, (4, 2), (5, 3))
    rows, columns = (np.concatenate([span.positions() for span in side]) for side in spans)
    ahead = torch.from_numpy(columns[None, :] - rows[:, None])
    left, right = window
    seen = (ahead >= -left) & ((ahead <= right) if right is not None else True)
    truth = oracle.attention(*inputs, seen)
    q_spans, k_spans = spans
    kernel, _ = by_hand("flash4")
    if not seen.any():
        assert kernel.works_for(Window(left, right), [(q_spans, k_spans)])[0] is None
        return
    got = run(
        kernel, Window(left, right), *inputs, spans=q_spans, travelling=travelling, k_spans=k_spans
    )
    assert_exact(got, (truth[0], *truth[2:]))


ENDS = [0, 5, 6, 31, 80, 81, 99, 156]


@pytest.mark.parametrize("side", ["kv", "query"])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("layout", ["zigzag", "striped", "balanced"])
@pytest.mark.parametrize("name", ["flash3", "flash4"])
def test_packed_documents_are_the_oracle_in_one_call_per_pair(name, layout, window, side):
    """Over three ranks; rows without columns have the result of each package, or a worse one."""
    reach = ENDS[-1] if window is None else window
    document, place = np.searchsorted(ENDS, np.arange(156), side="right"), np.arange(156)
    ahead = place[:, None] - place
    seen = (document[:, None] == document) & (ahead >= 0) & (ahead <= reach)
    q, k, v, dout = tensors(156, 1, (4, 2), (8, 4))
    out, _, *grads = oracle.attention(q, k, v, dout, torch.from_numpy(seen))
    given = {"cu_seqlens": ENDS} if layout == "balanced" else {}
    layout = mb.layout.make(layout, cp_size=3, **given)
    mask = mb.masks.Documents(ENDS) & (mb.masks.Causal() if window is None else Window(window, 0))
    parts = [[mb.shard(x, layout, r, dim=0) for r in range(3)] for x in (q, k, v, dout)]
    shards = [[part.clone().requires_grad_() for part in each] for each in parts[:3]]
    kernel, calls = by_hand(name, (0.0, float("-inf")) if name == "flash3" else (5.0, 3.0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry.KERNELS, name, lambda device, beside_rings: kernel)
        outs = in_process.attention(
            *shards, groups=in_process.groups(intra=3), layout=layout, mask=mask, side=side,
            algorithm="ring", kernel=name,
        )  # fmt: skip
    torch.autograd.backward(outs, parts[3])
    assert oracle.worst(mb.unshard(outs, layout, dim=0), out) < 1e-11
    for each, wanted in zip(shards, grads, strict=True):
        assert oracle.worst(mb.unshard([x.grad for x in each], layout, dim=0), wanted) < 1e-11
    assert max(calls) > 3
    if window is None:  # three ranks, each with three chunks of keys
        assert len(calls) <= (18 if layout.name == "striped" else 9)
