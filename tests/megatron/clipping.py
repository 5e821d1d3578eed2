"""Ranks that compare largest attention logits and the results of Megatron's qk-clip."""

import functools
import math
from types import SimpleNamespace
from unittest import mock

import session
import torch

THRESHOLD = 0.02  # far below the logits of a new model: every step clips


def train(flags, clip):
    """Return [(loss, gradient norm, largest logit)] of a run.

    Its optimizer steps end in `clip_qk`, as in Megatron-LM, which clips or only takes the maximum
    of all ranks.
    """
    import pretrain_gpt
    from megatron.core.optimizer.qk_clip import clip_qk

    found, make_config, make_optimizer = (
        [], pretrain_gpt.model_config, pretrain_gpt.build_optimizer,
    )  # fmt: skip

    def model_config(args):
        config = make_config(args)
        config.log_max_attention_logit, config.qk_clip = not clip, clip
        config.qk_clip_threshold = THRESHOLD
        return config

    def build_optimizer(args, config, stages):
        optimizer, schedule = make_optimizer(args, config, stages)
        step = optimizer.step

        def stepping():
            result = step()
            # Megatron-LM's models in fp32 lack the wrapper in which it looks for the layers.
            wrapped = [SimpleNamespace(module=stage) for stage in stages]
            found.append(clip_qk(wrapped, log_max_only=not clip))
            for stage in stages if not clip else []:  # 0.16 leaves that to the next maximum
                for layer in stage.module.decoder.layers:
                    layer.self_attention.core_attention.current_max_attn_logits = None
            return result

        optimizer.step = stepping
        return optimizer, schedule

    with (
        mock.patch.object(pretrain_gpt, "model_config", model_config),
        mock.patch.object(pretrain_gpt, "build_optimizer", build_optimizer),
        recording_by_hand(),
    ):
        steps = session.train(flags)
    return [(*step, largest) for step, largest in zip(steps, found, strict=True)]


def recording_by_hand():
    """Patch Megatron's own local attention to record the largest logits of a dense computation.

    Only for context-parallel size 1.
    """
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    original = DotProductAttention.forward

    @functools.wraps(original)
    def forward(self, query, key, value, *args, **named):
        length, batch, heads, _ = query.shape
        scale = self.softmax_scale
        found = torch.full((heads,), -math.inf)
        for b in range(batch):
            for head in range(heads):
                keys = key[:, b, head // (heads // key.shape[2])].double()
                scores = query[:, b, head].double() @ keys.T * scale
                seen = torch.ones(length, length, dtype=torch.bool).tril()
                found[head] = max(found[head], scores[seen].max())
        before = getattr(self, "current_max_attn_logits", None)
        found = found.detach()
        self.current_max_attn_logits = found if before is None else torch.maximum(before, found)
        return original(self, query, key, value, *args, **named)

    patch = mock.patch.object(DotProductAttention, "forward", forward)
    empty = mock.patch.object(DotProductAttention, "current_max_attn_logits", None, create=True)
    return ScaleAndRecord(patch, empty)


class ScaleAndRecord:
    def __init__(self, *patches):
        self.patches = patches

    def __enter__(self):
        for patch in self.patches:
            patch.start()

    def __exit__(self, *error):
        for patch in self.patches:
            patch.stop()
