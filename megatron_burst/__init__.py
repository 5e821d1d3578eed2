"""megatron_burst: BurstAttention context parallelism for an unmodified Megatron.

Importing it imports torch, and neither Megatron nor Triton, and changes nothing.
"""

from . import layout, masks
from .attention import attention
from .autotune.measure import measure_rates
from .autotune.rates import Rates
from .autotune.select import Choice, choose
from .comm.groups import Groups
from .config import BurstConfig
from .layout.sharding import shard, unshard
from .linear_cross_entropy import linear_cross_entropy
from .planning.plan import Plan
from .planning.prepare import prepare
from .recompute.checkpoint import checkpoint

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
