"""The flags of a run: one definition for the example, for Megatron-LM, and for whoever adds them.

Owns: name, default and help of every flag, how parsed arguments become a `BurstConfig`, and which
defaults follow from other flags. Values are checked by `BurstConfig`, so that a wrong one is the
same plain ValueError wherever it comes from. Must not know: torch, Megatron, processes.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from .config import KERNELS, LM_HEAD_LOSSES, NAMES, WIRE_DTYPES, BurstConfig
from .layout import LAYOUTS
from .schedule.tables import SIDES
from .schedule.topology import PLACEMENTS

GROUP = "megatron-burst"
ALONE = ("--context-parallel-algo", "--burst-lm-head-loss")  # count without any other
OFF = "megatron"  # the algorithm that leaves Megatron's own attention alone


class Flag(NamedTuple):
    """One flag: the field of `BurstConfig` it sets, its name, type, values shown, and help."""

    field: str
    name: str
    type: type
    values: str
    help: str

    @property
    def dest(self) -> str:
        """Its attribute among parsed arguments."""
        return self.name.removeprefix("--").replace("-", "_")


def _of(*values: str) -> str:
    return "{" + ",".join(values) + "}"


FLAGS = (
    Flag("algorithm", "--context-parallel-algo", str, _of(*NAMES, OFF),
         "attention across context-parallel ranks; megatron leaves Megatron's own alone"),
    Flag("layout", "--burst-layout", str, _of(*sorted(LAYOUTS)),
         "which positions each rank holds; default: zigzag, or striped with part of attention in "
         "the store, where it alone balances the recompute"),
    Flag("side", "--burst-side", str, _of("auto", *SIDES),
         "what travels in backward; auto takes the side with fewer bytes"),
    Flag("kernel", "--burst-kernel", str, _of(*KERNELS), "the local attention"),
    Flag("intra_size", "--burst-intra-size", int, "N",
         "context-parallel ranks per node, where neither --hierarchical-context-parallel-sizes "
         "nor host names say it"),
    Flag("ulysses_size", "--burst-ulysses-size", int, "N",
         "ranks that share heads by all-to-all, around any ring"),
    Flag("placement", "--burst-placement", str, _of(*PLACEMENTS),
         "whether neighbouring ranks share heads or a ring"),
    Flag("kv_cache", "--burst-kv-cache", float, "F",
         "fraction of visiting keys and values that forward keeps for backward"),
    Flag("store", "--burst-attention-store", float, "F",
         "of attention results, what --recompute-granularity keeps: 1.0 all, 0.5 the dearer half"),
    Flag("wire_dtype", "--burst-wire-dtype", str, _of(*WIRE_DTYPES),
         "of travelling gradients; default: that of their sum, fp32"),
    Flag("lm_head_loss", "--burst-lm-head-loss", str, _of(*LM_HEAD_LOSSES),
         "the LM head and its loss as one operation, whose logits never all exist"),
)  # fmt: skip


def add_flags(parser: argparse.ArgumentParser, *, algorithm: str) -> None:
    """Add all flags to ``parser``, in a group of their own; ``algorithm`` if none is asked for.

    Raises ``ValueError`` when the parser has one of them already.
    """
    group = parser.add_argument_group(GROUP)
    for flag in FLAGS:
        try:
            group.add_argument(
                flag.name,
                type=flag.type,
                metavar=flag.values,
                default=algorithm if flag.field == "algorithm" else default(flag.field),
                help=flag.help,
            )
        except argparse.ArgumentError as error:
            raise ValueError(
                f"{flag.name} is a flag of this program already; megatron_burst cannot add its own"
            ) from error


def default(field: str) -> Any:
    """What a field is when its flag is not given; None for the layout, which `settle` decides."""
    if field == "layout":
        return None
    return next(f.default for f in dataclasses.fields(BurstConfig) if f.name == field)


def settle(args: Any) -> None:
    """Give ``args`` each flag that it lacks and the layout that follows from the others.

    Arguments that never saw `add_flags` (those of a checkpoint) leave the attention alone.
    """
    for flag in FLAGS:
        if not hasattr(args, flag.dest):
            setattr(args, flag.dest, OFF if flag.field == "algorithm" else default(flag.field))
    if args.burst_layout is None:
        mtp = getattr(args, "mtp_num_layers", None)
        args.burst_layout = layout_for(args.context_parallel_algo, args.burst_attention_store, mtp)


def layout_for(algorithm: Any, store: Any, mtp_num_layers: int | None) -> str:
    """The layout that follows from other choices: striped where it alone balances the recompute.

    Further heads (``mtp_num_layers``) bind a run to zigzag.
    """
    partial = isinstance(store, (int, float)) and 0 < store < 1
    return "striped" if partial and algorithm != OFF and not mtp_num_layers else "zigzag"


def burst_config(args: Any) -> BurstConfig:
    """The choices that settled arguments state. Raises ``ValueError`` naming the flag."""
    return BurstConfig(**{flag.field: getattr(args, flag.dest) for flag in FLAGS})


def choices(args: Any) -> tuple[BurstConfig, list[str]]:
    """The choices that settled arguments state, and all that is wrong with them; a wrong one gives
    way to its default."""
    fields, wrong = {flag.field: getattr(args, flag.dest) for flag in FLAGS}, []
    while True:
        try:
            return BurstConfig(**fields), wrong
        except ValueError as error:
            wrong.append(words := str(error))
            named = [flag for flag in FLAGS if flag.name in words and flag.field in fields]
            del fields[min(named, key=lambda flag: words.index(flag.name)).field]


def stated(args: Any) -> dict[str, Any]:
    """Flag -> value, of settled arguments."""
    return {flag.name: getattr(args, flag.dest) for flag in FLAGS}


def given(argv: Sequence[str], *names: str) -> Iterator[str]:
    """Which of ``names`` (all flags of this module, if none are named) a command line has."""
    words = {word.split("=", 1)[0] for word in argv}
    return (name for name in names or [flag.name for flag in FLAGS] if name in words)
