# SPDX-License-Identifier: Apache-2.0
"""Packing of the documents of a global batch into micro-batches of equal time.

The rates of `autotune` convert work into seconds. `megatron` moves the tokens.
"""

from ..layout.balanced import document_pairs
from .solver import Packing, pack
from .work import Work

__all__ = ["Packing", "Work", "document_pairs", "pack"]
