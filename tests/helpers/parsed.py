"""Problems of parsed arguments, as Megatron-LM's launcher reports them."""

from megatron_burst.megatron import run_options
from megatron_burst.megatron.checks import command_line


def problems_of(args, argv=()):
    """Complete parsed arguments, and return the list of their problems."""
    settings, burst, errors = run_options.complete_arguments(args)
    return list(command_line.problems(settings, burst, list(argv), errors))
