"""The user's Megatron command: its flags, the hazards among them, and a fix for each.

The command is parsed with argparse as far as the checks read it; all other flags pass. `refused`
reports what the plugin itself would refuse.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from typing import Any

from ... import flags
from .finding import Finding, note, ok, problem
from .sizes import hierarchical_sizes

ALGORITHM = "--context-parallel-algo"
FLAGS = {flag.name: flag for flag in flags.FLAGS}
SIZES = "--hierarchical-context-parallel-sizes"
# With these, Megatron's loss masks may leave out different numbers of tokens on different ranks.
UNEVEN = ("--eod-mask-loss", "--sft", "--dataloader-inter-document-masking")
LARGE_MASK = 2**30  # bytes of an attention mask from which on it is a problem

# The flags of Megatron that the checks read, with Megatron's types and defaults.
NUMBERS: dict[str, int | None] = {
    "--context-parallel-size": None,
    "--tensor-model-parallel-size": 1,
    "--pipeline-model-parallel-size": 1,
    "--seq-length": None,
    "--micro-batch-size": None,
    "--num-attention-heads": None,
    "--num-query-groups": 1,
    "--mtp-num-layers": None,
    "--cpu-offloading-num-layers": 0,
    "--linear-num-key-heads": 16,
    "--linear-num-value-heads": 32,
}
TEXTS: dict[str, str | None] = {
    "--transformer-impl": "transformer_engine",
    "--softmax-type": "vanilla",
    "--recompute-granularity": None,
    "--fp8-format": None,
    "--hybrid-layer-pattern": None,
    "--hybrid-override-pattern": None,
    "--linear-cp-layout": None,
    "--attention-cp-layout": None,
    "--cp-partition-mode": None,
    "--position-embedding-type": None,
    "--attention-backend": None,
    "--cuda-graph-impl": "none",
    "--distributed-backend": "nccl",
    "--experimental-attention-variant": None,
    "--fp4-format": None,
    "--sequence-packing-scheduler": None,
    "--yaml-cfg": None,
}
LISTS: dict[str, type] = {
    SIZES: int,
    "--cp-comm-type": str,
    "--recompute-modules": str,
    "--spec": str,
    "--cuda-graph-modules": str,
    "--cuda-graph-scope": str,
}
SWITCHES = (
    *UNEVEN, "--calculate-per-token-loss", "--no-create-attention-mask-in-dataloader",
    "--use-megatron-fsdp", "--use-torch-fsdp2", "--group-query-attention", "--fp16",
    "--recompute-activations", "--cross-entropy-loss-fusion", "--no-rope-fusion", "--qk-clip",
    "--apply-query-key-layer-scaling", "--hybrid-context-parallel", "--multi-latent-attention",
    "--defer-embedding-wgrad-compute", "--overlap-moe-expert-parallel-comm",
    "--fp8-dot-product-attention", "--reset-attention-mask", "--fim-data",
    "--batch-invariant-mode", "--log-max-attention-logit",
    "--use-rotary-position-embeddings", "--enable-cuda-graph", "--external-cuda-graph",
    "--dynamic-context-parallel", "--use-kitchen-attention", "--fp8-multi-head-attention",
    "--fine-grained-activation-offloading", "--fp8-output-proj", "--mtp-hsm",
    "--distribute-saved-activations", "--delay-wgrad-compute", "--tp-comm-overlap",
    "--moe-paged-stash",
)  # fmt: skip


class Command(argparse.Namespace):
    """The flags of a Megatron command under Megatron's names, with Megatron's defaults.

    Our own flags are the texts that were given, or None: `refused` reports all bad ones at once.
    """

    unknown: list[str]  # flags that are neither ours nor of the tables above

    @property
    def cp_given(self) -> bool:
        return self.context_parallel_size is not None

    @property
    def cp(self) -> int:
        return self.context_parallel_size if self.cp_given else 1

    @property
    def tp(self) -> int:
        return self.tensor_model_parallel_size

    @property
    def sizes(self) -> list[int] | None:
        return self.hierarchical_context_parallel_sizes

    @property
    def fitting_sizes(self) -> list[int] | None:
        """The hierarchical sizes, if their product is the context-parallel size."""
        return self.sizes if self.sizes and math.prod(self.sizes) == self.cp else None

    @property
    def ours(self) -> bool:
        """Whether this run uses BurstAttention, with more than one context-parallel rank."""
        return self.cp > 1 and self.context_parallel_algo not in (None, flags.OFF)

    def given(self, *names: str) -> list[str]:
        """Which of these switches, or flags without a default, the command has."""
        return [name for name in names if getattr(self, _dest(name)) not in (None, False)]


def parse(words: Sequence[str]) -> Command:
    """Parse a command line. Raises ValueError for a flag without its value, or of another type."""
    # Megatron's own parser takes no abbreviations either.
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name, default in NUMBERS.items():
        parser.add_argument(name, type=int, default=default)
    for name, default in TEXTS.items():
        parser.add_argument(name, default=default)
    for name, kind in LISTS.items():
        parser.add_argument(name, type=kind, nargs="*" if name == "--spec" else "+")
    for name in SWITCHES:
        parser.add_argument(name, action="store_true")
    parser.add_argument("--attention-dropout", type=float, default=0.1)
    parser.add_argument("--window-size", type=_pair)
    for name in FLAGS:  # without its value it is empty, which is refused with the others
        parser.add_argument(name, nargs="?", const="")
    # After a "--" of a launcher argparse would read no flag.
    command = Command()
    try:
        _, rest = parser.parse_known_args([word for word in words if word != "--"], command)
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from None
    command.unknown = [word.partition("=")[0] for word in rest if word.startswith("--")]
    return command


def _dest(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _pair(text: str) -> list[int]:
    """Megatron accepts "4,0" and "(4,0)"."""
    try:
        left, right = (int(each) for each in text.strip("()").split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected two integers as 4,0, got {text!r}") from None
    return [left, right]


def hazards(
    command: Command, gpus_per_node: int, machine: dict[str, Any], te: str | None
) -> Iterator[Finding]:
    """The hazards of a command.

    machine: as `machine.describe` returns it. te: the version of Transformer Engine, or None.
    """
    yield from _choice(command)
    yield from _sizes(command, gpus_per_node)
    if command.cp > 1:
        yield from _loss(command)
        yield from _mask(command)
    yield from _connections(command, machine)
    if command.transformer_impl == "transformer_engine" and not te:
        yield problem(
            "--transformer-impl",
            "Transformer Engine is Megatron's default, and it is not installed here",
            "install transformer-engine, or --transformer-impl local",
        )


def _choice(command: Command) -> Iterator[Finding]:
    algorithm, kinds = command.context_parallel_algo, command.cp_comm_type
    if command.cp == 1:
        if algorithm not in (None, "megatron"):
            yield note(ALGORITHM, "does nothing with --context-parallel-size 1")
        return
    if algorithm in (None, "megatron"):
        yield note(ALGORITHM, "Megatron's own attention will run", f"{ALGORITHM} burst")
    if kinds and command.ours:
        yield problem(
            "--cp-comm-type",
            f"{' '.join(kinds)} and {ALGORITHM} {algorithm} both choose the attention",
            "remove --cp-comm-type",
        )
    elif kinds and "a2a+p2p" in kinds and command.sizes is None:
        yield problem(
            "--cp-comm-type",
            "a2a+p2p without hierarchical sizes turns context parallelism off, in some versions "
            "silently",
            f"give {SIZES}, or {ALGORITHM} burst instead",
        )


def _sizes(command: Command, gpus_per_node: int) -> Iterator[Finding]:
    tp, cp, given = command.tp, command.cp, command.sizes
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
    if command.calculate_per_token_loss:
        yield ok(topic, "over the tokens of all ranks")
        return
    what = "each rank divides its loss by its own token count, so gradients depend on the layout"
    uneven = command.given(*UNEVEN)
    if uneven:
        yield problem(topic, f"{what}; with {uneven[0]} the counts differ", fix)
    else:
        yield note(topic, f"{what} where loss masks leave out tokens", fix)


def _mask(command: Command) -> Iterator[Finding]:
    topic, fix = "attention mask", "--no-create-attention-mask-in-dataloader"
    if command.no_create_attention_mask_in_dataloader:
        yield ok(topic, "none is made in the data loader")
        return
    each = (command.seq_length or 0) ** 2 * (command.micro_batch_size or 1)
    size = f"one of {each / 2**30:.3g} GiB is made per micro-batch and data-loader worker"
    if command.ours:
        yield ok(topic, "none is made: BurstAttention computes what it would show")
    elif each >= LARGE_MASK:
        yield problem(topic, size, fix)
    else:
        yield note(topic, size, fix)


def _connections(command: Command, machine: dict[str, Any]) -> Iterator[Finding]:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    value = machine["variables"].get(name)
    fsdp = command.use_megatron_fsdp or command.use_torch_fsdp2
    if fsdp and value == "1":
        yield problem(name, "is 1, and FSDP wants more", f"unset {name}")
    elif not fsdp and (command.tp > 1 or command.cp > 1) and value != "1":
        found = f"is {value or 'unset'}; before Blackwell Megatron wants 1 with TP or CP"
        old = any("sm_" in gpu and int(gpu.split("sm_")[1]) < 100 for gpu in machine["gpus"])
        yield (problem if old else note)(name, found, f"export {name}=1")
    elif value is not None:
        yield ok(name, value)
