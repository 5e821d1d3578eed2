# SPDX-License-Identifier: Apache-2.0
"""Packing: the documents of a global batch into micro-batches that take equally long.

Above `autotune`, whose rates turn work into seconds, and below `megatron`, which moves the tokens.
"""

from ..layout.balanced import document_pairs
from .solver import Packing, pack
from .work import Work

__all__ = ["Packing", "Work", "document_pairs", "pack"]
