"""Megatron-LM's own `pretrain_hybrid.py`, from a checkout; wheels have no scripts.

It trains on its mock data, which requires the dataset helpers of a checkout or a copy.
"""

from pathlib import Path

import pytest
from ranks import COMMON, ROOT
from test_training import same

pytest.importorskip("megatron.training.models.hybrid")
import megatron.core
from test_hybrid_model_training import CP2, CP4, EXPERTS, MAMBA, MTP, PIPELINE, TWO_LAYOUTS

SCRIPT = Path(megatron.core.__file__).parents[2] / "pretrain_hybrid.py"
pytestmark = pytest.mark.skipif(
    not SCRIPT.is_file(), reason="needs a checkout of Megatron-LM, whose scripts no wheel has"
)


@pytest.fixture(scope="module")
def pretrain(ranks):
    """Return `pretrain(world, flags)`, a `Run` of the script in which every rank succeeded."""
    known = {}

    def run(world, flags):
        if (world, flags) not in known:
            words = [str(SCRIPT), "--mock-data", *COMMON, *flags.split()]
            done = ranks.run(world, words, script=ROOT / "tests" / "te" / "pretrain.py")
            assert done.codes == [0] * world, "\n".join(done.texts)[-4000:]
            known[world, flags] = done
        return known[world, flags]

    return run


# what is compared -> (model, ranks of the run that nothing splits, ranks, flags)
CASES = {
    "zigzag": (MAMBA, 1, 2, CP2),
    "contiguous": (MAMBA, 1, 4, f"{CP4} {TWO_LAYOUTS}"),
    "experts": (EXPERTS, 1, 2, f"{CP2} --burst-lm-head-loss single_pass"),
    "pipeline": (PIPELINE, 2, 4, CP2),
    "further-heads": (MTP, 1, 2, CP2),
}


@pytest.mark.parametrize("case", CASES)
def test_split_like_one_rank(pretrain, case):
    model, one, world, flags = CASES[case]
    run = pretrain(world, f"{model} {flags}")
    same(run, pretrain(one, model))
    assert run.lines("burst attention: algorithm burst")
    assert run.lines("burst linear attention: algorithm ")


def test_it_says_what_it_does_not_honour(ranks):
    words = [str(SCRIPT), "--mock-data", *COMMON, *f"{MAMBA} {CP2} --burst-layout striped".split()]
    run = ranks.run(2, words, script=ROOT / "tests" / "te" / "pretrain.py")
    assert run.codes == [2, 2]
    assert run.lines("with --burst-layout striped: every row's predecessor")
