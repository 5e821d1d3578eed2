"""Who may import whom, and what no module may do: the design's arrows, read from the source."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_burst
from megatron_burst import registry

ROOT = Path(megatron_burst.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# The rooms of the spine, from the ground up: a file imports from its own room and from those
# named before it. The operation and the package itself come after the rooms that they join.
ROOMS = (
    "registry", "units", "layout", "masks", "schedule", "options", "option_table",
    "spine_options", "config", "flags", "comm", "kernels", "linear_attention",
    "linear_cross_entropy", "execution", "recompute", "autotune", "packing", "planning",
    "attention", "seam", "__init__", "megatron", "recipes", "cli", "__main__",
)  # fmt: skip
PURE = ("seam", "registry")  # import nothing of the package
PLUGINS = sorted(path.parent.name for path in ROOT.glob("plugins/*/entry.py"))
NO_TORCH = {
    "units", "flags", "config", "option_table", "spine_options", "options", "layout", "masks",
    "schedule", "autotune", "packing", "seam", "__main__", "registry", "plugins",
}  # fmt: skip
TORCH_AFTER_ALL = {"layout/sharding.py", "autotune/measure.py"}
# What else than the standard library, numpy and torch.
OUTSIDE = {
    "attention": {"typing_extensions"},
    "planning": {"typing_extensions"},
    "options": {"torch"},  # for type checkers only, which a subprocess test below confirms
    "linear_cross_entropy": {"triton"},
    "autotune": {"tomli"},  # Python 3.10 has no tomllib
    "cli": {"rich"},
    "kernels": {"triton", "cutlass", "flash_attn"},
    "megatron": {"megatron"},
    "plugins/diffusion": {"megatron"},
    "plugins/longseq": {"megatron"},
    "plugins/rl": {"megatron"},
    "plugins/sparse": {"megatron", "triton"},
    "plugins/testing": {"megatron"},
    "plugins/tools": {"rich", "matplotlib", "PIL"},
}


def relative(path):
    return str(path.relative_to(ROOT))


def room(path):
    """The part of the package a file belongs to: its folder, or its own name at the top; for a file
    of a plugin, `plugins/NAME`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return "/".join(parts[:2]) if parts[0] == "plugins" and parts[1] != "__init__" else parts[0]


def plugin(path):
    """The plugin that a file belongs to; None for a file of the spine."""
    return room(path).partition("/")[2] or None


SPINE = [path for path in FILES if room(path) != "plugins" and plugin(path) is None]


def module(path):
    """The dotted name of a file."""
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module(path): path for path in FILES}


@functools.cache
def parsed(path):
    return ast.parse(path.read_text())


@functools.cache
def imports(path):
    """Absolute dotted names of all that a file imports, wherever in the file it does, also by name
    with importlib: any string that is the name of a module of the package."""
    return frozenset(_imports(path))


def _imports(path):
    package = module(path).split(".")
    package = package if path.name == "__init__.py" else package[:-1]
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*base, *filter(None, [node.module])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield full if full in MODULES else base
        elif isinstance(node, ast.Constant) and node.value in MODULES:
            yield node.value


def inner(path):
    """Modules of the package that a file imports."""
    return {name for name in imports(path) if name in MODULES} - {module(path)}


def outer(path):
    """Top-level packages outside the standard library that a file imports."""
    tops = {name.split(".")[0] for name in imports(path)}
    return tops - set(sys.stdlib_module_names) - {"megatron_burst"}


def test_imports_run_downwards():
    """And none goes to a plugin."""
    for path in SPINE:
        own = ROOMS.index(room(path))
        plugins = [name for name in inner(path) if room(MODULES[name]).startswith("plugins")]
        assert not plugins, relative(path)
        upwards = {name for name in inner(path) if ROOMS.index(room(MODULES[name])) > own}
        assert not upwards, f"{relative(path)} imports upwards: {sorted(upwards)}"
        assert room(path) not in PURE or not inner(path), relative(path)


# The rooms within megatron/, and its files beside them, in the same order.
IN_MEGATRON = (
    "run_state", "patching", "homes", "step_metrics", "users_mask", "model_shape", "selection",
    "checks", "data", "attention", "linear", "lm_head", "packing", "layout_bytes", "run_options",
    "configuration", "training", "install", "specs", "entrance", "__init__",
)  # fmt: skip


def inner_room(path):
    """The part of megatron/ a file belongs to; None for a file of another room."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[1] if parts[0] == "megatron" else None


def test_imports_within_megatron_run_downwards():
    for path in filter(inner_room, FILES):
        own = IN_MEGATRON.index(inner_room(path))
        known = {name: inner_room(MODULES[name]) for name in inner(path)}
        upwards = {n for n, home in known.items() if home and IN_MEGATRON.index(home) > own}
        assert not upwards, f"{relative(path)} imports upwards: {sorted(upwards)}"


def test_modules_form_no_circle():
    """Nor within a room: every module can be read after those that it imports."""
    left = {name: inner(path) for name, path in MODULES.items()}
    while left:
        ready = {name for name, needs in left.items() if not needs & set(left)}
        assert ready, f"a circle among {sorted(left)}"
        left = {name: needs for name, needs in left.items() if name not in ready}


def test_the_rooms_are_those_of_the_package():
    assert set(ROOMS) == {room(path) for path in SPINE}
    there = [path for path in ROOT.iterdir() if path.name != "__pycache__"]
    assert len(there) <= 29


@pytest.mark.parametrize("name", PLUGINS)
def test_a_plugin_imports_no_other_plugin(name):
    """Its entry imports nothing but the registry, so that listing plugins costs nothing."""
    home = f"megatron_burst.plugins.{name}"
    for path in (path for path in FILES if plugin(path) == name):
        others = {other for other in inner(path) if other.startswith("megatron_burst.plugins.")}
        assert {other for other in others if not f"{other}.".startswith(f"{home}.")} == set()
        if path.name == "entry.py":
            assert inner(path) == {"megatron_burst.registry"}
    assert not inner(MODULES[home])


def test_every_plugin_is_in_the_registry():
    folders = {path.name for path in (ROOT / "plugins").iterdir() if path.is_dir()}
    assert set(PLUGINS) == set(registry.plugins()) == folders - {"__pycache__"}
    for name, entry in registry.plugins().items():
        assert all(registry.HOOKS[hook].plugin in ("", name) for hook in entry.hooks)
        for place in (*entry.public.values(), *entry.hooks.values()):
            assert registry.load(name, place) is not None
        for command in entry.commands.values():
            assert registry.load(name, command.module).run


def test_what_comes_from_outside():
    for path in FILES:
        allowed = {"numpy"} | OUTSIDE.get(room(path), set())
        if room(path) not in NO_TORCH or relative(path) in TORCH_AFTER_ALL:
            allowed |= {"torch"}
        assert outer(path) <= allowed, relative(path)


def test_every_file_names_its_licence():
    line = "# SPDX-License-Identifier: Apache-2.0"
    without = [relative(path) for path in FILES if line not in head(path)]
    assert without == [], f"these begin without {line!r}"


def head(path):
    """The first lines: the licence may follow a shebang and an encoding."""
    return path.read_text().splitlines()[:3]


def test_no_file_is_too_long_to_read():
    assert [p for p in FILES if len(p.read_text().splitlines()) > 700] == []


# These report it, take a host's name out of a report, or read of it which rank a launcher made this
# process, or warn of what it contradicts, and decide nothing by it. Relays follow one of CUDA's.
READ_THE_ENVIRONMENT = (
    "comm/relays.py",
    "comm/hosts.py",
    "plugins/tools/gpu_report/document.py",
    "cli/doctor/machine.py",
    "cli/ranks.py",
    "megatron/patching.py",
)


def test_no_environment_switches():
    for path in FILES:
        names = {n.attr for n in ast.walk(parsed(path)) if isinstance(n, ast.Attribute)}
        read = (names | imports(path)) & {"environ", "getenv", "putenv", "os.environ"}
        assert not read or relative(path) in READ_THE_ENVIRONMENT, relative(path)


# --- process-wide state --------------------------------------------------------------------

STATE = {"megatron/patching.py": "_installed", "recompute/checkpoint.py": "_current"}
# What is found out once per process: a library, once loaded, stays; torch can do what it can.
CACHED = {
    "kernels/flex_programs.py": ["program"],  # what Inductor compiled for a shape
    "kernels/native.py": ["load"],
    "kernels/torch_features.py": ["_shares_heads", "adds_wide"],
    "plugins/testing/local.py": ["_threads"],  # of the test utility, and of no result
}
MAKERS = {"dict", "list", "set", "defaultdict", "deque", "Counter", "ContextVar", "local"}
CHANGERS = {"append", "add", "update", "pop", "popitem", "setdefault", "clear", "extend", "insert"}


def module_tables(tree):
    """Names bound at module level to something that can be changed in place."""
    for node in tree.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            value, targets = node.value, getattr(node, "targets", [getattr(node, "target", None)])
            made = isinstance(value, ast.Call) and getattr(value.func, "id", "") in MAKERS
            literal = (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp)
            if made or isinstance(value, literal):
                yield from (target.id for target in targets if isinstance(target, ast.Name))


def changes(tree, name):
    """Does any code change the table `name`?"""
    for node in ast.walk(tree):
        stored = isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)
        called = isinstance(node, ast.Attribute) and node.attr in CHANGERS
        if (stored or called) and getattr(node.value, "id", "") == name:
            return True
    return False


def test_no_module_level_state():
    """Tables are in capitals and never changed; the registry and the frame are the exceptions."""
    for file in {relative(path) for path in FILES} - STATE.keys():
        tree = parsed(ROOT / file)
        for node in ast.walk(tree):
            assert not isinstance(node, ast.Global), f"{file}: global"
            decorators = [ast.unparse(d) for d in getattr(node, "decorator_list", [])]
            if getattr(node, "name", None) not in CACHED.get(file, []):
                caches = [d for d in decorators if d.split("(")[0].endswith("cache")]
                assert not caches, f"{file}: a hidden cache"
        for name in set(module_tables(tree)) - {"__all__"}:
            assert name.isupper(), f"{file}, {name}: state at module level"
            assert not changes(tree, name), f"{file}: {name} is changed"


@pytest.mark.parametrize(("path", "state"), STATE.items())
def test_the_registry_and_the_frame_are_the_only_state(path, state):
    names = module_tables(parsed(ROOT / path))
    assert [name for name in names if not name.isupper()] == [state]


# --- what importing does -------------------------------------------------------------------

PROBE = """
import importlib, sys
import megatron_burst as mb
for name in {modules!r}:
    importlib.import_module(name)
mb.masks.Causal(), mb.layout.make("zigzag", cp_size=2), mb.Rates(1.0, 1.0), mb.choose
print(sorted({{name.split(".")[0] for name in sys.modules}} & {heavy!r}))
for name in set(dir(mb)) - {{"rl", "sparse_layer_spec"}}:  # these import Megatron
    getattr(mb, name)
mb.megatron.install
import megatron_burst.attention, megatron_burst.linear_cross_entropy
import megatron_burst.linear_attention
print(mb.attention.__name__, mb.linear_cross_entropy.__name__, mb.linear_attention.__name__)
print(sorted({{name.split(".")[0] for name in sys.modules}} & {others!r}))
import torch
print(torch.distributed.is_initialized(), torch.get_default_dtype())
"""


def test_rooms_without_torch_are_imported_without_it():
    """And nothing imports Megatron or Triton before it is asked for."""
    modules = [
        name
        for name, path in MODULES.items()
        if room(path) in NO_TORCH - {"__main__"} and relative(path) not in TORCH_AFTER_ALL
    ]
    others = {"triton", "transformer_engine", "flash_attn", "apex", "megatron"}
    probe = PROBE.format(modules=modules, heavy={"torch", *others}, others=others)
    done = subprocess.run(
        [sys.executable, "-c", probe],
        capture_output=True, text=True, timeout=120, check=True, cwd=ROOT.parent,
    )  # fmt: skip
    light, names, heavy, state = done.stdout.splitlines()
    assert len(modules) > 20
    assert light == "[]"
    assert names == "attention linear_cross_entropy linear_attention"
    assert heavy == "[]"
    assert state == "False torch.float32"


def test_only_the_megatron_folder_imports_megatron():
    importers = {room(path) for path in SPINE if "megatron" in outer(path)}
    assert importers == {"megatron"}
