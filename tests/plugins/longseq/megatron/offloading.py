"""Functions that the ranks of `test_offload` run: training with activations on the host."""

import contextlib
import functools
import gc
import itertools
import logging
from unittest import mock

import session


@contextlib.contextmanager
def strict(**limits):
    """Move tensors of any size, with NaN in buffers that were not waited for; yield the tiers."""
    from megatron_burst.plugins.longseq.host import mover
    from megatron_burst.plugins.longseq.offload import tier

    made = []
    host = functools.partial(tier.HostMemory, strict=True, **limits)

    class Watched(tier.Tier):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    with (
        mock.patch.object(tier, "MIN_BYTES", 1),
        mock.patch.object(mover, "BYTES", 1 << 12),
        mock.patch.object(tier, "Tier", Watched),
        mock.patch.object(tier, "HostMemory", host),
    ):
        yield made


def train(flags, limits):
    """Return the history of a run, its log lines, and numbers of each tier.

    The numbers are (fraction, bytes moved out, bytes fetched back, peak bytes, bytes left at the
    end).
    """
    logger = logging.getLogger("megatron_burst")
    with strict(**limits) as made, session.log_lines() as told:
        level = logger.level
        logger.setLevel(logging.INFO)
        try:
            history = session.train(flags)
        finally:
            logger.setLevel(level)
    gc.collect()
    hosts = [tier.host for tier in made]
    counted = [
        (tier.fraction, host.bytes_out, host.bytes_back, host.peak, host.used)
        for tier, host in zip(made, hosts, strict=True)
    ]
    return history, told, counted


class Broken(Exception):
    """Error of a layer that fails."""


def train_with_a_failure(flags):
    """Return the results of `train` with an exception in the last layer of the second step.

    The step runs again. Also return the bytes that the interrupted step left on the host.
    """
    import pretrain_gpt
    from megatron.core.transformer.transformer_layer import TransformerLayer

    left, schedule = [], pretrain_gpt.get_forward_backward_func
    with strict() as made:

        def failing():
            run, steps = schedule(), itertools.count(1)

            def step(**named):
                if next(steps) == 2:
                    twice = [itertools.tee(one) for one in named["data_iterator"]]
                    fails_once(run, named | {"data_iterator": [one for one, _ in twice]})
                    named["data_iterator"] = [one for _, one in twice]
                    for chunk in named["model"]:
                        chunk.zero_grad_buffer()
                    gc.collect()
                    left.append(made[0].host.used)
                return run(**named)

            return step

        def fails_once(run, named):
            calls, stock = itertools.count(1), TransformerLayer._forward_mlp

            def broken(*args, **kwargs):
                if next(calls) == 2:
                    raise Broken
                return stock(*args, **kwargs)

            with (
                mock.patch.object(TransformerLayer, "_forward_mlp", broken),
                contextlib.suppress(Broken),
            ):
                run(**named)

        with mock.patch.object(pretrain_gpt, "get_forward_backward_func", failing):
            history = session.train(flags)
    return history, left, made[0].host.bytes_out


def error(flags):
    """Same as `session.error`, with tensors of any size."""
    with strict():
        return session.error(flags)
