"""Public docstrings are complete: each names every parameter, and the errors that are raised."""

import ast
import enum
import importlib.util
import inspect
import re
import textwrap

import pytest

import megatron_burst as mb

MODULES = ("megatron_burst", "megatron_burst.layout", "megatron_burst.masks")
ABSTRACT = {"NotImplementedError", "AttributeError"}  # no errors of a user's


def members(found, name):
    """(name, object) of a public object and, of a class, of what it defines in public."""
    yield name, found
    if inspect.isclass(found):
        for key, value in vars(found).items():
            function = inspect.unwrap(getattr(value, "__func__", getattr(value, "fget", value)))
            if not key.startswith("_") and inspect.isfunction(function):
                yield f"{name}.{key}", function


def public(module):
    """(name, object) of all that a module names in __all__, or defines where it has none."""
    names = getattr(module, "__all__", None)
    own = [n for n, o in vars(module).items() if getattr(o, "__module__", "") == module.__name__]
    for name in names or [name for name in own if not name.startswith("_")]:
        found = getattr(module, name)
        if inspect.isclass(found) or inspect.isfunction(found):
            yield from members(found, f"{module.__name__}.{name}")
        elif inspect.ismodule(found) and module.__name__ == "megatron_burst.megatron":
            yield from public(found)


def everything():
    modules = [importlib.import_module(name) for name in MODULES]
    if importlib.util.find_spec("megatron") is not None:
        modules.append(mb.megatron)
    return {name: found for module in modules for name, found in public(module)}


EVERYTHING = everything()


def text_of(name):
    """The docstring of an object; a method that has none is told by that of its base."""
    found = EVERYTHING[name]
    if inspect.isclass(found):
        return inspect.cleandoc(found.__doc__ or "")
    owner, _, key = name.rpartition(".")
    bases = inspect.getmro(EVERYTHING[owner]) if owner in EVERYTHING else []
    told = [vars(base)[key] for base in bases if key in vars(base)]
    texts = [inspect.getdoc(one) for one in told if callable(one) or isinstance(one, property)]
    return next(filter(None, [inspect.getdoc(found), *texts]), "")


def parameters(found):
    if inspect.isclass(found) and issubclass(found, enum.Enum):
        return []
    if inspect.isclass(found) and found.__init__ is object.__init__ and found.__new__ is object:
        return []
    named = inspect.signature(found).parameters.values()
    return [p.name for p in named if p.name not in ("self", "cls") and not p.name.startswith("_")]


def definitions(module):
    """Name -> the tree of each function of a module, its methods among them."""
    tree = ast.parse(inspect.getsource(module))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name: node for node in ast.walk(tree) if isinstance(node, kinds)}


def errors(tree, known, seen):
    """Names of the errors that a function raises itself or by functions of its module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield getattr(node.exc.func, "id", "")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            helper = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            if helper.startswith("_") and helper in known and helper not in seen:
                seen.add(helper)
                yield from errors(known[helper], known, seen)


def raised(found):
    """Of a class: what making it raises, as far as it does not inherit that."""
    functions = [found]
    if inspect.isclass(found):
        made = [vars(found).get(key) for key in ("__init__", "__post_init__")]
        functions = [function for function in made if inspect.isfunction(function)]
    names = set()
    for function in map(inspect.unwrap, functions):
        if function.__module__.startswith("megatron_burst") and function.__name__ != "<lambda>":
            with_source = inspect.getsourcefile(function) == inspect.getmodule(function).__file__
            if with_source:  # and not what dataclasses write
                tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
                known = definitions(inspect.getmodule(function))
                names |= set(errors(tree, known, set()))
    return {name for name in names if name.endswith("Error")} - ABSTRACT


def missing(text, names):
    return [name for name in names if not re.search(rf"\b{re.escape(name)}\b", text)]


@pytest.mark.parametrize("name", EVERYTHING)
def test_the_docstring_is_complete(name):
    found, text = EVERYTHING[name], text_of(name)
    assert text, f"{name} has no docstring"
    assert not text.startswith(f"{found.__name__}("), (
        f"{name} has only the docstring of a dataclass"
    )
    assert not missing(text, parameters(found)), "parameters that the docstring does not name"
    assert not missing(text, sorted(raised(found))), "errors that the docstring does not name"


def test_what_is_missing_is_found():
    assert missing("q [s, b]: rows.", ["q", "k", "plan"]) == ["k", "plan"]
    assert "ValueError" in raised(mb.attention)
    assert "ValueError" in raised(mb.unshard)
    assert "ValueError" in raised(mb.Rates)
    assert not raised(mb.masks.Full)
    assert parameters(mb.layout.Contiguous) == ["cp_size"]
    assert len(EVERYTHING) > 80
