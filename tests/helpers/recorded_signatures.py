"""Signatures of functions, as the records of releases hold them: names, "=" after a default."""

import inspect


def parameter(text):
    """A name, with "=" where it has a default."""
    name = text.rstrip("=")
    default = name != text or inspect.Parameter.empty
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)


def signature(text):
    return inspect.Signature([parameter(one) for one in text.split(", ")])
