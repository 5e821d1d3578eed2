"""Kernels of flash-linear-attention in Triton's interpreter, if the package is installed."""

import importlib.util

import interpreted
import pytest


@pytest.fixture(scope="module")
def found():
    for package, name in {"fla": "flash-linear-attention", "triton": "triton"}.items():
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{name} is not installed")
    return interpreted.run("fla_interpreted.py", 500)


def test_all_forms_are_the_recurrence_in_half_precision(found):
    """Outputs, maps and gradients are equal to a thousandth of the largest number."""
    assert len(found["errors"]) == 6
    for form, errors in found["errors"].items():
        assert max(errors) < 1e-3, (form, errors)


def test_heads_are_shared_where_the_release_can(found):
    assert found["shared"] == ["gated_delta_rule", "kda"]
