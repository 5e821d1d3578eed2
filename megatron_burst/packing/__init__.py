# SPDX-License-Identifier: Apache-2.0
"""Packing of a global batch: documents are assigned to micro-batches that need equal time.

`autotune` has the rates that convert work into seconds. `megatron` moves the tokens between ranks.
"""

from ..layout.balanced import document_pairs
from .solver import Packing, pack
from .work import Work

__all__ = ["Packing", "Work", "document_pairs", "pack"]
