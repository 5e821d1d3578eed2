"""What Transformer Engine's attention computes on one rank, written as a dense matrix.

Of [s, b, heads, width], or of packed documents [t, heads, width]. Queries and keys may be different
sequences with the same number of documents; padding attends to nothing.
"""

import math

import torch
from megatron.core.transformer.module import MegatronModule


def documents(ends, padded, total):
    """Return the document of each of `total` tokens, -1 for padding."""
    number = torch.full((total,), -1)
    starts = (ends if padded is None else padded).tolist()
    for i, (start, length) in enumerate(zip(starts[:-1], ends.diff().tolist(), strict=True)):
        number[start : start + length] = i
    return number


class DenseAttention(MegatronModule):
    def __init__(
        self, config, layer_number, attn_mask_type, attention_type, attention_dropout=None,
        softmax_scale=None, k_channels=None, v_channels=None, cp_comm_type=None,
        pg_collection=None,
    ):  # fmt: skip
        super().__init__(config=config)
        assert config.context_parallel_size == 1
        self.scale, self.kind = softmax_scale, attn_mask_type

    def forward(
        self, query, key, value, attention_mask=None, attn_mask_type=None, attention_bias=None,
        packed_seq_params=None, num_splits=None,
    ):  # fmt: skip
        assert attention_mask is None
        assert attention_bias is None
        kind, packed = attn_mask_type or self.kind, packed_seq_params
        if packed is not None:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        (s, _, _, width), per = query.shape, query.shape[2] // key.shape[2]
        visible = torch.ones(s, len(key), dtype=torch.bool)
        if "causal" in kind.name:
            visible = visible.tril()
        if packed is not None:
            rows = documents(packed.cu_seqlens_q, packed.cu_seqlens_q_padded, s)
            columns = documents(packed.cu_seqlens_kv, packed.cu_seqlens_kv_padded, len(key))
            visible &= (rows[:, None] == columns) & (rows[:, None] >= 0)
        key, value = (x.repeat_interleave(per, 2).permute(1, 2, 0, 3) for x in (key, value))
        logits = query.permute(1, 2, 0, 3) @ key.transpose(2, 3)
        logits = logits * (1 / math.sqrt(width) if self.scale is None else self.scale)
        weights = logits.masked_fill(~visible, -1e30).softmax(3) * visible
        out = (weights @ value).permute(2, 0, 1, 3).flatten(2)
        return out if packed is None else out.squeeze(1)
