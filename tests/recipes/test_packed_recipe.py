"""Finetuning on packed data: Bridge's packed files, dataset and step, documents of any length."""

import numpy as np
import pytest
from shrunk import SMALL

SIZE, VOCABULARY = 256, 512
END = VOCABULARY - 1  # the tokenizer's end of a document, with which Bridge pads
SFT = [
    *SMALL, "model.calculate_per_token_loss=True", "ddp.average_in_collective=False",
]  # fmt: skip


def pack(path, multiple):
    """Store eight packs of documents of uneven lengths, padded to a multiple, in Bridge's format.

    A document of n tokens has n - 1 positions, since its last token is only predicted.
    """
    draw, packs = np.random.default_rng(0), []
    for _ in range(8):
        tokens, starts, used = [], [], 0
        while used < SIZE - 40:
            places = int(draw.integers(5, 40))
            room = -(-places // multiple) * multiple
            starts.append(len(tokens))
            text = draw.integers(1, VOCABULARY - 1, places + 1).tolist()
            tokens += text + [END] * (room - places)
            used += room
        packs.append({"input_ids": tokens, "seq_start_id": starts, "loss_mask": [1] * len(tokens)})
    np.save(path, np.array(packs, dtype=object), allow_pickle=True)
    metadata = path.with_suffix(".json")
    metadata.write_text("[]")  # which is read, and needed for CUDA graphs only
    return {
        "packed": str(path), "packed_metadata": str(metadata), "packed_size": SIZE, "pad": multiple
    }  # fmt: skip


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """Return the folder of a tokenizer of the hub's kind, whose words are numbers."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {str(number): number for number in range(VOCABULARY)}
    folder = tmp_path_factory.mktemp("words")
    kind = Tokenizer(models.WordLevel(vocabulary, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=kind, eos_token=str(END), bos_token="0")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=[1, 8], ids=["any-length", "padded"])
def data(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed")
    return pack(folder / "packs.npy", request.param)


@pytest.mark.parametrize(
    ("world", "choices"),
    [(2, {"layout": "striped"}), (4, {"intra": 2}), (4, {"intra": 2, "layout": "balanced"})],
)
def test_packed_documents_train_like_a_dense_mask_on_one_rank(train, data, words, world, choices):
    small = [*SFT, f"tokenizer.tokenizer_model={words}"]
    job = {"recipe": "llama3_8b_sft_config", "small": small, **data}
    reference, _ = train(1, attention="dense", **job)
    steps, log = train(world, choices=choices, **job)
    np.testing.assert_allclose(np.array(steps), np.array(reference), rtol=3e-6)
    assert log.count("burst attention: algorithm burst") == 1
