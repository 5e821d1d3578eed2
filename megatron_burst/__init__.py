"""megatron_burst: BurstAttention context parallelism for an unmodified Megatron.

Importing it imports torch, and neither Megatron nor Triton, and changes nothing.
"""

from . import layout, masks
from .attention import attention
from .checkpoint import checkpoint
from .choose import Choice, choose
from .config import BurstConfig
from .groups import Groups
from .linear_cross_entropy import linear_cross_entropy
from .plan import Plan
from .prepare import prepare
from .probe import measure_rates
from .rates import Rates
from .sharding import shard, unshard

__version__ = "0.1.0"

__all__ = [
    "BurstConfig",
    "Choice",
    "Groups",
    "Plan",
    "Rates",
    "attention",
    "checkpoint",
    "choose",
    "layout",
    "linear_cross_entropy",
    "masks",
    "measure_rates",
    "prepare",
    "shard",
    "unshard",
]
