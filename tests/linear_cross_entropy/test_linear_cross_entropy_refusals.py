"""Errors of the LM head: each message names the argument, its value and a remedy."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

import megatron_burst as mb
from megatron_burst.linear_cross_entropy.checks import checksum

TOKENS, WIDTH, VOCABULARY = 11, 8, 13


def arguments(**others):
    hidden = torch.ones(TOKENS, WIDTH, requires_grad=True)
    weight = torch.ones(VOCABULARY, WIDTH, requires_grad=True)
    return {"hidden": hidden, "weight": weight, "labels": torch.ones(TOKENS).long()} | others


LABELS = torch.ones(TOKENS).long()
NOT_BYTES = "tile must be a positive number of bytes, an integer such as 1 << 30, or None"
NOT_A_SCALE = "logit_scale must be a finite number (1.0: no scaling), got"
HALVES = {"hidden": torch.ones(TOKENS, WIDTH).half(), "weight": torch.ones(3, WIDTH).half()}
DTYPES = "hidden and weight must both be torch.float64, torch.float32, torch.bfloat16, got"
RANGE = "labels must be in [0, 13) or ignore_index (-100), got"
OTHER = f"{NOT_A_SCALE} a tensor [] of torch.float32"
REMEDY = "pass hidden * logit_scale instead"

REFUSED = {
    "mode": ({"mode": "twice"}, "mode must be one of single_pass, recompute, got str 'twice'"),
    "mode-list": (
        {"mode": ["single_pass"]},
        "mode must be one of single_pass, recompute, got list",
    ),
    "tile": ({"tile": 0}, f"{NOT_BYTES} for the default, got int 0"),
    "tile-string": ({"tile": "1GB"}, f"{NOT_BYTES} for the default, got str '1GB'"),
    "tile-bool": ({"tile": True}, f"{NOT_BYTES} for the default, got bool True"),
    "tile-float": ({"tile": 1.5}, f"{NOT_BYTES} for the default, got float 1.5"),
    "softcap": ({"logit_softcap": 0.0}, "logit_softcap must be a positive number, or None"),
    "scale": ({"logit_scale": float("nan")}, f"{NOT_A_SCALE} float nan"),
    "scale-none": ({"logit_scale": None}, f"{NOT_A_SCALE} None"),
    "scale-tensor": ({"logit_scale": torch.tensor(2.0)}, f"{OTHER}: {REMEDY}"),
    "scale-learnt": (
        {"logit_scale": torch.tensor(2.0, requires_grad=True)},
        f"{OTHER} that requires a gradient: {REMEDY}",
    ),
    "z-loss": ({"z_loss": -1.0}, "z_loss must be a finite number >= 0, got float -1.0"),
    "z-loss-tensor": ({"z_loss": torch.tensor(1.0)}, "pass a number; it gets no gradient"),
    "smoothing": ({"label_smoothing": 1.5}, "label_smoothing must be a number from 0 to 1, got"),
    "ignore": (
        {"ignore_index": None},
        "ignore_index must be an integer, -100 by default, got None",
    ),
    "vocabulary": ({"vocab_size": 14}, "vocab_size must be from 1 to the 13 rows of the weight"),
    "vocabulary-float": ({"vocab_size": 3.5}, "vocab_size must be a positive integer, or None"),
    "vocabulary-0": ({"vocab_size": 0}, "vocab_size must be a positive integer, or None for all"),
    "argmax": ({"return_argmax": 1}, "return_argmax must be True or False, got int 1"),
    "sequence": ({"sequence_parallel": 1}, "sequence_parallel must be True or False, got int 1"),
    "sink": ({"sink": 3}, "sink must have the methods target() and done(), or be None, got int 3"),
    "group": ({"tp_group": 4}, "tp_group must be a torch.distributed.ProcessGroup"),
    "no-group": ({"tp_group": dist.GroupMember.NON_GROUP_MEMBER}, "outside the group"),
    "mask": ({"loss_mask": torch.ones(3)}, "loss_mask must be shaped like labels, [11], got [3]"),
    "mask-list": ({"loss_mask": [1] * TOKENS}, "loss_mask must be a torch.Tensor of numbers"),
    "mask-complex": ({"loss_mask": torch.ones(TOKENS) * 1j}, "loss_mask must be real, got"),
    "mask-sparse": ({"loss_mask": torch.ones(TOKENS).to_sparse()}, "loss_mask must be dense"),
    "mask-gradient": (
        {"loss_mask": torch.ones(TOKENS, requires_grad=True)},
        "loss_mask must not require a gradient",
    ),
    "labels-none": ({"labels": None}, "labels must be a torch.Tensor of integers, got None"),
    "labels-list": (
        {"labels": [1] * TOKENS},
        "labels must be a torch.Tensor of integers, got list [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]: "
        "make one with torch.tensor",
    ),
    "labels-shape": ({"labels": LABELS[:-1]}, "labels must be [11] for hidden [11, 8], got [10]"),
    "labels-float": ({"labels": LABELS.double()}, "got torch.float64: call .long()"),
    "labels-uint64": ({"labels": LABELS.to(torch.uint64)}, "got torch.uint64: call .long()"),
    "labels-low": ({"labels": LABELS - 2}, f"{RANGE} -1"),
    "labels-high": ({"labels": LABELS + 12}, f"{RANGE} 13"),
    "module": (
        {"weight": torch.nn.Linear(WIDTH, VOCABULARY)},
        "weight must be a torch.Tensor [v, d], got Linear Linear(in_features=8, out_features=13, "
        "bias=True): pass its .weight",
    ),
    "numpy": (
        {"hidden": np.ones((TOKENS, WIDTH))},
        "hidden must be a torch.Tensor [..., d], got ndarray",
    ),
    "half": (HALVES, f"{DTYPES} torch.float16 and torch.float16"),
    "mixed": ({"weight": torch.ones(3, 8).double()}, f"{DTYPES} torch.float32 and torch.float64"),
    "width": ({"hidden": torch.ones(TOKENS, 3)}, "weight [v, d], got [11, 3] and [13, 8]"),
    "width-0": (
        {"hidden": torch.ones(TOKENS, 0), "weight": torch.ones(13, 0)},
        "weight must have rows and a width of at least 1, got [13, 0]",
    ),
    "no-rows": ({"weight": torch.ones(0, WIDTH)}, "weight must have rows and a width of at least"),
    "scalar": ({"hidden": torch.tensor(1.0)}, "hidden must be [..., d] and weight [v, d], got []"),
    "device": (
        {"labels": LABELS.to("meta")},
        "all tensors must be on one device, got ['cpu', 'meta']",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    others, message = REFUSED[case]
    with pytest.raises(ValueError) as error:  # noqa: PT011
        mb.linear_cross_entropy(**arguments(**others))
    assert message in str(error.value)


def test_all_reasons_at_once():
    with pytest.raises(ValueError, match=r"^labels .*; vocab_size .*; z_loss .*; tile [^;]*$"):
        mb.linear_cross_entropy(
            **arguments(labels=LABELS.double(), vocab_size=14, z_loss=-1, tile="1GB")
        )
    with pytest.raises(ValueError, match=r"^weight .*; labels .*; logit_scale [^;]*$"):
        mb.linear_cross_entropy(**arguments(weight=None, labels=None, logit_scale="2"))


@pytest.mark.parametrize("scale", [2, np.float32(2), np.int64(2)], ids=["int", "float32", "int64"])
def test_numbers_of_other_kinds_are_numbers(scale):
    plain = mb.linear_cross_entropy(**arguments(logit_scale=2.0))
    assert torch.equal(mb.linear_cross_entropy(**arguments(logit_scale=scale)), plain)


def test_what_nobody_foresaw_is_a_value_error_with_its_cause():
    class Odd:
        def __repr__(self):
            raise KeyError("odd")

    with pytest.raises(ValueError, match="KeyError in the arguments: 'odd'") as error:
        mb.linear_cross_entropy(**arguments(tile=Odd()))
    assert isinstance(error.value.__cause__, KeyError)


def test_a_group_that_is_gone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    mb.linear_cross_entropy(**arguments(tp_group=group))
    dist.destroy_process_group()
    with pytest.raises(ValueError, match=r"tp_group: torch.distributed is not initialized"):
        mb.linear_cross_entropy(**arguments(tp_group=group))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param([3, 0], [0, 1], id="one more here, less there"),
        pytest.param([5, 2, 7, 1], [2, 5, 7, 1], id="places changed"),
        pytest.param([0.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 1.0], id="hidden symmetrically"),
    ],
)
def test_the_checksum_tells_labels_and_masks_apart(one, other):
    one, other = torch.tensor(one), torch.tensor(other)
    assert checksum(one) == checksum(one.clone())
    assert checksum(one) != checksum(other)
