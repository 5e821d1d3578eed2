"""megatron_burst: BurstAttention context parallelism for an unmodified Megatron.

Importing it imports torch, and neither Megatron nor Triton, and changes nothing.
"""

from . import layout, masks
from .attention import attention
from .checkpoint import checkpoint
from .config import BurstConfig
from .groups import Groups
from .linear_cross_entropy import linear_cross_entropy
from .prepare import Plan, prepare
from .sharding import shard, unshard

__version__ = "0.1.0"

__all__ = [
    "BurstConfig",
    "Groups",
    "Plan",
    "attention",
    "checkpoint",
    "layout",
    "linear_cross_entropy",
    "masks",
    "prepare",
    "shard",
    "unshard",
]
