"""`--burst-offload` with `--burst-sequence-chunks`: keys of other ranks are on the host.

They stay there between the row chunks of a forward, are sent once, and change no result.
"""

import layer_ranks
import offloading
import pytest
import session
from test_parity import TOLERANCE, worst

CP2 = "--context-parallel-size 2"
CHUNKS = "--burst-sequence-chunks 4"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
LAYERS = {
    "two ranks": {"chunks": 4},
    "four ranks, striped": {"chunks": 3, "cp": 4, "layout": "striped"},
    "recomputed": {"chunks": 3, "keep": 0.0},
    "packed, tensor parallel": {"chunks": 3, "packed": True, "tp": 2, "sequence_parallel": True},
}
# A rank's keys and values of 48 / CP rows, 2 sequences, 4 heads of 4, in fp64, in bytes.
KEYS = {2: 24 * 2 * 4 * (4 + 4) * 8, 4: 12 * 2 * 4 * (4 + 4) * 8}


@pytest.mark.parametrize("case", LAYERS)
def test_a_layer_has_the_same_output_and_gradients(four, case):
    given = LAYERS[case]
    cp, packed = given.get("cp", 2), "packed" in given
    fewer = []
    for errors, sent, moved, left in four(layer_ranks.keys_on_the_host, dict(given)):
        assert max(errors.values()) < 1e-10
        assert left == 0
        # Run again from its input, a layer has another forward.
        assert len(sent) == (2 if "keep" in given else 1)
        for taken, kept, ring in sent:
            assert taken == kept <= ring
            fewer.append(kept < ring)
            if not packed:
                assert kept <= (cp - 1) * KEYS[cp]
        assert moved > 0
    assert any(fewer) if packed else all(fewer)  # a short document is in one row chunk


@pytest.mark.parametrize(
    "more", ["", pytest.param(f"{FULL} --burst-attention-store 0.5", marks=pytest.mark.slow)]
)
def test_training_has_the_same_losses(four, common, train, more):
    """Two steps of a small GPT; if rounding differs, compare with a run without chunks."""
    flags = f"{CP2} --train-iters 2 {more}"
    ranks = four(offloading.train, [*common, *f"{flags} {CHUNKS} --burst-offload 0.5".split()], {})
    for history, _, tiers in ranks:
        assert history == train(f"{flags} {CHUNKS}")
        assert worst(history, train(flags)) < TOLERANCE
        ((fraction, out, _, _, left),) = tiers
        assert (fraction, left) == (0.5, 0)
        assert out > 0
    lines = ranks[0][1]
    (startup,) = [line for line in lines if line.startswith("burst attention: ")]
    assert " | 4 row chunks (forward with keys in host memory " in startup
    assert "--burst-offload 0.5: keys of other ranks are in host memory between row chunks" in lines
    (moved,) = [line for line in lines if "of saved activations" in line]
    assert "of keys of other ranks)" in moved


def test_what_cannot_wait_on_the_host_goes_round_again(four, common, train):
    """Algorithm tile sends partial results too. Without --burst-offload nothing changes."""
    flags = f"{CP2} --train-iters 1 {CHUNKS} --context-parallel-algo tile"
    ranks = four(offloading.train, [*common, *flags.split(), "--burst-offload", "0.5"], {})
    for history, _, _ in ranks:
        assert history == train(flags)
    lines = ranks[0][1]
    (startup,) = [line for line in lines if line.startswith("burst attention: ")]
    assert "no keys in host memory: algorithm tile sends more than keys in forward" in startup
    assert (
        "--burst-offload 0.5: keys of other ranks are not in host memory between row chunks"
        in lines
    )
    plain = f"{CP2} --train-iters 1 {CHUNKS}"
    lines = four(session.logged, [*common, *plain.split()])[0]
    assert not any("--burst-offload" in line for line in lines)
