"""Images of a prompt are encoded once for all samples of a prefix tree."""

import image_ranks
import pytest


@pytest.fixture(scope="module")
def expected(four):
    return four(image_ranks.alone)[0]


@pytest.mark.parametrize(("tree", "encoded"), [(True, 10), (False, 40)])
def test_images_of_a_prompt_are_encoded_once_per_tree(four, expected, tree, encoded):
    """Two prompts have 4 samples and 2 images each; the images have 3, 2, 4 and 1 tokens."""
    for values, gradients, tokens in four(image_ranks.worst, 2, tree, expected):
        assert max(values, gradients) < 1e-10
        assert tokens == encoded
