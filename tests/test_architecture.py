"""Who may import whom, and what no module may do: the design's arrows, read from the source."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_burst

ROOT = Path(megatron_burst.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
IDS = [str(path.relative_to(ROOT)) for path in FILES]

# component -> components of the package that it may import; nothing else. `kernels` is one
# component, so is `megatron`. A new file has to be entered here: that is the point.
PLANNING = {"layout", "masks", "hops", "schedule", "bands", "tiles", "topology", "cost", "store"}
PLANNING |= {"area", "shares", "rates", "forecast", "options", "choose"}
DOOR = PLANNING | {"config", "agreement", "groups", "kernels", "merge", "walk", "ring"}
DOOR |= {"head_parallel", "checkpoint"}
ARROWS = {
    "layout": set(),
    "masks": {"masks", "layout"},
    "hops": set(),
    "schedule": {"hops", "masks", "layout"},
    "bands": {"masks"},
    "tiles": {"bands", "masks", "layout"},
    "topology": set(),
    "cost": {"schedule", "hops", "tiles", "topology", "masks", "layout"},
    "area": {"masks", "layout"},
    "shares": {"topology"},
    "rates": set(),
    "forecast": {"cost", "schedule", "hops", "rates", "shares"},
    "options": {
        "area",
        "cost",
        "forecast",
        "hops",
        "layout",
        "masks",
        "rates",
        "schedule",
        "shares",
        "topology",
    },
    "choose": {"options", "cost", "layout", "masks", "rates", "topology"},
    "config": {"layout", "hops", "topology"},
    "flags": {"config", "layout", "hops", "topology"},
    "csrc": set(),
    "merge": {"csrc"},
    "parcels": set(),
    "comm": {"parcels"},
    "agreement": set(),
    "sharding": {"layout"},
    "introduction": set(),
    "once": set(),
    "calls": {"parcels"},
    "groups": {"comm", "topology", "introduction", "rates", "agreement", "calls"},
    "kernels": {"kernels", "layout", "masks", "tiles", "merge", "csrc"},
    "walk": {"hops", "comm", "parcels", "merge"},
    "ring": {"hops", "comm", "walk", "merge", "kernels"},
    "head_parallel": {"comm", "parcels", "shares"},
    "store": {"cost", "masks", "layout"},
    "checkpoint": {"layout"},
    "recompute": PLANNING | {"kernels", "walk"},
    "arguments": DOOR,
    "probe": {"agreement", "comm", "groups", "kernels", "layout", "masks", "merge", "rates"},
    "plan": DOOR | {"arguments", "recompute", "csrc", "parcels"},
    "prepare": DOOR | {"arguments", "recompute", "probe", "plan", "calls"},
    "attention": DOOR | {"arguments", "plan", "prepare", "recompute", "parcels", "once"},
    "linear_cross_entropy": {"linear_cross_entropy", "agreement", "merge", "csrc", "once"},
    "show": PLANNING | {"show"},
    "trace": DOOR
    | {"trace", "comm", "plan", "prepare", "attention", "show"},  # of show: its colours
    "seam": set(),
    "patch": {"seam"},
    "doctor": DOOR
    | {"doctor", "csrc", "comm", "attention", "flags", "megatron", "patch", "__init__"},
    "cli": set(),  # names its commands' modules in a table and imports the one that is called
    "plainly": set(),
    "pretrain": {"plainly"},  # imports megatron when it runs, after the script's own is in the path
    "recipe": {"plainly"},  # likewise
    "recipes": {"recipes", "megatron", "config", "flags"},
    "__main__": {"cli"},
    "__init__": {
        "layout",
        "masks",
        "attention",
        "checkpoint",
        "choose",
        "plan",
        "prepare",
        "probe",
        "rates",
        "groups",
        "config",
        "sharding",
        "linear_cross_entropy",
    },
}
NO_TORCH = PLANNING | {
    "config",
    "flags",
    "seam",
    "patch",
    "cli",
    "pretrain",
    "recipe",
    "plainly",
    "__main__",
}
# What besides the standard library: everything else may import torch and numpy.
OUTSIDE = {
    "checkpoint": {"torch"},
    "comm": {"torch"},
    "parcels": {"torch"},
    "groups": {"torch"},
    "introduction": {"torch"},
    "once": {"torch"},
    "linear_cross_entropy": {"torch", "triton"},
    "merge": {"torch"},
    "csrc": {"torch"},
    "ring": {"torch"},
    "walk": {"torch"},
    "show": {"numpy", "rich", "matplotlib", "PIL"},
    "trace": {"torch", "matplotlib"},
    "doctor": {"torch", "rich"},
    "kernels": {"torch", "numpy", "triton"},
    "recipes": {"torch"},
}


def component(path):
    """The part of the package a file belongs to: its folder, or its own name at the top."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[0]


def imports(path):
    """Absolute dotted names of all that a file imports, wherever in the file it does."""
    package = ["megatron_burst", *path.relative_to(ROOT).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*base, *filter(None, [node.module])])
            # `from . import x` may mean the module x
            bare = base == "megatron_burst" or node.module is None
            yield from (f"{base}.{alias.name}" for alias in node.names) if bare else [base]


def inner(path):
    """Components of the package that a file imports."""
    for name in imports(path):
        first, *rest = name.split(".")
        if first == "megatron_burst":
            yield rest[0] if rest else "__init__"


def outer(path):
    """Top-level packages outside the standard library that a file imports."""
    tops = {name.split(".")[0] for name in imports(path)}
    return tops - set(sys.stdlib_module_names) - {"megatron_burst"}


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_arrows(path):
    name = component(path)
    if name == "megatron":
        return  # may import all of the package
    assert name in ARROWS, f"{name}: say in ARROWS what it may import"
    wrong = set(inner(path)) - ARROWS[name]
    assert not wrong, f"{name} must not import {sorted(wrong)}"


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_what_comes_from_outside(path):
    name = component(path)
    allowed = OUTSIDE.get(name, {"torch", "numpy"})
    if name in NO_TORCH:
        allowed = {"numpy"}
    if name == "megatron":
        allowed = {"torch", "numpy", "megatron"}
    assert outer(path) <= allowed


def test_the_table_names_no_ghosts():
    assert set(ARROWS) | {"megatron"} == {component(path) for path in FILES}


def test_the_arrows_form_no_circle():
    askers = {n for n, to in ARROWS.items() if "megatron" in to}  # `megatron` may import the rest
    for path in FILES:
        assert component(path) != "megatron" or not set(inner(path)) & askers
    done = set()
    while len(done) < len(ARROWS):
        ready = {n for n, to in ARROWS.items() if n not in done and to - {n, "megatron"} <= done}
        assert ready, f"a circle among {sorted(set(ARROWS) - done)}"
        done |= ready


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_no_file_is_too_long_to_read(path):
    assert len(path.read_text().splitlines()) <= 300


# These report it, or read of it which rank torchrun made this process, and decide nothing by it.
READ_THE_ENVIRONMENT = ("doctor/machine.py", "megatron/log.py")


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_no_environment_switches(path):
    if str(path.relative_to(ROOT)) in READ_THE_ENVIRONMENT:
        return
    names = {n.attr for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)}
    names |= set(imports(path))
    assert not names & {"environ", "getenv", "putenv", "os.environ"}


# --- process-wide state --------------------------------------------------------------------

STATE = {"megatron/registry.py": "_installed", "checkpoint.py": "_current"}
# What is found out once per process: a library, once loaded, stays.
CACHED = {"csrc.py": ["load"]}
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


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_no_module_level_state(path):
    """Tables are in capitals and never changed; the registry and the frame are the exceptions."""
    if str(path.relative_to(ROOT)) in STATE:
        return
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Global), "global"
        decorators = [ast.unparse(d) for d in getattr(node, "decorator_list", [])]
        if getattr(node, "name", None) not in CACHED.get(str(path.relative_to(ROOT)), []):
            caches = [d for d in decorators if d.split("(")[0].endswith("cache")]
            assert not caches, "a hidden cache"
    for name in module_tables(tree):
        if name != "__all__":
            assert name.isupper(), f"{name}: state at module level"
            assert not changes(tree, name), f"{name} is changed"


@pytest.mark.parametrize(("path", "state"), STATE.items())
def test_the_registry_and_the_frame_are_the_only_state(path, state):
    names = module_tables(ast.parse((ROOT / path).read_text()))
    assert [name for name in names if not name.isupper()] == [state]


# --- what importing does -------------------------------------------------------------------

PROBE = """
import sys
before = set(sys.modules)
import megatron_burst
tops = {name.split(".")[0] for name in set(sys.modules) - before}
print(sorted(tops & {"megatron", "triton", "transformer_engine", "flash_attn", "apex"}))
import torch
print(torch.distributed.is_initialized(), torch.get_default_dtype())
"""


def test_importing_the_package_imports_neither_megatron_nor_triton():
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        cwd=ROOT.parent,
    )
    assert done.stdout.split("\n")[:2] == ["[]", "False torch.float32"]


def test_only_the_megatron_folder_imports_megatron():
    importers = {component(path) for path in FILES if "megatron" in outer(path)}
    assert importers == {"megatron"}
