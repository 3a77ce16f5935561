"""One tuned case as a file holds it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from primus_turbo_plugin.errors import ConfigError
from primus_turbo_plugin.kernels.tuning.codec import Plain, canonical

SOURCES = ("measured", "heuristic")


@dataclass(frozen=True, kw_only=True, slots=True)
class Versions:
    """Software that changes what a configuration compiles to, or which one is best.

    Attributes:
        torch: Public release, `2.11.0`; builds of one release (`+cu130`, `+rocm7`) are told apart by the architecture.
        triton: Public release.
        kernels: The op's kernel version in this package: a number that goes up when its code or its configuration's meaning does.
    """

    torch: str
    triton: str
    kernels: int

    def __str__(self) -> str:
        return f"torch {self.torch}, triton {self.triton}, kernels {self.kernels}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A candidate that could not win.

    Attributes:
        config: Its fields.
        reason: `failed: ...` where it did not compile, launch or give the right numbers.
    """

    config: Plain
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """The configuration of one case, and how it was come by.

    Attributes:
        op: Backend and op, `triton.gemm_nt`.
        versions: Of what was measured.
        key: Every argument that changes code or choice; holds the architecture as `arch`.
        config: The configuration's fields.
        source: `measured` on a GPU, or `heuristic`: chosen by a rule and never timed.
        device: Product name; empty for heuristics.
        us: Median time in microseconds; None for heuristics.
        default_us: The default's time in the same run; None for heuristics, and where the default is among the failures.
        date: Day of the measurement, `2026-12-01`.
        candidates: How many candidates were looked at.
        failures: Those that failed.
        backends: Backend -> microseconds, where other backends were compared.
        note: Anything a reader should know, such as the rule behind a heuristic.
    """

    op: str
    versions: Versions
    key: Plain
    config: Plain
    source: Literal["measured", "heuristic"]
    device: str = ""
    us: float | None = None
    default_us: float | None = None
    date: str = ""
    candidates: int = 0
    failures: tuple[Failure, ...] = ()
    backends: Mapping[str, float] = field(default_factory=dict)
    note: str = ""

    @property
    def arch(self) -> str:
        """The architecture it was tuned for."""
        return str(self.key["arch"])

    @property
    def case(self) -> tuple[str, str]:
        """What it answers, versions apart."""
        return self.op, canonical(self.key)

    @property
    def identity(self) -> tuple[str, str, Versions]:
        """What no two entries of a file share."""
        return (*self.case, self.versions)

    def to_plain(self) -> dict[str, Any]:
        """As JSON holds it; what is empty is left out."""
        plain = dataclasses.asdict(self)
        plain["failures"] = [dataclasses.asdict(item) for item in self.failures]
        optional = ("device", "us", "default_us", "date", "candidates", "failures", "backends", "note")
        return {key: value for key, value in plain.items() if key not in optional or value}

    @classmethod
    def from_plain(cls, plain: Any, where: str) -> Entry:
        """The inverse of `to_plain`.

        Raises:
            ConfigError: A field is unknown, missing or of the wrong type; names `where` and the field.
        """
        given = dict(_mapping(plain, where))
        known = [item.name for item in dataclasses.fields(cls)]
        unknown = sorted(set(given) - set(known))
        missing = [name for name in ("op", "versions", "key", "config", "source") if name not in given]
        if unknown or missing:
            said = [f"unknown field {name!r}" for name in unknown] + [f"misses {name!r}" for name in missing]
            raise ConfigError(f"{where}: {', '.join(said)}")
        for name, kinds in _KINDS.items():
            if name in given and (not isinstance(given[name], kinds) or isinstance(given[name], bool)):
                raise ConfigError(f"{where}.{name}: must be {kinds[0].__name__}, got {given[name]!r}")
        if given["source"] not in SOURCES:
            raise ConfigError(f"{where}.source: must be one of {', '.join(SOURCES)}, got {given['source']!r}")
        if "arch" not in given["key"]:
            raise ConfigError(f"{where}.key: misses 'arch', the architecture")
        given["versions"] = _versions(given["versions"], f"{where}.versions")
        given["failures"] = tuple(_failure(item, f"{where}.failures") for item in given.get("failures", ()))
        entry = cls(**given)
        default = entry.default_us or entry.failures
        if entry.source == "measured" and not (entry.us and default and entry.device and entry.date):
            raise ConfigError(f"{where}: a measured entry has us, default_us (or failures), device and date")
        return entry


_KINDS: Mapping[str, tuple[type, ...]] = {
    "op": (str,),
    "key": (dict,),
    "config": (dict,),
    "source": (str,),
    "device": (str,),
    "us": (float, int),
    "default_us": (float, int),
    "date": (str,),
    "candidates": (int,),
    "failures": (list,),
    "backends": (dict,),
    "note": (str,),
}


def _mapping(plain: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(plain, Mapping):
        raise ConfigError(f"{where}: must be a mapping, got {plain!r}")
    return plain


def _versions(plain: Any, where: str) -> Versions:
    given = dict(_mapping(plain, where))
    kinds = {"torch": str, "triton": str, "kernels": int}
    if set(given) != set(kinds) or any(type(given[name]) is not kind for name, kind in kinds.items()):
        raise ConfigError(f"{where}: must be {{torch: text, triton: text, kernels: number}}, got {given!r}")
    return Versions(**given)


def _failure(plain: Any, where: str) -> Failure:
    given = dict(_mapping(plain, where))
    if set(given) != {"config", "reason"}:
        raise ConfigError(f"{where}: must be {{config, reason}}, got {given!r}")
    return Failure(**given)
