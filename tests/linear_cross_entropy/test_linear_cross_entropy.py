"""LM head and loss in one process, against formulas written out by hand in float64.

`test_fuzz_lm_head.py` draws options, masks, tiles, strides and gradients in all combinations.
"""

import warnings

import head_oracle as oracle
import pytest
import torch
from head_oracle import Options
from torch.utils._python_dispatch import TorchDispatchMode

import megatron_burst as mb
from megatron_burst.linear_cross_entropy import tiled_loop

TOKENS, WIDTH, VOCABULARY = 11, 8, 13
TOLERANCE = 1e-10
ROW = VOCABULARY * 8  # bytes of one row of float64 logits
TILES = {"one": None, "three-rows": 3 * ROW, "row": 1}


def problem(dtype=torch.float64, seed=0):
    """Return hidden, weight (leaves) and labels with an ignored one and the outermost ones."""
    make = torch.Generator().manual_seed(seed)
    hidden = (2 * torch.randn(TOKENS, WIDTH, generator=make, dtype=torch.float64)).to(dtype)
    weight = torch.randn(VOCABULARY, WIDTH, generator=make, dtype=torch.float64).to(dtype)
    labels = torch.randint(0, VOCABULARY, (TOKENS,), generator=make)
    labels[0], labels[1], labels[4] = 0, VOCABULARY - 1, Options().ignore_index
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def worst(results, truths):
    return max(
        (a.detach().double() - b).abs().max().item() for a, b in zip(results, truths, strict=True)
    )


def test_the_loss_is_not_multiplied_by_the_mask():
    hidden, weight, labels = problem()
    plain = mb.linear_cross_entropy(hidden, weight, labels)
    masked = mb.linear_cross_entropy(hidden, weight, labels, loss_mask=torch.zeros(TOKENS))
    assert torch.equal(plain, masked)
    assert (plain != 0).tolist() == [i != 4 for i in range(TOKENS)]


def test_it_is_announced_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            hidden, weight, labels = problem()
            loss = mb.linear_cross_entropy(hidden, weight, labels)
            (loss * torch.arange(TOKENS)).sum().backward()
    assert len(caught) == 1


@pytest.mark.parametrize("mode", ["single_pass", "recompute"])
def test_two_backwards_through_one_graph(mode):
    hidden, weight, labels = problem()
    loss = mb.linear_cross_entropy(hidden, weight, labels, mode=mode)
    first = torch.autograd.grad(loss.sum(), [hidden, weight], retain_graph=True)
    stored = [x.clone() for x in first]
    second = torch.autograd.grad(3 * loss.sum(), [hidden, weight])
    assert all(torch.equal(a, b) for a, b in zip(first, stored, strict=True))
    truth = oracle.gradients(hidden, weight, labels, torch.ones(TOKENS), Options())
    assert worst(first, truth) < TOLERANCE
    assert worst(second, [3 * x for x in truth]) < TOLERANCE


@pytest.mark.parametrize("mode", ["single_pass", "recompute"])
def test_two_uses_of_a_weight_in_one_graph(mode):
    hidden, weight, labels = problem()
    other = (hidden.detach() + 1).requires_grad_()
    loss = mb.linear_cross_entropy(hidden, weight, labels, mode=mode).sum()
    loss = loss + 2 * mb.linear_cross_entropy(other, weight, labels, mode=mode).sum()
    loss.backward()
    ones = torch.ones(TOKENS)
    dh, dw = oracle.gradients(hidden, weight, labels, ones, Options())
    dother, dw2 = oracle.gradients(other, weight, labels, 2 * ones, Options())
    assert worst([hidden.grad, other.grad, weight.grad], [dh, dother, dw + dw2]) < TOLERANCE


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("frozen", ["none", "hidden", "weight"])
@pytest.mark.parametrize("mode", ["single_pass", "recompute"])
def test_rows_that_do_not_count_may_hold_anything(mode, frozen, value):
    """Rows with an ignored label or weight 0 have no loss and do not affect gradients."""
    hidden, weight, labels = problem()
    mask = torch.ones(TOKENS, dtype=torch.float64)
    mask[7] = 0
    truth = oracle.loss(hidden, weight, labels, Options())[0]
    dh, dw = oracle.gradients(hidden, weight, labels, mask, Options())
    truth[7] = 0
    poisoned = hidden.detach().clone()
    poisoned[[4, 7]] = value
    poisoned.requires_grad_(frozen != "hidden")
    weight.requires_grad_(frozen != "weight")
    for loss_mask in (mask, mask.bool()):
        poisoned.grad = weight.grad = None
        loss = mb.linear_cross_entropy(
            poisoned, weight, labels, loss_mask=loss_mask, mode=mode, tile=3 * ROW
        )
        assert worst([loss], [truth]) < TOLERANCE
        (loss * mask).sum().backward()
        if frozen != "hidden":
            assert worst([poisoned.grad], [dh]) < TOLERANCE
            assert not poisoned.grad[[4, 7]].any()
        if frozen != "weight":
            assert worst([weight.grad], [dw]) < TOLERANCE
    assert poisoned.isfinite().all(1).tolist() == [i not in (4, 7) for i in range(TOKENS)]


def test_argmax_of_equal_logits_is_the_lowest():
    weight = torch.ones(6, 4)
    _, actual = mb.linear_cross_entropy(
        torch.ones(3, 4), weight, torch.zeros(3, dtype=torch.int64), return_argmax=True
    )
    assert actual.tolist() == [0, 0, 0]


def test_shapes_strides_and_no_gradient():
    hidden, weight, labels = problem()
    truth = oracle.loss(hidden, weight, labels, Options())[0][:10].view(5, 2)
    turned = hidden.detach()[:10].view(5, 2, WIDTH).transpose(0, 1).contiguous().transpose(0, 1)
    with torch.no_grad():
        loss = mb.linear_cross_entropy(turned, weight, labels[:10].view(5, 2).to(torch.int32))
    assert not loss.requires_grad
    assert loss.shape == (5, 2)
    assert worst([loss], [truth]) < TOLERANCE


@pytest.mark.parametrize("mode", ["single_pass", "recompute"])
def test_a_weight_that_is_widened_by_panels(mode, monkeypatch):
    """bf16 on CPU with panels of three rows, so that the last panel is shorter."""
    hidden, weight, labels = problem(dtype=torch.bfloat16)
    whole = ours(hidden, weight, labels % VOCABULARY, mode=mode)
    monkeypatch.setattr(tiled_loop, "PANEL_BYTES", 3 * 4 * WIDTH)
    panels = ours(hidden, weight, labels % VOCABULARY, mode=mode)
    for one, other in zip(whole, panels, strict=True):
        torch.testing.assert_close(one, other, rtol=2**-8, atol=1e-6)


def test_no_tokens():
    _, weight, labels = problem()
    hidden = torch.zeros(0, WIDTH, dtype=torch.float64, requires_grad=True)
    mb.linear_cross_entropy(hidden, weight, labels[:0]).sum().backward()
    assert hidden.grad.shape == (0, WIDTH)
    assert not weight.grad.any()


UNSIGNED = [torch.uint8, torch.uint16, torch.uint32]


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, *UNSIGNED], ids=str)
def test_labels_of_any_integer_type(dtype):
    """The vocabulary or ignore_index may exceed the range of the type."""
    make = torch.Generator().manual_seed(0)
    hidden = torch.randn(6, 2, generator=make, dtype=torch.float64).requires_grad_()
    weight = torch.randn(70_000, 2, generator=make, dtype=torch.float64).requires_grad_()
    top = torch.iinfo(dtype).max
    labels = torch.tensor([0, 1, min(top, 69_999), 100, 7, 7])
    if dtype not in UNSIGNED:
        labels[4] = -100
    loss = mb.linear_cross_entropy(hidden, weight, labels.to(dtype))
    loss.sum().backward()
    assert worst([loss], [oracle.loss(hidden, weight, labels, Options())[0]]) < TOLERANCE
    truth = oracle.gradients(hidden, weight, labels, torch.ones(6), Options())
    assert worst([hidden.grad, weight.grad], truth) < TOLERANCE


def test_what_ignore_index_is_modulo_256_is_not_ignored():
    labels = torch.tensor([156, 3], dtype=torch.uint8)  # -100 modulo 256
    with pytest.raises(ValueError, match=r"labels must be in \[0, 100\) .*, got 156"):
        mb.linear_cross_entropy(torch.ones(2, 4), torch.ones(100, 4), labels)
    hidden, weight = torch.ones(2, 4), torch.ones(200, 4)
    assert mb.linear_cross_entropy(hidden, weight, labels).all()


@pytest.mark.parametrize("upstream", ["ones", "any"])
@pytest.mark.parametrize("mode", ["single_pass", "recompute"])
def test_the_sink_gets_a_gradient_only_where_one_is_asked_for(mode, upstream):
    hidden, weight, labels = problem()
    upstream = torch.ones(TOKENS) if upstream == "ones" else torch.arange(TOKENS)
    stored, calls = torch.zeros_like(weight), []

    class Kept:
        def target(self):
            return stored

        def done(self):
            calls.append("done")

    loss = mb.linear_cross_entropy(hidden, weight, labels, mode=mode, sink=Kept())
    total = (loss * upstream).sum()
    dh, dw = oracle.gradients(hidden, weight, labels, upstream, Options())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the second computation of the logits
        (alone,) = torch.autograd.grad(total, hidden, retain_graph=True)
        assert worst([alone], [dh]) < TOLERANCE
        assert not stored.any()
        total.backward(inputs=[hidden], retain_graph=True)
        assert not stored.any()
        assert not calls
        torch.autograd.grad(total, weight, retain_graph=True, allow_unused=True)
        assert worst([stored], [dw]) < TOLERANCE
        total.backward()
    assert worst([stored, hidden.grad], [2 * dw, 2 * dh]) < TOLERANCE
    assert calls == ["done"] * 2


def test_a_scale_that_is_learnt_belongs_into_hidden():
    """The remedy in the error message for a tensor as logit_scale works."""
    hidden, weight, labels = problem()
    scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    mb.linear_cross_entropy(hidden * scale, weight, labels).sum().backward()
    dh, dw = oracle.gradients(hidden, weight, labels, torch.ones(TOKENS), Options(0.7))
    assert worst([hidden.grad, weight.grad], [dh, dw]) < TOLERANCE
    assert worst([scale.grad], [(dh * hidden).sum() / 0.7]) < TOLERANCE


# --- low precision ---------------------------------------------------------------------------


def eager(hidden, weight, labels):
    """Return loss, dhidden and dweight of the sum, by torch's operators in the given dtype."""
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    logits = (hidden @ weight.T).float()
    loss = logits.logsumexp(1) - logits.gather(1, labels[:, None])[:, 0]
    loss.sum().backward()
    return loss.detach(), hidden.grad, weight.grad


def ours(hidden, weight, labels, **choices):
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    loss = mb.linear_cross_entropy(hidden, weight, labels, **choices)
    loss.sum().backward()
    return loss.detach(), hidden.grad, weight.grad


def relative(results, truths):
    return [
        ((a.double() - b).norm() / b.norm()).item() for a, b in zip(results, truths, strict=True)
    ]


@pytest.mark.parametrize("mode", ["single_pass", "recompute"])
def test_bf16_errs_no_more_than_eager_bf16(mode):
    make = torch.Generator().manual_seed(1)
    hidden = torch.randn(256, 64, generator=make).bfloat16()
    weight = torch.randn(500, 64, generator=make).bfloat16()
    labels = torch.randint(0, 500, (256,), generator=make)
    truth = (
        oracle.loss(hidden, weight, labels, Options())[0],
        *oracle.gradients(hidden, weight, labels, torch.ones(256), Options()),
    )
    stock = relative(eager(hidden, weight, labels), truth)
    actual = relative(ours(hidden, weight, labels, mode=mode, tile=50 * 500 * 4), truth)
    assert all(f <= s for f, s in zip(actual, stock, strict=True)), (actual, stock)
    assert actual[0] < 1e-6  # the loss comes from logits in fp32


@pytest.mark.parametrize("tokens", [8192, 32768])
def test_the_weight_gradient_adds_up_better_than_eager_bf16(tokens):
    """Tiles add to an fp32 sum; eager rounds its logits and their gradient to bf16."""
    make = torch.Generator().manual_seed(2)
    hidden = torch.randn(tokens, 16, generator=make).bfloat16()
    weight = (torch.randn(64, 16, generator=make) / 4).bfloat16()
    labels = torch.randint(0, 64, (tokens,), generator=make)
    truth = torch.zeros(64, 16, dtype=torch.float64)
    for start in range(0, tokens, 4096):
        part = slice(start, start + 4096)
        truth += oracle.gradients(hidden[part], weight, labels[part], torch.ones(4096), Options())[
            1
        ]
    stored = torch.zeros(64, 16)

    class Fp32:
        def target(self):
            return stored

        def done(self):
            return None

    ours(hidden, weight, labels, sink=Fp32(), tile=512 * 64 * 4)
    stock = relative([eager(hidden, weight, labels)[2]], [truth])
    assert relative([stored], [truth])[0] < 1e-5 < stock[0] / 10


# --- memory ----------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Size in bytes of the largest tensor that any operator returned."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", ["single_pass", "recompute"])
def test_no_tensor_is_larger_than_the_tile(mode, dtype):
    hidden = torch.randn(4096, 8, dtype=dtype, requires_grad=True)
    weight = torch.randn(2000, 8, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, 2000, (4096,))
    tile = 64 * 2000 * 4
    with Largest() as largest:
        mb.linear_cross_entropy(hidden, weight, labels, tile=tile, mode=mode).sum().backward()
    assert largest.bytes == tile  # all logits would be 64 times that
