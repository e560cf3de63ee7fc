"""From what a person types after --router to a rule: `elbow`, `top_p:p=0.6,cap=16`, `./my_rule.py:MyRule`."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import types
import typing
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from minimoe.errors import InputError, described, shown
from minimoe.routers import ROUTERS, Router


def parse_router(spec: str | Router) -> Router:
    """Build the rule that a SPEC names.

    SPEC is `name`, `name:key=value,key=value`, `path.py:Class` or `package.module:Class`, each of the
    latter with `:key=value,...` after it if the class takes arguments. `-` and `_` are alike in names and
    keys. An object that has a route method already passes through.

    Raises:
        InputError: an unknown name or key (the valid ones are listed), a value of the wrong kind, a file or
            class that is not there or cannot be imported, or one that is not a rule.
    """
    if not isinstance(spec, str):
        if callable(getattr(spec, "route", None)) and not isinstance(spec, type):
            return spec
        raise InputError(f"a router is a text such as 'elbow' or an object with a route method, not {shown(spec)}.")
    return _build(*find_rule(spec))


def find_rule(spec: str) -> tuple[str, Callable[..., Router], str]:
    """What the rule of a SPEC is called, what makes it, and the keys that follow; errors are those of parse_router."""
    name, class_name, keys = _split(spec)
    if name in ROUTERS:
        return name, ROUTERS[name], keys
    if "/" in name and not name.endswith(".py"):
        raise InputError(f"{name!r} is not a file of Python code; write {name}.py:Class if that is its name.")
    if name.endswith(".py") or "." in name or (class_name.isidentifier() and _module_spec(name)):
        return f"{name}:{class_name}", _user_class(name, class_name), keys
    raise InputError(f"unknown router {name!r}; choose one of {', '.join(ROUTERS)}, or name your own as path.py:Class.")


def with_key(spec: str, key: str, value: float) -> str:
    """A SPEC with one more key, its value in six digits."""
    name, class_name, keys = _split(spec)
    known = [part.strip() for part in keys.split(",") if part.strip()]
    return ":".join([*filter(None, (name, class_name)), ",".join([*known, f"{key}={value:.6g}"])])


def files_of(spec: str) -> list[Path]:
    """The files that a SPEC names: the user's own rule, also as a module, a calibration, a recording."""
    name, class_name, keys = _split(spec)
    named = [value.strip() for _, _, value in (part.partition("=") for part in keys.split(","))]
    if name not in ROUTERS:
        own = name if name.endswith(".py") or not class_name else getattr(_module_spec(name), "origin", None)
        named.append(own or "")
    return [Path(file) for file in named if os.path.isfile(file)]


def hashes_of(spec: str) -> list[str]:
    """A hash of each file that a SPEC names: what else than the SPEC its rule hangs on."""
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files_of(spec)]


def _split(spec: str) -> tuple[str, str, str]:
    """The parts of a SPEC: a rule's name or the place of a class, that class or nothing, and the keys."""
    name, _, rest = spec.strip().partition(":")
    registered = name.replace("-", "_")
    if registered in ROUTERS:
        return registered, "", rest
    class_name, _, keys = rest.partition(":")
    return name, class_name, keys


def _module_spec(name: str) -> ModuleSpec | None:
    """Where Python would find a module; of one in a package, the package is imported for it."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # whatever the package prints then
            return importlib.util.find_spec(name)
    except KeyboardInterrupt:
        raise
    except BaseException:  # whatever the user's own code raises: importing the rule tells it
        return None


def parameters(rule: Callable[..., Router]) -> dict[str, inspect.Parameter]:
    """The keys that a rule takes, by name, with their types resolved and their defaults."""
    signature = inspect.signature(rule)
    hints: dict[str, Any] = {}
    for source in (getattr(rule, "__init__", None), rule):  # a dataclass has its hints on the class
        try:
            hints |= typing.get_type_hints(source)
        except (NameError, TypeError, AttributeError):
            continue  # hints that cannot be resolved leave their values as text
    keyed = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {
        name: parameter.replace(annotation=hints.get(name, str))
        for name, parameter in signature.parameters.items()
        if parameter.kind in keyed
    }


def _build(name: str, rule: Callable[..., Router], text: str) -> Router:
    known = parameters(rule)
    arguments: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = item.partition("=")
        key = key.strip().replace("-", "_")
        if not equals:
            raise InputError(f"router {name}: write key=value, not {shown(item)}.")
        if key not in known:
            raise InputError(f"router {name} has no key {shown(key)}; its keys are {', '.join(known) or '(none)'}.")
        if key in arguments:
            raise InputError(f"router {name}: {key} is given twice.")
        arguments[key] = _convert(f"router {name}: {key}", value.strip(), known[key].annotation)
    missing = [key for key, p in known.items() if p.default is inspect.Parameter.empty and key not in arguments]
    if missing:
        raise InputError(f"router {name} needs a value for {', '.join(missing)}, as in {name}:{missing[0]}=VALUE.")
    try:
        router = rule(**arguments)
        is_rule = callable(getattr(router, "route", None))
    except InputError as error:
        raise InputError(f"router {name}: {error}") from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever the user's own code raises is the user's to read
        raise InputError(f"router {name} could not be built: {described(error)}.") from error
    if not is_rule:
        raise InputError(f"router {name} is not a rule: it has no route method.")
    return router


def _convert(what: str, text: str, kind: Any) -> Any:
    """Text to the type that the rule's signature declares."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        options = [option for option in typing.get_args(kind) if option is not types.NoneType]
        if text.lower() == "none" and len(options) < len(typing.get_args(kind)):
            return None
        for option in options[:-1]:
            with contextlib.suppress(InputError):
                return _convert(what, text, option)
        kind = options[-1]
    if typing.get_origin(kind) is typing.Literal:
        choices = {str(choice): choice for choice in typing.get_args(kind)}
        if text not in choices:
            raise InputError(f"{what} must be one of {', '.join(choices)}, not {shown(text)}.")
        return choices[text]
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise InputError(f"{what} must be true or false, not {shown(text)}.")
        return text.lower() == "true"
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            noun = "a whole number" if kind is int else "a number"
            raise InputError(f"{what} must be {noun}, not {shown(text)}.") from None
    return text


def _user_class(place: str, class_name: str) -> Callable[..., Router]:
    if not class_name:
        raise InputError(f"say which class of {place} is the router, as in {place}:MyRule.")
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        classes = [
            name
            for name, value in vars(module).items()
            if isinstance(value, type) and value.__module__ == module.__name__
        ]
        raise InputError(f"{place} has no class {class_name!r}; it has {', '.join(classes) or 'no class'}.")
    if inspect.isabstract(found):
        lacking = ", ".join(sorted(getattr(found, "__abstractmethods__", ())))
        raise InputError(f"{place}:{class_name} is unfinished: it lacks {lacking}.")
    return found


def _load_file(path: Path) -> types.ModuleType:
    if not path.is_file():
        raise InputError(f"there is no file {path}, which the router names.")
    name = f"_minimoe_user_rule:{path.resolve()}"  # two files may have the same stem
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)

    def execute() -> types.ModuleType:
        sys.modules[name] = module  # where dataclasses look their module up while the class body runs
        assert spec is not None
        assert spec.loader is not None
        spec.loader.exec_module(module)
        return module

    return _import(str(path), execute)


def _load_module(name: str) -> types.ModuleType:
    return _import(name, lambda: importlib.import_module(name))


def _import(place: str, action: Callable[[], types.ModuleType]) -> types.ModuleType:
    try:
        return action()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever the user's own code raises is the user's to read
        raise InputError(f"{place} could not be imported: {described(error)}.") from error
