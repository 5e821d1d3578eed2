"""Classes of Megatron are found in their present packages, also after these have moved."""

import pytest
from ranks import Ranks

from megatron_burst.megatron import homes

# The real modules under another name, and packages that are gone.
PROBE = """
import inspect, sys
import megatron_burst.megatron as burst
from megatron_burst.megatron import homes, patching

new = patching.core_version() >= (0, 19)
burst.install("zigzag")  # so that all that Megatron itself imports is there
names = ["dsa", *["absorbed_mla", "gated_delta_net", "mamba_mixer"] * new]
there = {name: homes.module(name) for name in names}
burst.uninstall()
if MOVED:
    for name in [name for name in sys.modules if name.startswith("megatron_burst")]:
        del sys.modules[name]
    # As with Megatron-LM pull request 7239 (September 2026).
    for package in homes.PACKAGES:
        sys.modules[package] = None
    sys.modules.update({homes.MOVED[name]: one for name, one in there.items()})
    import megatron_burst.megatron as burst
    from megatron_burst.megatron import homes
classes = [] if not new else [
    there["absorbed_mla"].AbsorbedMLASelfAttention,
    there["gated_delta_net"].GatedDeltaNet, there["mamba_mixer"].MambaMixer,
]
def state():
    return [(inspect.getattr_static(one, "__init__"), one.forward) for one in classes]
stock = state()
burst.install("zigzag")
assert all(now != then for now, then in zip(state(), stock)), "not found"
assert homes.module("dsa") is there["dsa"]
from megatron_burst.megatron.attention.hooks import is_sparse
assert is_sparse(there["dsa"].DSAttention) and not is_sparse(dict)
burst.uninstall()
assert state() == stock
print("found", len(classes))
"""


@pytest.mark.slow
@pytest.mark.parametrize("moved", [False, True])
def test_classes_are_found_in_both_homes(moved, tmp_path):
    server = Ranks(tmp_path, [])
    script = tmp_path / "probe.py"
    warn = "import warnings\nwarnings.simplefilter('error', RuntimeWarning)\n"
    script.write_text(f"{warn}MOVED = {moved}\n{PROBE}")
    done = server.run(1, [], script=script)
    server.close()
    assert done.codes == [0], done.texts[0]
    assert "found" in done.texts[0]


def test_a_module_that_no_home_has():
    assert homes.find("no_such_module") is None
    with pytest.raises(RuntimeError, match=r"Megatron-Core \S+ has no module no_such_module: "):
        homes.module("no_such_module")


def test_what_a_module_fails_to_import_is_told(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "broken.py").write_text("import a_library_that_is_not_there")
    monkeypatch.setattr(homes, "PACKAGES", ("pack",))
    with pytest.raises(ModuleNotFoundError, match="a_library_that_is_not_there"):
        homes.find("broken")
