"""Models of Megatron Lite, only if its source is available; its interface, always."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def source(request):
    """Return the folder to import `megatron.lite` from, of Megatron-LM's branch dev."""
    named = request.config.getoption("--megatron")
    folder = Path(named) / "experimental" / "lite"
    if not named or not (folder / "megatron" / "lite").is_dir():
        pytest.skip(
            "Megatron Lite is on no package index: name a checkout of Megatron-LM's branch dev, "
            "pytest tests/plugins/lite --megatron PATH"
        )
    return str(folder)


@pytest.fixture(scope="module")
def lite(source):
    """Return `lite(n, "function", *arguments)`, which runs `on_lite_ranks.function` on n ranks.

    The processes import Megatron Lite and do nothing else.
    """
    from workers import Workers

    pools = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(HERE)])
        import on_lite_ranks

        def run(world, function, *arguments):
            if world not in pools:
                pools[world] = Workers(world)
                pools[world].run(on_lite_ranks.prepare, source, timeout=300)
            return pools[world].run(getattr(on_lite_ranks, function), *arguments, timeout=300)

        yield run
        for pool in pools.values():
            pool.close()
