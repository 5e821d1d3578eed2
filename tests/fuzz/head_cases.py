"""What a random call of the LM head is: all of it drawn from a number, on every rank alike."""

import random
from dataclasses import dataclass

import torch
from head_oracle import Options

BLOCK = 50  # cases in a row on the same number of ranks
WORLDS = (1, 2, 1, 4, 1, 3)
SIGNED = (torch.int64, torch.int32, torch.int16, torch.int8)
LABELS = (*SIGNED, torch.uint8, torch.uint16, torch.uint32)
MASKS = ("none", "bool", "uint8", "fractional", "negative", "zeros")
STRIDES = ("contiguous", "turned", "every-other")


@dataclass(frozen=True)
class Case:
    """All that is drawn but the numbers in the tensors."""

    seed: int
    world: int
    shape: tuple[int, ...]  # of labels
    width: int
    rows: int  # of the weight, on each rank
    dtype: torch.dtype
    label_dtype: torch.dtype
    options: Options
    mask: str
    garbage: bool  # labels outside the vocabulary where the mask is 0
    upstream: str
    factor: float
    tile: int | None
    mode: str
    sequence_parallel: bool
    argmax: bool
    hidden_strides: str
    weight_strides: str
    frozen: tuple[str, ...]
    sink: torch.dtype | None
    twice: bool
    poison: float | None  # in hidden rows whose label is ignored or whose weight is 0

    @property
    def kinds(self) -> list[str]:
        options = [k for k, x in vars(self.options).items() if x != getattr(Options(), k)]
        flags = ["sequence_parallel", "argmax", "garbage", "twice"]
        return [
            f"ranks {self.world}", str(self.dtype), f"labels {self.label_dtype}",
            f"mask {self.mask}", f"mode {self.mode}", f"gradient {self.upstream}",
            f"hidden {self.hidden_strides}", f"weight {self.weight_strides}",
            *(f"option {name}" for name in options), *(f for f in flags if getattr(self, f)),
            *(f"frozen {name}" for name in self.frozen), *(["sink"] if self.sink else []),
            *(["no tokens"] if 0 in self.shape else []),
            *([f"poison {self.poison}"] if self.poison is not None else []),
        ]  # fmt: skip


def draw(number: int) -> Case:
    world = WORLDS[number // BLOCK % len(WORLDS)]
    r = random.Random(f"lm_head {number}")
    sequence_parallel = world > 1 and r.random() < 0.5
    shape = [r.choice([1, 2, 3, 5, 8]) for _ in range(r.choice([1, 1, 2, 3]))]
    shape[0] *= world if sequence_parallel else 1
    if r.random() < 0.03:
        shape[0] = 0
    rows = r.choice([1, 2, 5, 9, 30, 70])
    dtype = r.choice([torch.float64, torch.float64, torch.float32, torch.bfloat16])
    vocab_size = r.choice([None, r.randint(1, rows * world)])
    options = Options(
        logit_scale=r.choice([1.0, 1.0, 0.3, -2.0, 3]),
        logit_softcap=r.choice([None, None, 0.7, 5.0, 30]),
        z_loss=r.choice([0.0, 0.0, 1e-4, 0.3]),
        label_smoothing=r.choice([0.0, 0.0, 0.1, 1.0]),
        vocab_size=vocab_size,
        ignore_index=r.choice([-100, -100, -1, 0, 3, 200, 10**6]),
    )
    count = vocab_size or rows * world
    frozen = r.choice([(), (), (), ("hidden",), ("weight",), ("hidden", "weight")])
    return Case(
        seed=number,
        world=world,
        shape=tuple(shape),
        width=r.choice([1, 3, 8, 17, 40]),
        rows=rows,
        dtype=dtype,
        label_dtype=r.choice([d for d in LABELS if torch.iinfo(d).max >= count]),
        options=options,
        mask=r.choice(MASKS),
        garbage=r.random() < 0.2,
        upstream=r.choice(["multiple", "multiple", "any"]),
        factor=r.choice([1.0, 0.3, -2.5, 0.0, 1e-3]),
        tile=r.choice([None, 1, r.randint(1, 100_000)]),
        mode=r.choice(["single_pass", "recompute"]),
        sequence_parallel=sequence_parallel,
        argmax=r.random() < 0.4,
        hidden_strides=r.choice(STRIDES),
        weight_strides=r.choice(STRIDES),
        frozen=frozen,
        sink=r.choice([None, None, sums_dtype(dtype), dtype]),
        twice=r.random() < 0.2,
        poison=r.choice([None, float("nan"), float("inf")]),
    )


def sums_dtype(dtype: torch.dtype) -> torch.dtype:
    """What losses and sums are in."""
    return torch.float64 if dtype is torch.float64 else torch.float32


@dataclass
class Problem:
    """The tensors of all ranks; `weights` [n]: what a token counts by mask and ignore_index.

    unused [n]: tokens whose hidden rows take no part in the gradients.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    labels: torch.Tensor
    mask: torch.Tensor | None
    weights: torch.Tensor
    upstream: torch.Tensor
    unused: torch.Tensor

    def poisoned(self, value: float | None) -> torch.Tensor:
        """hidden with this value in the unused rows."""
        if value is None:
            return self.hidden
        return self.hidden.masked_fill(self.unused.view(self.labels.shape)[..., None], value)

    @classmethod
    def of(cls, case: Case) -> "Problem":
        make = torch.Generator().manual_seed(case.seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=make, dtype=torch.float64)

        options, shape = case.options, case.shape
        count = options.vocab_size or case.rows * case.world
        labels = torch.randint(0, count, shape, generator=make)
        ignored = torch.rand(shape, generator=make) < 0.2
        held = torch.iinfo(case.label_dtype)
        if held.min <= options.ignore_index <= held.max:
            labels[ignored] = options.ignore_index
        mask = _mask(case.mask, torch.rand(shape, generator=make))
        kept = labels != options.ignore_index
        sums = sums_dtype(case.dtype)
        if mask is not None and case.garbage and count < held.max:
            labels[(mask == 0) & kept & (torch.rand(shape, generator=make) < 0.5)] = held.max
            kept = labels != options.ignore_index
        weights = kept.to(sums) * (1 if mask is None else mask.to(sums))
        upstream = case.factor * weights if case.upstream == "multiple" else normal(*shape)
        return cls(
            normal(*shape, case.width).to(case.dtype),
            normal(case.rows * case.world, case.width).to(case.dtype),
            labels,
            mask,
            weights.reshape(-1),
            upstream.to(sums),
            ((upstream * kept == 0) & (weights == 0)).reshape(-1),
        )


def _mask(kind: str, uniform: torch.Tensor) -> torch.Tensor | None:
    some = uniform < 0.7
    return {
        "none": None,
        "bool": some,
        "uint8": some.to(torch.uint8) * 3,
        "fractional": uniform * some,
        "negative": (uniform - 0.5) * some,
        "zeros": torch.zeros_like(uniform),
    }[kind]


def laid_out(x: torch.Tensor, strides: str) -> torch.Tensor:
    """The same numbers, a leaf with other strides."""
    if strides == "turned":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if strides == "every-other":
        return torch.stack([x, x], -1).flatten(-2)[..., ::2]
    return x.clone()
