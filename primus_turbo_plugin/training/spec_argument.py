"""`--spec MODULE NAME`: whether it names something. Megatron only logs a missing module and goes on with its own model."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Iterable, Sequence

from primus_turbo_plugin.errors import ConfigError


def check_spec(spec: Sequence[str]) -> None:
    """Import the module and look the name up, as Megatron will.

    Raises:
        ConfigError: Module or name does not exist, or an import in the module fails; names the nearest that exists.
    """
    if len(spec) != 2:
        raise ConfigError(f"--spec: takes a module and a name in it, got {' '.join(spec) or 'nothing'}.")
    path, name = spec
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if path != missing and not path.startswith(f"{missing}."):
            raise ConfigError(f"--spec {path} {name}: the module cannot be imported ({error}).") from error
        hint = _nearest(missing, _siblings(missing))
        raise ConfigError(f"--spec {path} {name}: there is no module {missing}{hint}") from error
    except (ImportError, ValueError, TypeError) as error:  # the latter two for names such as '' and '.relative'
        raise ConfigError(f"--spec {path} {name}: the module cannot be imported ({error}).") from error
    if name not in vars(module):
        public = [other for other in vars(module) if not other.startswith("_")]
        hint = _nearest(name, getattr(module, "__all__", public))
        raise ConfigError(f"--spec {path} {name}: the module has no {name!r}{hint}")


def _nearest(name: str, existing: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(existing), n=1, cutoff=0.4)
    return f"; did you mean {near[0]}?" if near else ". Check the name, and PYTHONPATH."


def _siblings(missing: str) -> list[str]:
    """Full names of the modules beside `missing`."""
    parent, _, _ = missing.rpartition(".")
    if not parent:
        return [module.name for module in pkgutil.iter_modules()]
    paths = getattr(importlib.import_module(parent), "__path__", None)
    return [f"{parent}.{module.name}" for module in pkgutil.iter_modules(paths)] if paths is not None else []
