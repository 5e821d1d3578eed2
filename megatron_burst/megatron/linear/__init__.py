# SPDX-License-Identifier: Apache-2.0
"""Layers of linear attention over context-parallel ranks: gated delta nets and Mamba mixers."""
