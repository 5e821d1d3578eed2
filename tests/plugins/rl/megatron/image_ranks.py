"""A GPT that reads images, and samples of prompts with images, through `mb.rl.logprobs`.

Every image has its own token id, so that only prompts with the same images share a prefix. The
model finds the images in the tokens of the tree. Its encoder encodes each of them once.
"""

from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
import trajectories
from trajectories import model, the_loss

FIRST_IMAGE = 24  # ids from here on are images
COUNTS = {24: 3, 25: 2, 26: 4, 27: 1}  # tokens of each image
PROMPTS = [[1, *[24] * 3, 2, *[25] * 2], [1, *[26] * 4, 3, 27, 4]]
ANSWERS = [[5, 6, 7], [5, 6, 8], [9], [5, 10]]
SAMPLES = [prompt + answer for prompt in PROMPTS for answer in ANSWERS]
GPT = trajectories.gpt


def pixels(image):
    """Return what the encoder reads, [tokens, 5] in float64."""
    draw = torch.Generator().manual_seed(image)
    return torch.randn(COUNTS[image], 5, generator=draw, dtype=torch.float64)


def reading_images(config, **stage):
    """Return the GPT of `trajectories`, with an encoder that context-parallel ranks share."""
    from megatron_burst.megatron import gather_sequence
    from megatron_burst.plugins.vision.images import encode_shared

    gpt = GPT(config, **stage)
    gpt.encoder = torch.nn.Linear(5, config.hidden_size).double()
    gpt.encoded = 0  # tokens of images that this rank encoded
    forward = gpt.forward

    def with_images(input_ids, position_ids, attention_mask, packed_seq_params=None):
        whole = gather_sequence(input_ids, packed_seq_params, dim=1)[0]
        ids, counts = whole.unique_consecutive(return_counts=True)
        counts, ids = (x[ids >= FIRST_IMAGE] for x in (counts, ids))
        positions = (whole >= FIRST_IMAGE).nonzero()[:, 0]

        def encode(images):
            read = torch.cat([pixels(int(ids[i])) for i in images])
            gpt.encoded += len(read)
            return gpt.encoder(read)

        rows = gpt.embedding(input_ids=input_ids, position_ids=position_ids)
        rows = encode_shared(rows, encode, counts, positions, packed_seq_params)
        return forward(
            None, position_ids, attention_mask, decoder_input=rows,
            packed_seq_params=packed_seq_params,
        )  # fmt: skip

    gpt.forward = with_images
    return gpt


def with_encoder(config, **stage):
    """Return the GPT of `trajectories` and an encoder, for one rank."""
    gpt = GPT(config, **stage)
    gpt.encoder = torch.nn.Linear(5, config.hidden_size).double()
    return gpt


def alone():
    """Return log-probabilities and gradients of each sample by itself on one rank.

    Megatron's own attention and a dense log-softmax; images are placed by hand.
    """
    with (
        mock.patch.object(trajectories, "gpt", with_encoder),
        model({}, None, wrapped=False) as (gpt,),
    ):
        found = []
        for tokens in SAMPLES:
            ids, places = torch.tensor(tokens)[None], torch.arange(len(tokens))
            rows = gpt.embedding(input_ids=ids, position_ids=places[None])
            images = ids[0] >= FIRST_IMAGE
            names = ids[0, images].unique_consecutive().tolist()
            rows = rows.index_put(
                (images.nonzero()[:, 0],),
                gpt.encoder(torch.cat([pixels(name) for name in names]))[:, None],
            )
            hidden = (places[:, None] < places)[None, None]
            logs = gpt(None, places[None], hidden, decoder_input=rows)[0, :-1].log_softmax(-1)
            found.append((logs.gather(1, ids[0, 1:, None])[:, 0], -(logs.exp() * logs).sum(-1)))
        logprobs, entropies = zip(*found, strict=True)
        part = SimpleNamespace(index=range(8), logprobs=logprobs, entropies=entropies)
        the_loss(part).backward()
        grads = {parameter.whole: parameter.grad for parameter in gpt.parameters()}
        return [x.detach() for x in logprobs], grads


def worst(ranks, tree, expected):
    """Return the largest errors, and the image tokens that all ranks encoded."""
    import megatron_burst as mb

    logprobs, grads = expected
    with (
        mock.patch.object(trajectories, "gpt", reading_images),
        model({"context_parallel_size": ranks}, {}) as (gpt,),
    ):
        gpt.zero_grad_buffer()
        found = mb.rl.logprobs(gpt, SAMPLES, loss=the_loss, tree=tree)
        encoded = torch.tensor(gpt.module.encoded)
        dist.all_reduce(encoded)
        values = max(
            float((own - logprobs[i]).abs().max())
            for i, own in zip(found.index, found.logprobs, strict=True)
        )
        gaps = [(p.main_grad - grads[p.whole]).abs().max() for p in gpt.parameters()]
        return values, float(max(gaps)), int(encoded)
