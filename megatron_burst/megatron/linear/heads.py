"""Heads of gated delta nets that context-parallel ranks do not share.

``TransformerConfig`` asserts that their number divides by tensor- times context-parallel ranks,
which Megatron's all-to-all of heads needs and passing states does not. A configuration learns only
afterwards which of them runs. Therefore the assertion moves to where it is known: the layer that
is built (`check_shared_heads`), and before that the checks of flags.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_burst.megatron.checks.linear import DELTA_NETS
from megatron_burst.megatron.patching.compatibility import require_parameters
from megatron_burst.megatron.patching.registry import PatchSet

_HEADS = ("linear_num_key_heads", "linear_num_value_heads")


def patch(patches: PatchSet) -> None:
    """Add to a set of patches what lets configurations have fewer such heads than ranks."""
    original = TransformerConfig.__post_init__
    require_parameters(original, ["self"], "TransformerConfig.__post_init__")
    patches.replace(TransformerConfig, "__post_init__", _with_any_heads(original))


def _with_any_heads(original: Callable) -> Callable:
    @functools.wraps(original)
    def __post_init__(self: Any) -> None:
        ranks, tensor = self.context_parallel_size, self.tensor_model_parallel_size
        heads = {name: getattr(self, name, None) for name in _HEADS}
        delta_net = getattr(self, "experimental_attention_variant", None) in DELTA_NETS
        if not delta_net or None in heads.values() or ranks <= 1:
            return original(self)
        keys, values = counts = [int(n) for n in heads.values() if n is not None]
        if keys < 1 or values % keys or any(n % tensor for n in counts):
            return original(self)  # refuses them, and names the numbers that were given
        # As many times the heads divide by the ranks: nothing else here reads their number.
        try:
            for name, count in heads.items():
                setattr(self, name, count * ranks)
            original(self)
        finally:
            for name, count in heads.items():
                setattr(self, name, count)

    return __post_init__


def check_shared_heads(config: Any, tensor: int, ranks: int) -> None:
    """Raise ``ValueError`` unless ``ranks`` context-parallel ranks can share the heads that each of
    ``tensor`` tensor-parallel ones has."""
    for name in _HEADS:
        heads = getattr(config, name)
        if heads % (tensor * ranks):
            raise ValueError(
                f"{name} is {heads}: Megatron's own all-to-all of heads needs a multiple of "
                f"--tensor-model-parallel-size ({tensor}) x --context-parallel-size ({ranks}); "
                "take --context-parallel-algo burst, which passes states, with --burst-linear auto"
            )
