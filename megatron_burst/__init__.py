"""megatron_burst: BurstAttention context parallelism for an unmodified Megatron.

Importing it imports torch, and neither Megatron nor Triton, and changes nothing.
"""

from . import layout, masks
from .attention import Plan, attention, prepare
from .comm import Groups
from .config import BurstConfig
from .sharding import shard, unshard

__version__ = "0.1.0"

__all__ = [
    "BurstConfig",
    "Groups",
    "Plan",
    "attention",
    "layout",
    "masks",
    "prepare",
    "shard",
    "unshard",
]
