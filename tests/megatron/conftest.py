"""Ranks with Megatron, shared by the tests of this folder."""

from megatron_fixtures import *  # noqa: F403
