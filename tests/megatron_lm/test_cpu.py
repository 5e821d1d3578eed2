"""`--cpu`: features that need a GPU are refused by name; queries of a GPU's numbers work."""

import pytest
from ranks import COMMON

pytest.importorskip(
    "megatron.training", reason="megatron.training is in wheels for Python 3.12 and on only"
)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--use-torch-fsdp2", ["--use-torch-fsdp2"]),
        ("--use-megatron-fsdp --cuda-graph-impl local", ["--use-megatron-fsdp",
                                                         "--cuda-graph-impl"]),
        ("--enable-cuda-graph", ["--enable-cuda-graph"]),
    ],
)  # fmt: skip
def test_what_a_cpu_cannot_stand_in_for_is_refused(ranks, flags, named):
    run = ranks.run(1, [*COMMON, *flags.split()])
    assert run.codes == [2], run.texts[0][-3000:]
    assert not run.lines("Traceback")
    assert len(run.lines("megatron-burst pretrain: error: ")) == 1
    for name in named:
        assert len(run.lines(f"{name} ")) >= 1
    assert run.texts[0].count("which --cpu does not use") == len(named)
    assert f"remove{':' * (len(named) > 1)} {' '.join(named)}" in run.texts[0]


def test_memory_is_logged_as_none(ranks, tmp_path):
    pytest.importorskip("tensorboard", reason="Megatron writes its event files with tensorboard")
    flags = f"--log-memory-to-tensorboard --tensorboard-dir {tmp_path} --train-iters 1"
    run = ranks.run(1, [*COMMON, *flags.split()])
    assert run.codes == [0], run.texts[0][-3000:]
    assert list(tmp_path.iterdir())
