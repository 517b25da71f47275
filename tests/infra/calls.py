"""AWS calls of a piece of code, from its source: every `Call` that a module can reach.

The result is rather too large than too small: a name reaches everything that it may refer to.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.util import resolve_name
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]

# Whose method `….table.put()` is: code calls the adapters by these names.
ADAPTERS = {
    "aws": "Aws",
    "bucket": "Bucket",
    "control": "Queue",
    "events": "EventBus",
    "intake": "Queue",
    "ledger": "Ledger",
    "overview": "Overview",
    "files": "FileStore",
    "fleet_plans": "FleetPlans",
    "fleets": "FleetStore",
    "processes": "ProcessStore",
    "queue": "Queue",
    "intake_progress": "IntakeProgressStore",
    "service": "WorkerService",
    "stream": "ObjectStream",
    "table": "Table",
    "uploads": "UploadStore",
    "tenants": "TenantStore",
    "usage": "UsageStore",
}
_ADAPTER_CLASSES = {*ADAPTERS.values(), "Store", "ShardStore", "KeyStore"}
# Dictionaries, streams and lists have these too: an adapter's is reached by the names above only.
_COMMON_METHODS = {
    "count",
    "delete",
    "get",
    "open",
    "put",
    "query",
    "read",
    "run",
    "send",
    "update",
}
# All others may register a function somewhere, such as a route.
_PLAIN_DECORATORS = {"cache", "classmethod", "contextmanager", "dataclass", "property"}
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Code = _Function | ast.ClassDef


class Needed(NamedTuple):
    """AWS calls of a piece of code: pairs of service and client method, and its strings."""

    calls: frozenset[tuple[str, str]]
    texts: frozenset[str]


class Place(NamedTuple):
    """A function, class or method (`Class.method`) of a module; "" is what runs at import."""

    module: str
    name: str


@dataclass
class Module:
    """A module's definitions by name, what its imported names are, and what it registers."""

    body: list[ast.stmt]
    definitions: dict[str, _Code] = field(default_factory=dict)
    imports: dict[str, Place] = field(default_factory=dict)
    registered: list[str] = field(default_factory=list)


def needed_by(entry: str) -> Needed:
    """Return what importing a module and calling its functions may ask of AWS."""
    calls, texts = set(), set()
    for node in _reachable(entry):
        match node:
            case ast.Call(
                func=ast.Name(id="Call"),
                args=[ast.Constant(value=str(service)), ast.Constant(value=str(method)), *_],
            ):
                calls.add((service, method))
            case ast.Constant(value=str(text)):
                texts.add(text)
    return Needed(frozenset(calls), frozenset(texts))


def _reachable(entry: str) -> Iterator[ast.AST]:
    modules = sorted(_import_closure(entry))
    todo = [Place(name, "") for name in modules]
    todo += [Place(name, function) for name in modules for function in _module(name).registered]
    todo += [Place(entry, function) for function in _module(entry).definitions]
    seen: set[Place] = set()
    while todo:
        place = todo.pop()
        if place not in seen:
            seen.add(place)
            for node in _nodes(place):
                yield node
                todo += _meant_by(node, place, modules)


@cache
def _found(name: str) -> Module | None:
    """Return one of the handler's modules, or None for any other."""
    path = ROOT / name.replace(".", "/")
    is_package = path.is_dir()
    path = path / "__init__.py" if is_package else path.with_suffix(".py")
    if not f"{name}.".startswith("tidemill.handler.") or not path.exists():
        return None
    package = name if is_package else name.rpartition(".")[0]
    found = Module(ast.parse(path.read_text(encoding="utf-8")).body)
    for node in found.body:
        match node:
            case ast.FunctionDef(name=function) | ast.AsyncFunctionDef(name=function):
                found.definitions[function] = node
                if any(_name_of(each) not in _PLAIN_DECORATORS for each in node.decorator_list):
                    found.registered.append(function)
            case ast.ClassDef(name=owner):
                found.definitions[owner] = node
                methods = (inner for inner in node.body if isinstance(inner, _Function))
                found.definitions |= {f"{owner}.{method.name}": method for method in methods}
            case ast.ImportFrom(module=written, level=level):
                origin = resolve_name("." * level + (written or ""), package)
                names = {alias.asname or alias.name: alias.name for alias in node.names}
                found.imports |= {here: Place(origin, there) for here, there in names.items()}
    return found


def _module(name: str) -> Module:
    found = _found(name)
    assert found is not None, name
    return found


def _import_closure(entry: str) -> set[str]:
    found: set[str] = set()
    todo = [entry]
    while todo:
        name = todo.pop()
        if name not in found and _found(name) is not None:
            found.add(name)
            for place in _module(name).imports.values():
                todo += [place.module, f"{place.module}.{place.name}"]
    return found


def _nodes(place: Place) -> Iterator[ast.AST]:
    """Return the nodes of a place, less what functions and classes hold that have their own."""
    module = _module(place.module)
    node = module.definitions[place.name] if place.name else None
    if isinstance(node, _Function):
        yield from ast.walk(node)
        return
    for statement in module.body if node is None else [*node.bases, *node.body]:
        if not isinstance(statement, _Code):
            yield from ast.walk(statement)


def _meant_by(node: ast.AST, place: Place, modules: list[str]) -> Iterator[Place]:
    """Return the functions and classes that a name or an attribute may stand for."""
    match node:
        case ast.Name(id=name):
            yield from _named(place.module, name)
        case ast.Attribute(value=ast.Name(id="self"), attr=attr):
            yield from _method(place.module, place.name.partition(".")[0], attr)
        case ast.Attribute(value=value, attr=attr):
            holder = _name_of(value).lstrip("_")
            origin = _module(place.module).imports.get(holder)
            if origin is not None and _found(".".join(origin)) is not None:
                yield from _named(".".join(origin), attr)
                return
            owner = ADAPTERS.get(holder, holder)
            homes = [name for name in modules if owner in _module(name).definitions]
            for home in homes:
                yield from _method(home, owner, attr)
            if not homes:
                yield from _any_method(attr, modules)


def _name_of(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Call(func=function):
            return _name_of(function)
    return ""


def _named(where: str, name: str) -> Iterator[Place]:
    module = _found(where)
    if module is None:
        return
    if name in module.imports:
        yield from _named(*module.imports[name])
    elif name in module.definitions:
        yield Place(where, name)
        special = f"{name}.__"
        yield from (
            Place(where, known) for known in module.definitions if known.startswith(special)
        )


def _method(where: str, owner: str, name: str) -> Iterator[Place]:
    """Return the method of a class, its own or an inherited one."""
    module = _module(where)
    if f"{owner}.{name}" in module.definitions:
        yield Place(where, f"{owner}.{name}")
        return
    node = module.definitions.get(owner)
    for base in node.bases if isinstance(node, ast.ClassDef) else ():
        origin = module.imports.get(_name_of(base), Place(where, _name_of(base)))
        if _found(origin.module) is not None:
            yield from _method(*origin, name)


def _any_method(name: str, modules: list[str]) -> Iterator[Place]:
    for home in modules:
        for known in _module(home).definitions:
            owner, _, method = known.partition(".")
            is_common = name in _COMMON_METHODS and owner in _ADAPTER_CLASSES
            if method == name and not is_common:
                yield Place(home, known)
