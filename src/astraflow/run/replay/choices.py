"""``--curate X``: algorithms by name, as a recipe would make them.

    Greso                              of astraflow.algorithms, wherever it is there
    Greso(p_easy=0.3)                  with options: Python literals
    my_package.module:Mine(rest=4)     anyone's; an object that is made already, a class or a function

What a class or function asks for by these names is the run's own: tasks, held_out, group_size, seed, recipe, curate,
select (of one that replays, what picks its fresh groups). Options beat them.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import astraflow.algorithms
from astraflow.algorithms.base import Curate, Keep, Select
from astraflow.algorithms.pipeline import Pipeline
from astraflow.algorithms.select_replay import WithReplay
from astraflow.errors import AstraFlowError, ConfigError
from astraflow.run.recipe import Recipe

_NAME = re.compile(r"([\w.]+)(?::([\w.]+))?\s*(\(.*\))?", re.DOTALL)
NONE = "none"
PROTOCOLS: dict[str, Any] = {"curate": Curate, "keep": Keep, "select": Select}


def chosen(recipe: Recipe, *, curate: str | None, keep: Sequence[str], select: str | None) -> dict[str, Any]:
    """What of the pipeline is replaced; ``keep`` of ``none``: nothing is dropped. Raises ConfigError."""
    found: dict[str, Any] = {}
    if curate is not None:
        found["curate"] = algorithm("curate", curate, recipe)
    if keep:
        found["keep"] = tuple(algorithm("keep", each, recipe) for each in keep if each != NONE)
    if select is not None:
        found["select"] = algorithm("select", select, recipe)
    return found


def algorithm(question: str, text: str, recipe: Recipe) -> Any:
    """One algorithm that answers this question."""
    match = _NAME.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"--{question} {text!r} must be a name, Name(option=value) or package.module:object")
    module, attribute, arguments = match.groups()
    made = _imported(question, module, attribute) if attribute else _shipped(question, module)
    options = _options(question, text, arguments)
    if arguments or isinstance(made, type) or not isinstance(made, PROTOCOLS[question]):
        made = _made(question, text, made, options, recipe)
    if not isinstance(made, PROTOCOLS[question]):
        raise ConfigError(f"--{question} {text}: {type(made).__name__} is no {PROTOCOLS[question].__name__}")
    return made


def known(question: str) -> dict[str, Any]:
    """Name → class of all of AstraFlow's that answer this question."""
    protocol = PROTOCOLS[question]
    found = {}
    for module in _modules():
        for name, value in vars(module).items():
            own = isinstance(value, type) and value.__module__ == module.__name__ and not name.startswith("_")
            if own and not getattr(value, "_is_protocol", False) and issubclass(value, protocol):
                found[name] = value
    return found


def _modules() -> Iterator[Any]:
    package = astraflow.algorithms
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        yield importlib.import_module(info.name)


def _shipped(question: str, name: str) -> Any:
    there = known(question)
    if name not in there:
        near = difflib.get_close_matches(name, there, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(there))}."
        raise ConfigError(
            f"--{question} {name}: AstraFlow has none of this name; {hint} Others are package.module:object"
        )
    return there[name]


def _imported(question: str, module: str, attribute: str) -> Any:
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"--{question} {module}:{attribute} cannot be imported: {error}") from error
    return found


def _options(question: str, text: str, arguments: str | None) -> dict[str, Any]:
    if not arguments:
        return {}
    try:
        call = ast.parse(f"f{arguments}", mode="eval").body
        assert isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and not call.args
        assert all(keyword.arg for keyword in call.keywords), "no **mapping"
        return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError, AssertionError) as error:
        raise ConfigError(
            f"--{question} {text!r}: options are name=value with plain Python values, for example (p_easy=0.3)"
        ) from error


def _made(question: str, text: str, maker: Any, options: Mapping[str, Any], recipe: Recipe) -> Any:
    if not callable(maker):
        raise ConfigError(f"--{question} {text}: {type(maker).__name__} is no {PROTOCOLS[question].__name__}")
    parameters = inspect.signature(maker).parameters
    unknown = [name for name in options if name not in parameters]
    if unknown:
        raise ConfigError(f"--{question} {text}: there is no option {unknown[0]!r}; known: {', '.join(parameters)}")
    own = _own(recipe)
    given = {name: own[name] for name in parameters if name in own} | dict(options)
    lacking = [
        name
        for name, each in parameters.items()
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD) and name not in given
    ]
    if lacking:
        raise ConfigError(
            f"--{question} {text} needs {', '.join(lacking)}: give them as options, {text}({lacking[0]}=…)"
        )
    try:
        return maker(**given)
    except AstraFlowError:
        raise
    except Exception as error:  # anyone's constructor may raise anything: it is named, nothing is swallowed
        raise ConfigError(f"--{question} {text} raised {type(error).__name__}: {error}") from error


def _own(recipe: Recipe) -> dict[str, Any]:
    assert isinstance(recipe.pipeline, Pipeline), "a resolved recipe has its pipeline built"
    select = recipe.pipeline.select
    held_out = {} if recipe.eval is None else {"held_out": recipe.eval.tasks}
    return {
        "tasks": recipe.tasks,
        "group_size": recipe.group_size,
        "seed": recipe.seed,
        "recipe": recipe,
        "curate": recipe.pipeline.curate,
        "select": select.fresh if isinstance(select, WithReplay) else select,
        **held_out,
    }
