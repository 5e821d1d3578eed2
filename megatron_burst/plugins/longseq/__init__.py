# SPDX-License-Identifier: Apache-2.0
"""Very long sequences: activations in host memory, and layers that run in chunks of rows.

`host/` moves tensors to host memory (`mb.HostMemory`), and `tiles` runs row-wise functions in tiles
of rows (`mb.tiled`). `offload/` and `layer/` apply both to the layers of Megatron. Sources: MEMO
(arXiv 2407.12117), FPDT (arXiv 2408.16978), ALST (arXiv 2506.13996).
"""
