# SPDX-License-Identifier: Apache-2.0
"""Problems of how a run splits its sequences: groups per micro-batch, two layouts, and layers that
carry a state along the sequence (gated delta nets and Mamba mixers).

Attention, rotary embedding and data path take the group that holds a micro-batch from its
`PackedSeqParams`, so hybrid context parallelism works in loops that hand it to the model. Where
Megatron's own code does not work with it, the error says what is broken.

Megatron has settings for the layouts of tokens and of softmax attention (`linear_cp_layout` and
`attention_cp_layout` of main, `cp_partition_mode` of dev), which are read here where a
configuration has them: what they ask for is what our flags say, or a problem. Fields as Megatron-LM
declares them at commit 010994d536a31a389479f995577f7b05a01f7053.

States run over context-parallel ranks by being passed on (`--burst-linear`), or by Megatron's own
all-to-all of heads ("megatron"), which knows only zigzag and needs heads for every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from ...config import OFF, BurstConfig
from ..model_shape import DELTA_NETS, KIMI, ModelShape
from ..patching import core_version
from .cuda_graphs import captured, graphs_asked
from .problem import Problem, Rule, broken, excluded, excluded_options

HYBRID, DYNAMIC = "--hybrid-context-parallel", "--dynamic-context-parallel"
_FIELDS = (("hybrid_context_parallel", HYBRID), ("dynamic_context_parallel", DYNAMIC))


def changing_groups(settings: Any) -> str | None:
    """The flag that makes the group change with the micro-batch, if it was given."""
    return next((flag for name, flag in _FIELDS if getattr(settings, name, False)), None)


def splits(settings: Any) -> bool:
    """Whether any micro-batch of such a run is split over ranks."""
    return settings.context_parallel_size != 1 or changing_groups(settings) is not None


def attends(settings: Any, burst: BurstConfig) -> bool:
    """Whether BurstAttention computes attention in models of such a run: where micro-batches are
    split, and where they are prefix trees, which Megatron's own attention does not know.
    """
    return burst.algorithm != OFF and (splits(settings) or burst.pack == "trees")


def needs_ranks(flag: str, config: Any, burst: BurstConfig, remove: tuple[str, ...]) -> Problem:
    """The problem of a flag that only BurstAttention over several ranks can honour."""
    return Problem(
        f"{flag} is for BurstAttention over context-parallel ranks: it needs "
        f"--context-parallel-algo burst and --context-parallel-size above 1, got "
        f"{burst.algorithm} and {config.context_parallel_size}",
        remove=remove,
    )


_HYBRID = (
    *excluded(
        "{flag} with {other}: {why}",
        ("{flag}",),
        multi_latent_attention=(
            "Megatron's latent attention refuses micro-batches with a group of their own"
        ),
        mtp_num_layers="Megatron shifts tokens for it in the group that the model was built with",
    ),
    Rule("is_hybrid_model", "{flag} with Mamba layers: these split the sequence over the group "
         "that the model was built with", remove=("{flag}",)),
    *excluded(
        "{flag} with {other}: {why}",
        ("{flag}",),
        experimental_attention_variant=(
            "it splits the sequence over the group that the model was built with"
        ),
    ),
    Rule(lambda c, b: c.hybrid_context_parallel and (c.pipeline_model_parallel_size or 1) > 1,
         "{flag} with --pipeline-model-parallel-size {c.pipeline_model_parallel_size}: Megatron's "
         "schedule for it has no pipeline", remove=("{flag}",)),
    Rule(lambda c, b: c.has("calculate_per_token_loss") and not c.calculate_per_token_loss,
         "{flag}: micro-batches hold unequal numbers of tokens, and without "
         "--calculate-per-token-loss all of them count alike",
         add=("--calculate-per-token-loss",)),
)  # fmt: skip


def hybrid_problems(config: Any) -> Iterator[Problem]:
    """Settings of a `TransformerConfig` that do not work with groups per micro-batch."""
    flag = changing_groups(config)
    if flag is not None:
        yield from broken(_HYBRID, config, flag=flag)


# What is broken in Megatron-LM's own training loop (checked up to 0.20.0).
SCRIPT = (
    Rule(lambda c, b: changing_groups(c) == HYBRID,
         f"{HYBRID}: Megatron-LM itself cannot train with it: its rerun state machine refuses the "
         "data iterator (not wrapped with RerunDataIterator), its scripts fail in "
         "get_batch_on_this_tp_rank (the documents that its data loader deals out have one "
         "dimension, and neither cu_seqlens nor max_seqlen), and validation gets batches that "
         "nothing has scheduled; a loop of your own on Megatron-Core works with it",
         remove=(HYBRID,)),
    Rule(lambda c, b: changing_groups(c) == DYNAMIC,
         f"{DYNAMIC}: the data path of Megatron-LM's branch dev cuts batches by Transformer "
         "Engine, with which it was never run here; attention itself takes the groups that it "
         "makes, in a loop of your own on Megatron-Core", remove=(DYNAMIC,)),
)  # fmt: skip


LINEAR, ATTENTION, PARTITION = "linear_cp_layout", "attention_cp_layout", "cp_partition_mode"
STREAMS = ("contiguous", "zigzag")  # of tokens whose attention may have another layout


class Layouts(NamedTuple):
    """The layout of the stream of tokens, and that of softmax attention."""

    stream: str
    attention: str

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags that ask for them."""
        apart = (f"--burst-attention-layout {self.attention}",) * (self.attention != self.stream)
        return (f"--burst-layout {self.stream}", *apart)


def layouts_of(burst: BurstConfig) -> Layouts:
    """Those that our choices state."""
    return Layouts(burst.layout, burst.attention_layout or burst.layout)


def megatrons_layouts(config: Any) -> Layouts | None:
    """Those that Megatron's own settings ask for; None if it has none or they have their default.

    Megatron cuts batches as layers of linear attention want them.
    """
    layouts = Layouts(*(getattr(config, name, None) or "zigzag" for name in (LINEAR, ATTENTION)))
    return None if layouts == ("zigzag", "zigzag") else layouts


def two_layout_problems(config: Any, burst: BurstConfig) -> Iterator[Problem]:
    """Settings of a `TransformerConfig` that exclude the layouts of a run, or contradict them."""
    if not splits(config) or burst.algorithm == OFF:
        if burst.attention_layout not in (None, burst.layout):
            flag = f"--burst-attention-layout {burst.attention_layout}"
            yield needs_ranks(flag, config, burst, ("--burst-attention-layout",))
        return
    if getattr(config, "burst", None) != burst:  # `configure` has not read them yet
        yield from _contradictions(config, burst)
    if burst.attention_layout not in (None, burst.layout):
        flag = f"--burst-attention-layout {burst.attention_layout}"
        yield from broken(_APART, config, burst, flag)
        yield from excluded_options("attention_layout", flag, burst)


def _contradictions(config: Any, burst: BurstConfig) -> Iterator[Problem]:
    mode = getattr(config, PARTITION, None)
    if mode not in (None, "zigzag"):
        yield Problem(
            f"--cp-partition-mode {mode}: Megatron then exchanges rows around attention itself, "
            "and BurstAttention would get those of others",
            add=Layouts("contiguous", "zigzag").flags,
            remove=("--cp-partition-mode",),
        )
    wanted, ours = megatrons_layouts(config), layouts_of(burst)
    if wanted is not None and wanted != ours:
        yield Problem(
            f"--linear-cp-layout {wanted.stream} and --attention-cp-layout {wanted.attention} "
            f"contradict {' '.join(ours.flags)}: take the same, or leave Megatron's settings out",
            add=wanted.flags,
        )


# What was not tested with attention in a layout of its own.
_APART = (
    Rule(lambda c, b: b.layout not in STREAMS,
         "{flag} with --burst-layout {b.layout}: tokens that attention exchanges lie "
         f"{' or '.join(STREAMS)}", add=("--burst-layout contiguous",)),
    Rule("mtp_num_layers", "{flag} with --mtp-num-layers, which was not tested",
         remove=("--burst-attention-layout",)),
    Rule(lambda c, b: changing_groups(c),
         "{flag} with {value}, whose groups change with the micro-batch: not tested",
         remove=("--burst-attention-layout",)),
)  # fmt: skip


OLDEST = (0, 19)  # of Megatron-Core, with states passed from rank to rank
FLAG = "--burst-linear"
LAYOUTS = ("zigzag", "contiguous", "balanced")  # a row's predecessor is mostly on its rank
_SPLIT_DELTA_NETS = (0, 18)  # the first Megatron-Core that does, by heads
_HEADS = ("linear_num_key_heads", "linear_num_value_heads")


def linear_problems(config: Any, burst: BurstConfig) -> Iterator[Problem]:
    """Unless these layers can run as `burst`, an algorithm of ours, asks for.

    config: a `TransformerConfig` split over ranks, or any object with attributes of the same
    names.
    """
    what = ModelShape.of(config).linear_setting
    if what is None or changing_groups(config):  # `hybrid_problems` names what changes groups
        return
    if burst.linear == "megatron":
        yield from _heads_problems(config, burst, what)
        return
    if core_version() < OLDEST:
        version, oldest = (".".join(map(str, one)) for one in (core_version(), OLDEST))
        delta = getattr(config, "experimental_attention_variant", None) in DELTA_NETS
        whole = delta and core_version() < _SPLIT_DELTA_NETS
        instead = (
            "which does not split these layers at all: install a newer one"
            if whole
            else "whose own all-to-all of heads can run instead"
        )
        yield Problem(
            f"{what} at --context-parallel-size {config.context_parallel_size}: passing the state "
            f"of these layers from rank to rank needs Megatron-Core {oldest} or newer, and this is "
            f"{version}, {instead}",
            add=() if whole else (f"{FLAG} megatron",),
        )
        return
    if burst.layout not in (*LAYOUTS, "auto"):
        yield Problem(
            f"{what} with --burst-layout {burst.layout}: every row's predecessor is on another "
            "rank, and a state would travel between any two rows",
            add=("--burst-layout zigzag",),
        )
    flag, impl = graphs_asked(config)
    if impl != "none" and "mamba" in captured(config):
        yield Problem(
            f"{flag} captures Mamba layers, whose state passes from rank to rank outside of graphs",
            add=(f"{FLAG} megatron",),
        )
    tensor = getattr(config, "tensor_model_parallel_size", 1)
    yield from _indivisible(config, tensor, f"--tensor-model-parallel-size {tensor}")


def _heads_problems(config: Any, burst: BurstConfig, what: str) -> Iterator[Problem]:
    """Unless Megatron's own all-to-all of heads can run."""
    if what == KIMI:
        yield Problem(
            f"{FLAG} megatron: {KIMI}'s layers run on one context-parallel rank without us",
            add=(f"{FLAG} auto",),
        )
        return
    if burst.layout not in ("zigzag", "auto"):
        yield Problem(
            f"{FLAG} megatron with --burst-layout {burst.layout}: Megatron's own all-to-all of "
            f"heads takes the tokens for zigzag ones; {FLAG} auto takes contiguous ones too",
            add=("--burst-layout zigzag",),
        )
    tensor, ranks = config.tensor_model_parallel_size, config.context_parallel_size
    sizes = f"--tensor-model-parallel-size {tensor} x --context-parallel-size {ranks}"
    more = () if core_version() < OLDEST else (f"{FLAG} auto",)
    yield from _indivisible(config, tensor * ranks, f"{sizes}, with {FLAG} megatron", more)


def _indivisible(
    config: Any, ranks: int, sizes: str, add: tuple[str, ...] = ()
) -> Iterator[Problem]:
    """Unless the heads of gated delta nets divide by so many ranks."""
    if getattr(config, "experimental_attention_variant", None) not in DELTA_NETS:
        return
    for name in _HEADS:
        heads = getattr(config, name, None)
        if heads and heads % ranks:
            flag = f"--{name.replace('_', '-')}"
            yield Problem(f"{flag} {heads} is not divisible by {sizes}", add=add)
