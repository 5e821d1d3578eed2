"""Problems of context-parallel groups that change with the micro-batch.

Attention, rotary embedding and data path take the group that holds a micro-batch from its
``PackedSeqParams``, so hybrid context parallelism works in loops that hand it to the model. Where
Megatron's own code does not work with it, the error says what is broken.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_burst.megatron.checks.problem import Problem

HYBRID, DYNAMIC = "--hybrid-context-parallel", "--dynamic-context-parallel"
_FIELDS = (("hybrid_context_parallel", HYBRID), ("dynamic_context_parallel", DYNAMIC))


def asked(settings: Any) -> str | None:
    """The flag that makes the group change with the micro-batch, if it was given."""
    return next((flag for name, flag in _FIELDS if getattr(settings, name, False)), None)


def splits(settings: Any) -> bool:
    """Whether any micro-batch of such a run is split over ranks."""
    return settings.context_parallel_size != 1 or asked(settings) is not None


def hybrid_problems(config: Any) -> Iterator[Problem]:
    """Settings of a ``TransformerConfig`` that do not work with groups per micro-batch."""
    flag = asked(config)
    if flag is None:
        return
    for name, given, why in (
        ("multi_latent_attention", "--multi-latent-attention",
         "Megatron's latent attention refuses micro-batches with a group of their own"),
        ("mtp_num_layers", "--mtp-num-layers",
         "Megatron shifts tokens for it in the group that the model was built with"),
        ("is_hybrid_model", "Mamba layers", "these split the sequence over the group that the "
         "model was built with"),
        ("experimental_attention_variant", "--experimental-attention-variant",
         "it splits the sequence over the group that the model was built with"),
    ):  # fmt: skip
        if getattr(config, name, None):
            yield Problem(f"{flag} with {given}: {why}", remove=(flag,))
    stages = getattr(config, "pipeline_model_parallel_size", None) or 1
    if stages > 1 and flag == HYBRID:
        yield Problem(
            f"{flag} with --pipeline-model-parallel-size {stages}: Megatron's schedule for it has "
            "no pipeline",
            remove=(flag,),
        )
    if not getattr(config, "calculate_per_token_loss", True):
        yield Problem(
            f"{flag}: micro-batches hold unequal numbers of tokens, and without "
            "--calculate-per-token-loss all of them count alike",
            add=("--calculate-per-token-loss",),
        )


def script_problems(settings: Any) -> Iterator[Problem]:
    """What is broken in Megatron-LM's own training loop (checked up to 0.20.0)."""
    if asked(settings) == HYBRID:
        yield Problem(
            f"{HYBRID}: Megatron-LM itself cannot train with it: its rerun state machine refuses "
            "the data iterator (not wrapped with RerunDataIterator), its scripts fail in "
            "get_batch_on_this_tp_rank (the documents that its data loader deals out have one "
            "dimension, and neither cu_seqlens nor max_seqlen), and validation gets batches that "
            "nothing has scheduled; a loop of your own on Megatron-Core works with it",
            remove=(HYBRID,),
        )
    elif asked(settings) == DYNAMIC:
        yield Problem(
            f"{DYNAMIC}: the data path of Megatron-LM's branch dev cuts batches by Transformer "
            "Engine, with which it was never run here; attention itself takes the groups that it "
            "makes, in a loop of your own on Megatron-Core",
            remove=(DYNAMIC,),
        )
