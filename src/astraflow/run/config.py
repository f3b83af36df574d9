"""From a reference to a resolved recipe: import, ``--set``, seed, checks, digest. The same in every process."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from astraflow.errors import AstraFlowError, ConfigError
from astraflow.rollout.play import own_line
from astraflow.run.checks import check_recipe
from astraflow.run.code_digest import code_digest
from astraflow.run.layout import COPY, RunFolder, read_json
from astraflow.run.overrides import apply_overrides, nearest_keyword
from astraflow.run.recipe import Recipe
from astraflow.run.right_types import require_types, wrong_in
from astraflow.run.task_record import describe_changed_tasks, record_tasks, without_tasks

MOST_SETTINGS, MOST_CHARS = 2048, 120
"""Of what a process tells of its config when it joins: below the limit of a call's body, whatever a recipe holds."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """A recipe as every process of the run sees it."""

    recipe: Recipe
    reference: str
    """Absolute path of a file, or ``package.module:function``."""
    overrides: tuple[str, ...]
    seed: int | None
    config: dict[str, Any]
    """Plain JSON of every setting."""
    digest: str
    code_digest: str

    def as_file(self) -> dict[str, Any]:
        """What config.json holds; ``load_config`` is the counterpart."""
        return {
            "recipe": self.reference,
            "set": list(self.overrides),
            "seed": self.seed,
            "digest": self.digest,
            "code_digest": self.code_digest,
            "config": self.config,
        }

    def settings(self) -> dict[str, str]:
        """Path of each setting to its value as JSON, as it is told to dataflow; empty where that would be too much."""
        told = {path[:MOST_CHARS]: _short(canonical_json(value).decode()) for path, value in _flat(self.config)}
        return told if len(told) <= MOST_SETTINGS else {}


def resolve(reference: str, overrides: Sequence[str] = (), seed: int | None = None) -> Resolved:
    """Raises ConfigError in one sentence; loads no model."""
    function, module, absolute = _find(reference)
    try:
        recipe = function()
    except Exception as error:
        raise ConfigError(f"{_why_raised(error, function, reference)}{own_line(error)}") from error
    if not isinstance(recipe, Recipe):
        raise ConfigError(f"{reference}: recipe() must return a Recipe, found {type(recipe).__name__}")
    require_types(recipe, function)
    recipe = apply_overrides(recipe, overrides)
    if seed is not None:
        recipe = apply_overrides(recipe, [f"seed={seed}"])
    _refuse_without_effect(recipe, overrides, seed)
    recipe = _with_pipeline(recipe.with_workflow(_workflow(recipe.workflow)), reference)
    check_recipe(recipe)
    config = to_plain(recipe)
    digest = hashlib.sha256(canonical_json(config)).hexdigest()
    code = code_digest([module, *_modules_of(recipe)])
    return Resolved(
        recipe=recipe,
        reference=absolute,
        overrides=tuple(overrides),
        seed=seed,
        config=config,
        digest=digest,
        code_digest=code,
    )


def _with_pipeline(recipe: Recipe, reference: str) -> Recipe:
    """With its pipeline built. Raises ConfigError whatever the function that makes it raises."""
    function = recipe.pipeline
    if function is None or not callable(function):
        return recipe.with_pipeline()

    def made(recipe: Recipe) -> Any:
        try:
            return function(recipe)
        except Exception as error:  # the author's function may raise anything: it is named, with its line
            raise ConfigError(f"{_why_raised(error, function, reference)}{own_line(error)}") from error

    built = dataclasses.replace(recipe, pipeline=made).with_pipeline()
    require_types(built.pipeline, function)
    return built


def _why_raised(error: Exception, function: Any, reference: str) -> str:
    """Of a function of the recipe that broke off: a setting of the wrong type, what AstraFlow said, or what Python did.
    Without the line."""
    wrong = wrong_in(error)
    if wrong or isinstance(error, AstraFlowError):
        return wrong or str(error)
    name = getattr(function, "__name__", type(function).__name__)
    known = nearest_keyword(error, getattr(function, "__globals__", {}))
    return f"{reference}: {name}() raised {type(error).__name__}: {error}{known}"


def raised(error: Exception, what: str) -> str:
    """What user code raised when ``what`` was asked, in one sentence with the line."""
    said = str(error) if isinstance(error, AstraFlowError) else f"{type(error).__name__}: {error}"
    return f"{what} raised {said}{own_line(error)}"


def load_config(run_dir: Path, *, allow_changed_tasks: bool = False) -> Resolved:
    """The recipe of an existing run, resolved again. Raises ConfigError when the sources or settings have changed."""
    stored = read_config(run_dir)
    for name in ("recipe", "set", "seed", "digest", "code_digest", "config"):
        if name not in stored:
            raise ConfigError(f"{run_dir / 'config.json'} does not hold a run's config: {name} is missing; {COPY}")
    now = resolve(stored["recipe"], stored["set"], stored["seed"])
    differences = describe_differences(stored["config"], now.config)
    if now.digest != stored["digest"] and without_tasks(stored["config"]) == without_tasks(to_json(now.config)):
        if not allow_changed_tasks:
            raise ConfigError(
                f"{run_dir} was started with other tasks: {_changed_tasks(run_dir, now) or differences}; restore them, "
                "start a new run, or go on all the same with 'astraflow resume --allow-changed-tasks'"
            )
    elif now.digest != stored["digest"]:
        raise ConfigError(f"{run_dir} was started with another config: {differences or 'digest differs'}")
    if now.code_digest != stored["code_digest"]:
        raise ConfigError(
            f"{run_dir} was started with other sources of the recipe or workflow; restore them, or start a new run"
        )
    return now


def _changed_tasks(run_dir: Path, now: Resolved) -> str:
    path = RunFolder(run_dir).tasks
    return describe_changed_tasks(read_json(path), record_tasks(now.recipe)) if path.exists() else ""


def read_config(run_dir: Path) -> dict[str, Any]:
    """What config.json of a run holds. Raises ConfigError."""
    return RunFolder(run_dir).stored_config()


def describe_differences(old: Mapping[str, Any], new: Mapping[str, Any], *, limit: int = 5) -> str:
    """``path: old → new`` of each setting that differs, for people."""
    before, after = dict(_flat(old)), dict(_flat(new))
    paths = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
    shown = [f"{path}: {before.get(path)!r} → {after.get(path)!r}" for path in paths[:limit]]
    more = f" and {len(paths) - limit} more" if len(paths) > limit else ""
    return "; ".join(shown) + more


def to_json(config: Mapping[str, Any]) -> Any:
    """As it would be read back from a file: tuples are lists, keys are text."""
    return json.loads(canonical_json(config))


def canonical_json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def to_plain(value: Any) -> Any:
    """JSON of any setting: objects become their class and plain attributes, tasks their digest, functions a name."""
    if value is None or isinstance(value, bool | int | str):
        return value.value if isinstance(value, Enum) else value
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else str(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((to_plain(item) for item in value), key=str)
    if isinstance(value, Sequence):
        return [to_plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return {"array": hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()}
    if inspect.isroutine(value) or isinstance(value, type):
        return f"{getattr(value, '__module__', None) or 'builtins'}:{value.__qualname__}"
    return _object(value)


def _short(text: str) -> str:
    """What is too long is still told from another of the same beginning."""
    if len(text) <= MOST_CHARS:
        return text
    return f"{text[:24]}...sha256:{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _object(value: Any) -> dict[str, Any]:
    name = f"{type(value).__module__}:{type(value).__qualname__}"
    if callable(getattr(value, "digest", None)) and hasattr(value, "name"):
        return {"type": name, "name": value.name, "size": value.size, "digest": value.digest()}
    if isinstance(value, msgspec.Struct):
        fields = list(value.__struct_fields__)
    elif dataclasses.is_dataclass(value):
        fields = [field.name for field in dataclasses.fields(value)]
    else:
        slots = [s for cls in type(value).__mro__ for s in getattr(cls, "__slots__", ())]
        fields = sorted({*getattr(value, "__dict__", {}), *slots} - {"__dict__", "__weakref__"})
    found = {each.lstrip("_"): getattr(value, each) for each in fields if hasattr(value, each)}
    plain = {key: to_plain(item) for key, item in found.items() if not isinstance(item, np.random.Generator)}
    keep_name = not (dataclasses.is_dataclass(value) or isinstance(value, msgspec.Struct))
    return {"type": name, **plain} if keep_name or "run.recipe" not in name else plain


def _flat(value: Any, path: str = "") -> list[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        return [(path, value)]
    return [pair for key, item in value.items() for pair in _flat(item, f"{path}.{key}" if path else str(key))]


def function_of(reference: str) -> Callable[[], Any]:
    """``file.py:function`` or ``package.module:function``, called without anything. Raises ConfigError."""
    file, _, name = reference.rpartition(":")
    if not file.endswith(".py"):
        return _find(reference)[0]
    path = Path(file).resolve()
    if not path.is_file():
        raise ConfigError(f"there is no file {file}")
    return _function(_import_file(path, f"astraflow_recipe_{path.stem}"), name, reference)


def _find(reference: str) -> tuple[Callable[[], Any], str, str]:
    """The recipe's function, the name of its module, and a reference that holds from any folder."""
    if reference.endswith(".py") or Path(reference).is_file():
        path = Path(reference).resolve()
        if not path.is_file():
            raise ConfigError(f"there is no recipe file {reference}")
        name = f"astraflow_recipe_{path.stem}"
        return _function(_import_file(path, name), "recipe", reference), name, str(path)
    module_name, _, attribute = reference.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"recipe {reference!r} is neither a file nor an importable package.module:function ({error})"
        ) from error
    return _function(module, attribute or "recipe", reference), module_name, reference


def _import_file(path: Path, name: str) -> Any:
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return loaded
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except AstraFlowError:
        del sys.modules[name]
        raise
    except Exception as error:
        del sys.modules[name]
        line = "" if isinstance(error, SyntaxError) else own_line(error)  # whose own words have it
        raise ConfigError(f"{path} cannot be imported: {type(error).__name__}: {error}{line}") from error
    return module


def _function(module: Any, attribute: str, reference: str) -> Callable[[], Any]:
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ConfigError(f"{reference}: it must define a function {attribute}() that returns a Recipe")
    return function  # type: ignore[no-any-return]


def _workflow(workflow: Any) -> Any:
    """An object, or ``package.module:object``."""
    if not isinstance(workflow, str):
        return workflow
    module_name, _, attribute = workflow.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"Recipe.workflow {workflow!r} cannot be imported: {error}") from error
    return found() if isinstance(found, type) else found


def _modules_of(recipe: Recipe) -> list[str]:
    parts = [recipe.workflow, recipe.tasks, *(vars_of(recipe.pipeline))]
    return [part.__module__ if inspect.isroutine(part) else type(part).__module__ for part in parts if part is not None]


def vars_of(pipeline: Any) -> list[Any]:
    """The elements of a pipeline, flat."""
    if pipeline is None or not dataclasses.is_dataclass(pipeline):
        return []
    values = [getattr(pipeline, field.name) for field in dataclasses.fields(pipeline)]
    return [item for value in values for item in (value if isinstance(value, tuple) else (value,))]


def _refuse_without_effect(recipe: Recipe, overrides: Sequence[str], seed: int | None) -> None:
    """A flag that changes nothing is worse than an error: a pipeline that was built already has read its numbers."""
    if recipe.pipeline is None or not dataclasses.is_dataclass(recipe.pipeline):
        return
    named = [s.partition("=")[0].strip() for s in overrides] + (["seed"] if seed is not None else [])
    for path in named:
        if path in ("group_size", "seed"):
            raise ConfigError(
                f"--set {path} would change nothing in this recipe's pipeline, which is built already; "
                "give Recipe.pipeline a function (recipe) -> Pipeline"
            )
