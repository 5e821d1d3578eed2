"""Ranks of the tests of images: real classes of Megatron, tiny and random.

A run returns the summed loss and the gradients of all weights, summed over context-parallel ranks.
They are equal for every way of splitting.
"""

import contextlib
import functools
import io
from unittest import mock

import numpy as np
import session
import torch
import torch.nn.functional as F

LENGTH, VOCABULARY, HIDDEN, HEADS = 48, 32, 16, 4
WINDOW = 5
IMAGE = 31  # its token
# Over edges of ranks in every layout, two that touch, one of a single token.
SPANS = {0: [(4, 14), (14, 17), (23, 25), (40, 48)], 1: [(0, 9), (30, 31)]}
AXES = 3


def same(spans):
    """Return a bool [s, s] by hand that is true for queries and keys of one image."""
    row, column = np.mgrid[:LENGTH, :LENGTH]
    parts = [(row >= a) & (row < b) & (column >= a) & (column < b) for a, b in spans]
    return np.array(parts).any(axis=0)


def dense(name, layer, spans):
    """Return a bool [s, s] by hand that is true for hidden pairs. Layers 1 and 3 have a window."""
    row, column = np.mgrid[:LENGTH, :LENGTH]
    seen, sliding = column <= row, layer % 2 == 1
    if sliding:
        seen &= row - column <= WINDOW
    if name == "gemma3" or (name == "gemma4" and sliding):
        seen |= same(spans)
    return torch.from_numpy(~seen)[None, None]


def config(cp, burst=None, **changes):
    from megatron.core.transformer.transformer_config import TransformerConfig

    import megatron_burst as mb
    import megatron_burst.megatron as install

    made = TransformerConfig(**{
        "num_layers": 4, "hidden_size": HIDDEN, "ffn_hidden_size": 24, "num_attention_heads": HEADS,
        "num_query_groups": 2, "normalization": "RMSNorm", "gated_linear_unit": True,
        "activation_func": F.silu, "add_bias_linear": False,
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "calculate_per_token_loss": True,
        "use_cpu_initialization": True, "gradient_accumulation_fusion": False,
        "persist_layer_norm": False, "bias_activation_fusion": False, "bias_dropout_fusion": False,
        "masked_softmax_fusion": False, "apply_rope_fusion": False, "init_method_std": 0.3,
        "context_parallel_size": cp, **changes,
    })  # fmt: skip
    install.configure(made, mb.BurstConfig(**(burst or {})))
    return made


def refill(model):
    """Set the same weights in every run."""
    for index, (name, parameter) in enumerate(sorted(model.named_parameters())):
        draw = torch.Generator().manual_seed(index)
        scale = 0.1 if "norm" in name else 0.3
        noise = torch.randn(parameter.shape, generator=draw)
        parameter.data.copy_(noise * scale + (1.0 if "norm" in name else 0.0))


@contextlib.contextmanager
def groups(layout, cp):
    from megatron.core.tensor_parallel import random

    with session.parallel(layout, context_parallel_size=cp):
        random.model_parallel_cuda_manual_seed(7, force_reset_rng=True)
        yield


def language(made, position="rope", cut=False):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    model = GPTModel(
        made, get_gpt_layer_local_spec(normalization="RMSNorm"), vocab_size=VOCABULARY,
        max_sequence_length=LENGTH, position_embedding_type=position,
    )  # fmt: skip
    refill(model)
    return model


def tokens_of(micro):
    draw = torch.Generator().manual_seed(20 + micro)
    tokens, labels = torch.randint(0, IMAGE, (2, 1, LENGTH), generator=draw)
    for a, b in SPANS[micro]:
        tokens[0, a:b] = IMAGE
    mask = (torch.rand(1, LENGTH, generator=draw) < 0.7).float()
    return tokens, labels, mask


def summed(model, losses):
    """Return (loss, {name: gradient}) summed over the ranks that share a sequence."""
    from megatron.core import parallel_state

    group = parallel_state.get_context_parallel_group()
    total = torch.stack([x.detach() for x in losses]).double()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for value in (total, *grads.values()):
        torch.distributed.all_reduce(value, group=group)
    return total.tolist(), {name: x.clone() for name, x in grads.items()}


def gemma(name, layout="zigzag", cp=1, recompute=False, told=True):
    """Run two micro-batches in flight, with different images, through layers like Gemma's.

    Forward of both precedes the first backward.
    """
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    import megatron_burst.megatron as install
    from megatron_burst.plugins.vision.images import image_spans, with_spans

    changes = {"window_size": (WINDOW, 0), "window_attn_skip_freq": 2} if cp > 1 else {}
    if recompute:
        changes |= {"recompute_granularity": "full", "recompute_method": "uniform",
                    "recompute_num_layers": 1}  # fmt: skip
    burst = {"layout": layout}
    if cp > 1 and name != "causal":
        burst["mask"] = f"megatron_burst.plugins.vision.images:{name}"
    attend, losses = DotProductAttention.forward, []

    @functools.wraps(attend)
    def masked(self, query, key, value, attention_mask, *args, **named):
        hidden = dense(name, self.layer_number, SPANS[len(losses)])
        return attend(self, query, key, value, hidden, *args, **named)

    one = mock.patch.object(DotProductAttention, "forward", masked)
    with groups(layout, cp), one if cp == 1 else contextlib.nullcontext():
        model = language(config(cp, burst, **changes))
        for micro in SPANS:
            tokens, labels, mask = tokens_of(micro)
            params = None
            if cp > 1 and told:
                spans = image_spans(tokens, IMAGE, [14])  # two images of these tokens touch
                assert name == "causal" or spans == SPANS[micro]
                params = with_spans(spans, LENGTH)
            if cp > 1:
                tokens, labels, mask = (
                    install.shard_sequence(x, params) for x in (tokens, labels, mask)
                )
            loss = model(tokens, torch.zeros_like(tokens), None, labels=labels,
                         packed_seq_params=params)  # fmt: skip
            losses.append((loss * mask).sum())
        for loss in reversed(losses):
            loss.backward()
        return summed(model, losses)


def error(function, *args, **named):
    try:
        function(*args, **named)
    except Exception as caught:
        return f"{type(caught).__name__}: {caught}"
    return None


def axes(layout="zigzag", cp=1, after=True, packed=False):
    """Run a model like Qwen-VL: positions of three axes, and image embeddings among tokens.

    The images are placed before the sequence is cut or after. after "batch": Megatron's function
    cuts the batch, with positions.
    """
    import megatron_burst.megatron as install
    from megatron_burst.plugins.vision.images import encode_shared, place_images, with_spans

    with groups(layout, cp):
        made = config(cp, {"layout": layout}, mrope_section=[1, 1, 0])
        model = language(made, "mrope")
        tokens, labels, mask = tokens_of(0)
        draw = torch.Generator().manual_seed(5)
        positions = torch.randint(0, 30, (AXES, 1, LENGTH), generator=draw)
        where = torch.cat([torch.arange(a, b) for a, b in SPANS[0]])
        pixels = torch.randn(len(where), HIDDEN, generator=draw)
        encoder = torch.nn.Linear(HIDDEN, HIDDEN)
        refill(encoder)
        images = encoder(pixels)

        def embed(ids):
            return model.embedding(input_ids=ids, position_ids=None)

        if after == "batch":
            batch = cut({
                "tokens": tokens, "labels": labels, "loss_mask": mask, "position_ids": positions,
                "attention_mask": torch.ones(1),
            })  # fmt: skip
            rows = place_images(embed(batch["tokens"]), images, where)
            labels, mask, positions = (
                batch[name] for name in ("labels", "loss_mask", "position_ids")
            )
        elif after == "shared":
            mine = install.shard_sequence(tokens) if cp > 1 else tokens
            counts = [b - a for a, b in SPANS[0]]
            parts = torch.split(pixels, counts)
            rows = encode_shared(
                embed(mine), lambda own: encoder(torch.cat([parts[i] for i in own])), counts, where
            )
        elif after:
            mine = install.shard_sequence(tokens) if cp > 1 else tokens
            rows = place_images(embed(mine), images, where)
        else:
            rows = embed(tokens).index_copy(0, where, images[:, None])
            rows = install.shard_sequence(rows, dim=0) if cp > 1 else rows
        if cp > 1 and after != "batch":
            labels, mask = (install.shard_sequence(x) for x in (labels, mask))
        params = with_spans([], LENGTH) if packed else None
        loss = model(None, positions, None, decoder_input=rows, labels=labels,
                     packed_seq_params=params)  # fmt: skip
        loss = (loss * mask).sum()
        loss.backward()
        return summed(torch.nn.ModuleList([model, encoder]), [loss])


def cut(batch):
    import inspect

    from megatron.core import parallel_state, utils

    function = utils.get_batch_on_this_cp_rank
    hybrid = "is_hybrid_cp" in inspect.signature(function).parameters
    group = parallel_state.get_context_parallel_group()
    return function(batch, cp_group=group, **({"is_hybrid_cp": False} if hybrid else {}))


def shared(layout, cp, counts, frozen=False, every=False):
    """Encode images with these counts among rows of zero, in float64, with two layers.

    Return this rank's rows, its number of images, and the encoder's gradients, summed over ranks.
    """
    import megatron_burst.megatron as install
    from megatron_burst.plugins.vision.images import encode_shared, place_images

    with groups(layout, cp):
        config(cp, {"layout": layout})
        encoder = torch.nn.Sequential(
            torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, HIDDEN)
        )
        encoder = encoder.double().requires_grad_(not frozen)
        refill(encoder)
        draw = torch.Generator().manual_seed(3)
        where = torch.randperm(LENGTH, generator=draw)[: sum(counts)]
        pixels = torch.randn(sum(counts), 5, generator=draw, dtype=torch.float64)
        weights = torch.randn(LENGTH, 1, HIDDEN, generator=draw, dtype=torch.float64)
        table = torch.zeros(LENGTH // cp, 1, HIDDEN, dtype=torch.float64, requires_grad=True)
        parts, encoded = torch.split(pixels, counts), []

        def encode(own):
            encoded.extend(own)
            return encoder(torch.cat([parts[i] for i in own]))

        if every:
            rows = place_images(table, encoder(pixels), where)
        else:
            rows = encode_shared(table, encode, counts, where)
        loss = (rows.sin() * install.shard_sequence(weights, dim=0)).sum()
        loss.backward()
        _, grads = summed(encoder, [loss])
        return rows.detach(), encoded, {"table": table.grad, **grads}


IMAGE_PLACE = -200  # LLaVA's token, which becomes all tokens of an image
PATCH, SIZE = 4, 12  # nine tokens per image


def llava(layout="zigzag", cp=1):
    """Run Megatron's own LLaVA: a CLIP encoder, a projector, and a language model."""
    import copy
    from unittest.mock import patch

    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.multimodal import llava_model
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    # It wants Transformer Engine under context parallelism, and uses none of it here; its encoder
    # takes torch's norm without it, which has other arguments.
    eyes = functools.partial(llava_model.CLIPViTModel, ln_pre_impl=WrappedTorchNorm)
    stand_ins = {
        "CLIPViTModel": eyes,
        "TEDotProductAttention": DotProductAttention, "HAVE_TE": True,
        "is_te_min_version": lambda version: True,
    }  # fmt: skip
    with groups(layout, cp), patch.multiple(llava_model, **stand_ins):
        made, spec = (
            config(cp, {"layout": layout}),
            get_gpt_layer_local_spec(normalization="RMSNorm"),
        )
        made.language_model_type = "dummy"
        seeing, projecting = (config(1, {"layout": layout}, num_layers=2) for _ in range(2))
        seeing.vision_model_type = "clip"
        seen = copy.deepcopy(spec)
        seen.submodules.self_attention.params = {"attn_mask_type": AttnMaskType.no_mask}
        model = llava_model.LLaVAModel(
            made, spec, VOCABULARY, LENGTH, seeing, seen, True, projecting,
            MLPSubmodules(ColumnParallelLinear, RowParallelLinear), img_h=SIZE, img_w=SIZE,
            patch_dim=PATCH, language_position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
        )  # fmt: skip
        refill(model)
        draw = torch.Generator().manual_seed(5)
        tokens, labels = torch.randint(0, IMAGE, (2, 2, 32), generator=draw)
        for row, places in enumerate([(3, 4), (0, 31)]):  # 2 x 8 further tokens
            tokens[row, list(places)] = IMAGE_PLACE
        images = torch.randn(4, 3, SIZE, SIZE, generator=draw)
        mask = (torch.rand(2, 32, generator=draw) < 0.7).float()
        loss, kept = model(images, tokens, None, None, labels, mask)
        loss = (loss * kept).sum()
        loss.backward()
        return summed(model, [loss])


def mimo(layout="zigzag", cp=1):
    """Run Megatron's MIMO: an encoder and a language model, whose inputs its adapter cuts."""
    import warnings

    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.spec_utils import ModuleSpec

    with groups(layout, cp), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.models.mimo.config.base_configs import MimoModelConfig
        from megatron.core.models.mimo.model.base import MimoModel
        from megatron.core.models.mimo.submodules.vision import VisionModalitySubmodules

        made = config(cp, {"layout": layout}, mrope_section=[1, 1, 0])
        words = ModuleSpec(GPTModel, params={
            "config": made,
            "transformer_layer_spec": get_gpt_layer_local_spec(normalization="RMSNorm"),
            "vocab_size": VOCABULARY, "max_sequence_length": LENGTH,
            "position_embedding_type": "mrope",
        })  # fmt: skip
        eyes = ModuleSpec(VisionModalitySubmodules, submodules={
            "encoders": {"linear": ModuleSpec(Pixels)},
        })  # fmt: skip
        group = parallel_state.get_context_parallel_group()
        model = MimoModel(
            MimoModelConfig(words, {"images": eyes}, {"images": IMAGE}), cp_group=group
        )
        refill(model)
        tokens, labels, mask = tokens_of(0)
        draw = torch.Generator().manual_seed(5)
        positions = torch.randint(0, 30, (AXES, 1, LENGTH), generator=draw)
        pixels = torch.randn(int((tokens == IMAGE).sum()), HIDDEN, generator=draw)
        loss, kept = model(
            tokens, positions, None, mask, labels, {"images": {"linear": {"x": pixels}}}
        )
        loss = (loss * kept).sum()
        loss.backward()
        return summed(model, [loss])


class Pixels(torch.nn.Linear):
    """An encoder whose input has the name that its caller gives it."""

    def __init__(self):
        super().__init__(HIDDEN, HIDDEN)

    def forward(self, x):
        return super().forward(x)


def heads(layout="zigzag", cp=1):
    """Run core attention of layers like Gemma 4's.

    Layers without a window have wider heads whose keys are values, and one layer attends to the
    keys of an earlier layer.
    """
    from megatron.core import parallel_state
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    import megatron_burst.megatron as install

    with groups(layout, cp):
        made = config(cp, {"layout": layout}, window_size=(WINDOW, 0), window_attn_skip_freq=3)
        kind = install.BurstCoreAttention if cp > 1 else DotProductAttention
        draw = torch.Generator().manual_seed(5)
        shapes = {"q1": (HEADS, 8), "k1": (2, 8), "v1": (2, 8), "q2": (HEADS, 8), "q3": (HEADS, 16),
                  "k3": (1, 16)}  # fmt: skip
        whole = {name: torch.randn(LENGTH, 1, *shape, generator=draw)
                 for name, shape in shapes.items()}  # fmt: skip
        mine = {
            name: (install.shard_sequence(x, dim=0) if cp > 1 else x).requires_grad_()
            for name, x in whole.items()
        }
        calls = [(1, "q1", "k1", "v1"), (2, "q2", "k1", "v1"), (3, "q3", "k3", "k3")]
        total = 0.0
        for number, *names in calls:
            q, k, v = (mine[name] for name in names)
            if cp == 1:
                out = by_hand(q, k, v, None if number == 3 else WINDOW)
            else:
                layer = kind(made, number, AttnMaskType.causal, "self")
                out = layer(q, k, v).view(*q.shape[:3], -1)
            total = total + (out * out.cos()).sum()
        total.backward()
        group = parallel_state.get_context_parallel_group()
        value = total.detach().double()
        torch.distributed.all_reduce(value, group=group)
        found = {
            name: install.gather_sequence(x.grad) if cp > 1 else x.grad for name, x in mine.items()
        }
        return [value.item()], found


def by_hand(q, k, v, window):
    """Return attention of q [s, 1, h, d], k, v [s, 1, g, d] as dense matrices."""
    row, column = np.mgrid[:LENGTH, :LENGTH]
    seen = (column <= row) & ((row - column <= window) if window else True)
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    logits = torch.einsum("qbhd,kbhd->bhqk", q, k) / q.shape[-1] ** 0.5
    weights = logits.masked_fill(~torch.from_numpy(seen), -torch.inf).softmax(-1)
    return torch.einsum("bhqk,kbhd->qbhd", weights, v)


def place(wrong):
    """Place images of two tokens and their spans, with an argument that does not fit."""
    import megatron_burst.megatron as install
    from megatron_burst.plugins.vision.images import encode_shared, place_images, with_spans

    asked = {"images": 2, "positions": [0, 30], "batch": 1, "spans": [], "seq_len": LENGTH} | wrong
    with groups("zigzag", 2):
        config(2, {"layout": "zigzag"})
        params = with_spans(asked["spans"], asked["seq_len"])
        rows = install.shard_sequence(torch.zeros(LENGTH, asked["batch"], 4), dim=0)
        images = torch.ones(asked["images"], 4)
        if "counts" in asked:
            encode_shared(rows, lambda _: images, asked["counts"], asked["positions"], params)
        else:
            place_images(rows, images, asked["positions"], params)


def documented(text):
    """Run a block of the page on ranks of one sequence, and return its variables."""
    with groups("zigzag", 2):
        config(2, {"layout": "zigzag"})
        left = {}
        with contextlib.redirect_stdout(io.StringIO()) as said:
            exec(text, left)
        return said.getvalue()
