# SPDX-License-Identifier: Apache-2.0
"""Parser for the flags of a Megatron command that this package reads.

`doctor` looks for problems in these flags. `advise` and `memory` derive the model and the parallel
sizes from them. Names, types and defaults are the same as in Megatron. All other flags are accepted
and ignored. Values of this package's own flags stay strings, so that a caller can report all wrong
values or only the first.
"""

from __future__ import annotations

import argparse
import ast
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from .. import flags
from ..config import FIELDS

FLAGS = {field.flag: field for field in FIELDS.values()}
SIZES = "--hierarchical-context-parallel-sizes"
INTEGERS: dict[str, int | None] = {
    "--context-parallel-size": None, "--cpu-offloading-num-layers": 0, "--csa-window-size": None,
    "--decoder-first-pipeline-num-layers": None, "--decoder-last-pipeline-num-layers": None,
    "--dsa-indexer-head-dim": None, "--dsa-indexer-n-heads": None, "--dsa-indexer-topk": None,
    "--expert-model-parallel-size": 1, "--expert-tensor-parallel-size": None,
    "--ffn-hidden-size": None, "--global-batch-size": None,
    "--hidden-size": None, "--kv-channels": None, "--kv-lora-rank": 512,
    "--linear-conv-kernel-dim": 4, "--linear-key-head-dim": 128, "--linear-num-key-heads": 16,
    "--linear-num-value-heads": 32, "--linear-value-head-dim": 128,
    "--make-vocab-size-divisible-by": 128, "--mamba-head-dim": 64, "--mamba-num-groups": 8,
    "--mamba-num-heads": None, "--mamba-state-dim": 128, "--micro-batch-size": None,
    "--moe-ffn-hidden-size": None, "--moe-router-topk": 2,
    "--moe-shared-expert-intermediate-size": None, "--mtp-num-layers": None,
    "--num-attention-heads": None, "--num-experts": None, "--num-layers": None,
    "--num-layers-per-virtual-pipeline-stage": None, "--num-query-groups": 1,
    "--num-virtual-stages-per-pipeline-rank": None, "--o-groups": None, "--o-lora-rank": None,
    "--pipeline-model-parallel-size": 1,
    "--q-lora-rank": None, "--qk-head-dim": 128, "--qk-pos-emb-head-dim": 64,
    "--seq-length": None, "--tensor-model-parallel-size": 1, "--v-head-dim": 128,
    "--vocab-size": None,
}  # fmt: skip
TEXTS: dict[str, str | None] = {
    "--attention-backend": None, "--attention-cp-layout": None, "--cp-partition-mode": None,
    "--cuda-graph-impl": "none", "--distributed-backend": "nccl",
    "--experimental-attention-variant": None, "--fp4-format": None, "--fp8-format": None,
    "--hybrid-layer-pattern": None, "--hybrid-override-pattern": None, "--linear-cp-layout": None,
    "--position-embedding-type": None, "--recompute-granularity": None,
    "--sequence-packing-scheduler": None, "--softmax-type": "vanilla",
    "--transformer-impl": "transformer_engine", "--yaml-cfg": None,
}  # fmt: skip
FREQUENCIES = (
    "--csa-compress-ratios", "--linear-attention-freq", "--moe-layer-freq",
    "--window-attn-skip-freq",
)  # fmt: skip
LISTS: dict[str, type] = {
    SIZES: int, "--cp-comm-type": str, "--cuda-graph-modules": str, "--cuda-graph-scope": str,
    "--recompute-modules": str, "--spec": str,
}  # fmt: skip
SWITCHES = (
    "--apply-query-key-layer-scaling", "--attention-output-gate", "--batch-invariant-mode",
    "--calculate-per-token-loss", "--cross-entropy-loss-fusion", "--csa-dense-mode",
    "--dataloader-inter-document-masking", "--defer-embedding-wgrad-compute",
    "--delay-wgrad-compute", "--distribute-saved-activations", "--dynamic-context-parallel",
    "--enable-cuda-graph", "--eod-mask-loss", "--external-cuda-graph", "--fim-data",
    "--fine-grained-activation-offloading", "--fp16", "--fp8-dot-product-attention",
    "--fp8-multi-head-attention", "--fp8-output-proj", "--grad-reduce-in-bf16",
    "--group-query-attention", "--hybrid-context-parallel", "--log-max-attention-logit",
    "--moe-paged-stash", "--mtp-hsm", "--multi-latent-attention",
    "--no-create-attention-mask-in-dataloader", "--optimizer-cpu-offload",
    "--overlap-grad-reduce", "--overlap-moe-expert-parallel-comm", "--qk-clip", "--quick-geglu",
    "--recompute-activations", "--reset-attention-mask", "--sft", "--swiglu", "--tp-comm-overlap",
    "--untie-embeddings-and-output-weights", "--use-distributed-optimizer",
    "--use-kitchen-attention", "--use-megatron-fsdp", "--use-rotary-position-embeddings",
    "--use-torch-fsdp2",
)  # fmt: skip
# Flags whose attribute has another name, as in Megatron's parser.
ATTRIBUTES = {"--fp8-format": "fp8", "--fp4-format": "fp4"}


class MegatronCommand(argparse.Namespace):
    """Flags of a Megatron command, with Megatron's names and defaults.

    The value of a flag of this package is a string, or None if the flag is not set.

    Attributes:
        unknown: Names of flags that are neither in this module's tables nor of this package.
    """

    unknown: list[str]

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
        """Return the hierarchical sizes; None if their product is not the context-parallel size."""
        return self.sizes if self.sizes and math.prod(self.sizes) == self.cp else None

    @property
    def ours(self) -> bool:
        """Return True if the run uses BurstAttention with more than one context-parallel rank."""
        return self.cp > 1 and self.context_parallel_algo not in (None, flags.OFF)

    def given(self, *names: str) -> list[str]:
        """Return the flags among `names` that are set. Flags with a default always count as set."""
        return [name for name in names if getattr(self, _attribute(name)) not in (None, False)]

    def burst_arguments(self) -> tuple[SimpleNamespace, list[str]]:
        """Return the converted values of this package's flags, and messages for wrong values."""
        # The default layout depends on the number of ranks.
        values, wrong = SimpleNamespace(context_parallel_size=self.cp), []
        for name in self.given(*FLAGS):
            field = FLAGS[name]
            text = getattr(self, field.dest)
            try:
                setattr(values, field.dest, field.reader(text))
            except ValueError:
                wrong.append(f"{name} must be of type {field.reader.__name__}, got {text!r}")
        return values, wrong


def parse(words: Sequence[str]) -> MegatronCommand:
    """Parse the words of a Megatron command; flags that this module does not read are accepted.

    Raises:
        ValueError: A flag has no value, or a value of another type.
    """
    # Abbreviations are off, as in Megatron's parser.
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name, default in INTEGERS.items():
        parser.add_argument(name, type=int, default=default)
    for name, text in TEXTS.items():
        parser.add_argument(name, default=text, dest=_attribute(name))
    for name in FREQUENCIES:
        parser.add_argument(name, type=_frequency)
    for name, kind in LISTS.items():
        parser.add_argument(name, type=kind, nargs="*" if name == "--spec" else "+")
    for name in SWITCHES:
        parser.add_argument(name, action="store_true")
    parser.add_argument("--no-rope-fusion", action="store_false", dest="apply_rope_fusion")
    parser.add_argument("--attention-dropout", type=float, default=0.1)
    parser.add_argument("--dsa-indexer-loss-coeff", type=float)
    parser.add_argument("--optimizer-offload-fraction", type=float, default=1.0)
    parser.add_argument("--window-size", type=_pair)
    for name in FLAGS:  # a missing value is an empty string, which is reported later
        parser.add_argument(name, nargs="?", const="")
    # argparse would stop at "--", which a launcher may need.
    command = MegatronCommand()
    try:
        _, unknown = parser.parse_known_args([word for word in words if word != "--"], command)
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from None
    command.unknown = [word.partition("=")[0] for word in unknown if word.startswith("--")]
    return command


def _attribute(flag: str) -> str:
    return ATTRIBUTES.get(flag) or flag.removeprefix("--").replace("-", "_")


def _frequency(text: str) -> Any:
    """Parse a layer frequency: an integer, or a list with one entry per layer.

    Lists may be expressions such as "([0]*3+[1]*58)", which Megatron evaluates.
    """

    def value(node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=int() as number):
                return number
            case ast.List(elts=items):
                return [value(item) for item in items]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return value(left) + value(right)
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                return value(left) * value(right)
        raise TypeError

    try:
        return value(ast.parse(text, mode="eval").body)
    except (SyntaxError, TypeError):
        raise argparse.ArgumentTypeError(
            f"expected a list such as ([0]*3+[1]*58), or a number, got {text!r}"
        ) from None


def _pair(text: str) -> list[int]:
    """Parse "4,0" or "(4,0)" to [4, 0]."""
    try:
        left, right = (int(side) for side in text.strip("()").split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected two integers as 4,0, got {text!r}") from None
    return [left, right]
