"""Signatures of functions, as the records of releases hold them: names, "=" after a default."""

import inspect

import torch

from megatron_burst.kernels import flash


def parameter(text):
    """A name, with "=" where it has a default."""
    name = text.rstrip("=")
    default = name != text or inspect.Parameter.empty
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)


def signature(text):
    return inspect.Signature([parameter(one) for one in text.split(", ")])


def function(text):
    """Return a callable with this signature, which must not be called."""

    def shown():
        raise AssertionError("nobody calls a recorded signature")

    shown.__signature__ = signature(text)
    return shown


class OnCpu(flash.Flash):
    """A package on the CPU: our arguments and shapes, arithmetic by hand."""

    device = "cpu"
    dtypes = (torch.float64,)
    multiple = 1

    def unfit(self, device, widths):
        return None
