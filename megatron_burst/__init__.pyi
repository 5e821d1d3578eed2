# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass as _dataclass

from . import layout, masks, megatron
from .attention import attention, joint_attention
from .autotune.clusters import Cluster
from .autotune.gpus import Gpu
from .autotune.measure import measure_rates
from .autotune.rates import Rates
from .autotune.select import Choice, choose
from .comm.groups import Groups
from .layout.sharding import shard, unshard
from .linear_attention.operation import linear_attention
from .linear_attention.plan import LinearPlan, prepare_linear
from .linear_attention.short_convolution import short_convolution
from .linear_attention.state_scan import state_scan
from .linear_cross_entropy import linear_cross_entropy
from .planning.plan import Plan
from .planning.prepare import prepare
from .plugins.longseq.host.mover import HostMemory
from .plugins.longseq.options import LongSequenceOptions as _LongSequenceOptions
from .plugins.longseq.tiles import tiled
from .plugins.rl import api as rl
from .plugins.rl import trees
from .plugins.rl.divergence import linear_kl
from .plugins.rl.logprobs import linear_logprobs
from .plugins.sparse.attention import sparse_attention
from .plugins.sparse.compress import compress
from .plugins.sparse.indexer import select
from .plugins.sparse.loss import indexer_loss
from .plugins.sparse.megatron.layers import sparse_layer_spec
from .plugins.sparse.options import SparseOptions as _SparseOptions
from .plugins.sparse.selection import Selection
from .plugins.tools.advise.advice import Advice, advise
from .plugins.tools.advise.settings import Settings
from .plugins.tools.advise.shapes.model import Model
from .plugins.tools.advise.simulate import simulate
from .recompute.checkpoint import checkpoint

__version__: str

@_dataclass(frozen=True)
class BurstConfig(_LongSequenceOptions, _SparseOptions): ...

__all__ = [
    "Advice",
    "BurstConfig",
    "Choice",
    "Cluster",
    "Gpu",
    "Groups",
    "HostMemory",
    "LinearPlan",
    "Model",
    "Plan",
    "Rates",
    "Selection",
    "Settings",
    "advise",
    "attention",
    "checkpoint",
    "choose",
    "compress",
    "indexer_loss",
    "joint_attention",
    "layout",
    "linear_attention",
    "linear_cross_entropy",
    "linear_kl",
    "linear_logprobs",
    "masks",
    "measure_rates",
    "megatron",
    "prepare",
    "prepare_linear",
    "rl",
    "select",
    "shard",
    "short_convolution",
    "simulate",
    "sparse_attention",
    "sparse_layer_spec",
    "state_scan",
    "tiled",
    "trees",
    "unshard",
]
