"""The user's Megatron command, as far as it matters here: what would go wrong, and the fix.

Owns the list of hazards. Reads flags without knowing all of Megatron's: a flag is whatever starts
with two dashes, its values what follows. What the plugin itself would refuse is `refused`'s.
Must not know processes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from ... import flags
from .finding import Finding, note, ok, problem
from .sizes import hierarchical_sizes

ALGORITHM = "--context-parallel-algo"
FLAGS = {flag.name: flag for flag in flags.FLAGS}
SIZES = "--hierarchical-context-parallel-sizes"
# Megatron's loss masks may hold back unequally many tokens on different ranks with these.
UNEVEN = ("--eod-mask-loss", "--sft", "--dataloader-inter-document-masking")
MASKED = 2**30  # bytes of an attention mask that are worth a word


class Command:
    """Flags of a command line, with Megatron's defaults for those that matter."""

    def __init__(self, words: Sequence[str]) -> None:
        self.given: dict[str, list[str]] = {}
        values: list[str] = []
        for word in words:
            if word.startswith("--"):
                flag, _, value = word.partition("=")
                values = self.given[flag] = [value] if value else []
            else:
                values.append(word)

    def __contains__(self, flag: str) -> bool:
        return flag in self.given

    def text(self, flag: str, default: str | None = None) -> str | None:
        """The first value of a flag."""
        values = self.given.get(flag)
        if values == []:
            raise ValueError(f"{flag} has no value")
        return values[0] if values else default

    def number(self, flag: str, default: Any, kind: type = int) -> Any:
        """The value of a flag as a number. ValueError if it is none."""
        found = self.text(flag)
        try:
            return default if found is None else kind(found)
        except ValueError:
            raise ValueError(f"{flag} must be a number, got {found!r}") from None

    def numbers(self, flag: str) -> list[int] | None:
        """The values of a flag; commas separate too."""
        values = self.given.get(flag)
        try:
            return None if values is None else [int(x) for v in values for x in v.split(",")]
        except ValueError:
            raise ValueError(f"{flag} must be numbers, got {' '.join(values or [])!r}") from None

    @property
    def cp(self) -> int:
        return self.number("--context-parallel-size", 1)

    @property
    def tp(self) -> int:
        return self.number("--tensor-model-parallel-size", 1)

    @property
    def fitting_sizes(self) -> list[int] | None:
        """The hierarchical sizes, where they multiply to the context-parallel size."""
        sizes = self.numbers(SIZES)
        return sizes if sizes and math.prod(sizes) == self.cp else None

    @property
    def ours(self) -> bool:
        """Is BurstAttention asked for, and does it do anything?"""
        return self.cp > 1 and self.text(ALGORITHM, "megatron") != "megatron"


def hazards(
    command: Command, gpus_per_node: int, machine: dict[str, Any], te: str | None
) -> Iterator[Finding]:
    """What would go wrong with this command. te: the version of Transformer Engine, or None."""
    yield from _choice(command)
    yield from _sizes(command, gpus_per_node)
    if command.cp > 1:
        yield from _loss(command)
        yield from _mask(command)
    yield from _connections(command, machine)
    if command.text("--transformer-impl", "transformer_engine") == "transformer_engine" and not te:
        yield problem(
            "--transformer-impl",
            "Transformer Engine is Megatron's default, and it is not installed here",
            "install transformer-engine, or --transformer-impl local",
        )


def _choice(command: Command) -> Iterator[Finding]:
    algorithm = command.text(ALGORITHM)
    if command.cp == 1:
        if algorithm not in (None, "megatron"):
            yield note(ALGORITHM, "does nothing with --context-parallel-size 1")
        return
    if algorithm in (None, "megatron"):
        yield note(ALGORITHM, "Megatron's own attention will run", f"{ALGORITHM} burst")
    kinds = command.given.get("--cp-comm-type")
    if kinds and command.ours:
        yield problem(
            "--cp-comm-type",
            f"{' '.join(kinds)} and {ALGORITHM} {algorithm} both choose the attention",
            "remove --cp-comm-type",
        )
    elif kinds and "a2a+p2p" in kinds and SIZES not in command:
        yield problem(
            "--cp-comm-type",
            "a2a+p2p without hierarchical sizes turns context parallelism off, in some versions "
            "silently",
            f"give {SIZES}, or {ALGORITHM} burst instead",
        )


def _sizes(command: Command, gpus_per_node: int) -> Iterator[Finding]:
    tp, cp, given = command.tp, command.cp, command.numbers(SIZES)
    if given is not None and math.prod(given) != cp:
        yield problem(
            SIZES,
            f"{given} multiply to {math.prod(given)}, which is not --context-parallel-size {cp}",
            hierarchical_sizes(tp, cp, gpus_per_node).flags or f"remove {SIZES}",
        )
        return
    try:
        best = hierarchical_sizes(tp, cp, gpus_per_node)
    except ValueError as error:
        yield problem("nodes", str(error), "or give the doctor the right --gpus-per-node")
        return
    if cp > 1 and given not in (None, [best.intra, best.inter]):
        yield note(
            SIZES,
            f"{given[0]} consecutive ranks are not what nodes of {gpus_per_node} GPUs hold at "
            f"TP {tp}: {best.reason}",
            best.flags or f"remove {SIZES}",
        )
    elif cp > 1 and given is None and not best.flat:
        yield note(
            SIZES, f"not given: ranks with one host name form a node; {best.reason}", best.flags
        )
    elif cp > 1:
        yield ok(SIZES, best.reason)


def _loss(command: Command) -> Iterator[Finding]:
    topic, fix = "loss mean", "--calculate-per-token-loss"
    if fix in command:
        yield ok(topic, "over the tokens of all ranks")
        return
    what = "each rank divides its loss by its own token count, so gradients depend on the layout"
    uneven = [flag for flag in UNEVEN if flag in command]
    if uneven:
        yield problem(topic, f"{what}; with {uneven[0]} the counts differ", fix)
    else:
        yield note(topic, f"{what} where loss masks leave out tokens", fix)


def _mask(command: Command) -> Iterator[Finding]:
    topic, fix = "attention mask", "--no-create-attention-mask-in-dataloader"
    length = command.number("--seq-length", 0)
    if fix in command:
        yield ok(topic, "none is made in the data loader")
        return
    each = length**2 * command.number("--micro-batch-size", 1)
    size = f"one of {each / 2**30:.3g} GiB is made per micro-batch and data-loader worker"
    if command.ours:
        yield ok(topic, "none is made: BurstAttention computes what it would show")
    elif each >= MASKED:
        yield problem(topic, size, fix)
    else:
        yield note(topic, size, fix)


def _connections(command: Command, machine: dict[str, Any]) -> Iterator[Finding]:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    value = machine["variables"].get(name)
    fsdp = "--use-megatron-fsdp" in command or "--use-torch-fsdp2" in command
    if fsdp and value == "1":
        yield problem(name, "is 1, and FSDP wants more", f"unset {name}")
    elif not fsdp and (command.tp > 1 or command.cp > 1) and value != "1":
        found = f"is {value or 'unset'}; before Blackwell Megatron wants 1 with TP or CP"
        old = any("sm_" in gpu and int(gpu.split("sm_")[1]) < 100 for gpu in machine["gpus"])
        yield (problem if old else note)(name, found, f"export {name}=1")
    elif value is not None:
        yield ok(name, value)
