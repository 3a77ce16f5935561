"""The kernel registry: which backend serves a request, by an explicit order, with a reason for every refusal.

Nothing here is mutable. A caller selects a `Backend` once and passes the object along, from forward to backward, so that both
run the same kernels:

    backend = default_registry().select("gemm_nt", GemmRequest.of(a, b, out_dtype), order=plan.kernels.get("gemm_nt"))
    y = backend.kernels.gemm_nt(a, b, out_dtype=out_dtype)

Where a backend is passed over that a user's order names, or that is written for this GPU, one line says why (`Choice.notable`).
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any, Generic, TypeVar

import torch

from primus_turbo_plugin.errors import ConfigError, UnsupportedError
from primus_turbo_plugin.kernels.requests import Request
from primus_turbo_plugin.kernels.tuning.table import TuningTable, tuning_table
from primus_turbo_plugin.precision.scale_layout import ScaleLayout

RequestT = TypeVar("RequestT", bound=Request)

_LOGGER = logging.getLogger(__name__)

_BACKEND_MODULES = (
    "primus_turbo_plugin.kernels.torch_native.gemm",
    "primus_turbo_plugin.kernels.torch_native.gemm_scaled",
    "primus_turbo_plugin.kernels.gluon.gemm",
    "primus_turbo_plugin.kernels.triton.gemm",
    "primus_turbo_plugin.kernels.torch_native.gemm_scaled_mx",
    "primus_turbo_plugin.kernels.triton.quantize",
    "primus_turbo_plugin.kernels.triton.fused",
    "primus_turbo_plugin.kernels.triton.norm",
    "primus_turbo_plugin.kernels.reference.gemm",
    "primus_turbo_plugin.kernels.reference.quantize",
    "primus_turbo_plugin.kernels.reference.fused",
    "primus_turbo_plugin.kernels.reference.norm",
    "primus_turbo_plugin.kernels.triton.attention",
    "primus_turbo_plugin.kernels.reference.attention",
    "primus_turbo_plugin.kernels.gluon.grouped_gemm",
    "primus_turbo_plugin.kernels.triton.grouped_gemm",
    "primus_turbo_plugin.kernels.triton.grouped_quantize",
    "primus_turbo_plugin.kernels.torch_native.grouped_gemm",
    "primus_turbo_plugin.kernels.per_expert",
    "primus_turbo_plugin.kernels.reference.grouped_gemm",
    "primus_turbo_plugin.kernels.reference.grouped_quantize",
)
"""Modules that define `BACKEND`, best first: this is the order in which a request without an order is offered."""


def _plain_scales(request: Request) -> ScaleLayout:
    return "plain"


def _not_written_for(request: Request) -> bool:
    return False


@dataclass(frozen=True, kw_only=True)
class Backend(Generic[RequestT]):
    """One implementation of one op.

    Attributes:
        name: What a user writes in an order: `reference`, `torch`, `triton`...
        request: The request type it answers; names the op.
        kernels: Module (or namespace) with the functions that `request.functions` lists.
        supports: None when the request can be served, otherwise the reason why not.
        matrix_units: Architecture -> quantised formats that a product of two such operands multiplies on the GPU's own units for
            them. Everything else is decoded first, which the report calls emulation.
        scale_layout: Layout in which a GEMM reads MX scales without a pass over them; it takes every other one too.
        tune: Gives `kernels` that take their configurations from a tuning table; None where there is nothing to tune.
        written_for: Whether these kernels are for the very device of a request, so that their refusal is worth a line.
        note: What the report says beside the name: a price of every call that the name does not tell.
    """

    name: str
    request: type[RequestT]
    kernels: Any
    supports: Callable[[RequestT], str | None]
    matrix_units: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    scale_layout: Callable[[RequestT], ScaleLayout] = _plain_scales
    tune: Callable[[TuningTable], Any] | None = None
    written_for: Callable[[RequestT], bool] = _not_written_for
    note: str = ""

    @property
    def op(self) -> str:
        return self.request.op


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Who serves a request.

    Attributes:
        request: The request.
        backend: None when nobody serves it.
        refusals: Backend -> reason, of those asked before.
        notable: Of these, the ones that a user must hear of: backends that an order named, or that are written for this device.
    """

    request: Request
    backend: Backend[Any] | None
    refusals: Mapping[str, str]
    notable: Mapping[str, str] = field(default_factory=dict)


class KernelRegistry:
    """An immutable set of backends, in default order.

    Args:
        backends: All backends; for one op, the order is the default preference.

    Raises:
        ConfigError: Two backends of one op share a name, or one lacks a function its op needs.
    """

    def __init__(self, backends: Iterable[Backend[Any]]) -> None:
        by_op: dict[str, dict[str, Backend[Any]]] = {}
        for backend in backends:
            named = by_op.setdefault(backend.op, {})
            if backend.name in named:
                raise ConfigError(
                    f"kernel registry: {backend.op}: two backends are named {backend.name!r}. Rename one."
                )
            missing = [name for name in backend.request.functions if not callable(getattr(backend.kernels, name, None))]
            if missing:
                raise ConfigError(
                    f"kernel registry: {backend.op}: backend {backend.name!r} must define {', '.join(missing)}."
                )
            named[backend.name] = backend
        self._by_op = by_op

    @property
    def ops(self) -> tuple[str, ...]:
        return tuple(self._by_op)

    def tuned(self, table: TuningTable) -> KernelRegistry:
        """The same backends, their kernels configured by `table`."""
        backends = [backend for named in self._by_op.values() for backend in named.values()]
        return KernelRegistry(
            backend if backend.tune is None else replace(backend, kernels=backend.tune(table)) for backend in backends
        )

    def names(self, op: str) -> tuple[str, ...]:
        """Backends of an op in default order."""
        return tuple(self._backends(op))

    def backend(self, op: str, name: str) -> Backend[Any]:
        """The backend of that name, whatever it supports."""
        named = self._backends(op)
        if name not in named:
            raise ConfigError(f"kernels: {op}: {_unknown('backend', name, named)}")
        return named[name]

    def select(self, op: str, request: Request, order: Iterable[str] | None = None) -> Backend[Any]:
        """The first backend in `order` that supports the request.

        Args:
            op: Name of the op, for instance `gemm_nt`.
            request: A request of that op.
            order: Backend names, best first; nothing outside it is considered. None takes the default order.

        Raises:
            ConfigError: `op` or a name in `order` is unknown, or the order is empty.
            UnsupportedError: Nobody in the order supports the request; holds everyone's reason.
        """
        choice = self._choose(op, request, order)
        if choice.backend is None:
            raise UnsupportedError(
                f"kernels: no backend can do {request}. Allow another backend for {op!r}, or change what is asked.",
                choice.refusals,
            )
        for name, reason in choice.notable.items():
            _say_passed_over(op, name, reason, choice.backend.name)
        return choice.backend

    def explain(self, device: str, orders: Mapping[str, Iterable[str]] | None = None) -> tuple[Choice, ...]:
        """Who serves typical requests of every op on a device.

        Args:
            device: Device type, `cpu` or `cuda`.
            orders: Order of backends for an op; ops left out use the default order.
        """
        orders = orders or {}
        for op in orders:
            self._backends(op)
        choices = []
        for op, named in self._by_op.items():
            request_type = next(iter(named.values())).request
            choices += [self._choose(op, example, orders.get(op)) for example in request_type.examples(device)]
        return tuple(choices)

    def _choose(self, op: str, request: Request, order: Iterable[str] | None) -> Choice:
        known = self.names(op)
        if request.op != op:
            raise ConfigError(f"kernels: {op}: the request must be one for {op!r}, got one for {request.op!r}.")
        names = known if order is None else tuple(order)
        if not names:
            raise ConfigError(f"kernels: {op}: the order must name a backend. Known: {', '.join(known)}.")
        candidates = {name: self._candidate(op, name) for name in names}
        refusals: dict[str, str] = {}
        notable: dict[str, str] = {}
        for name, backend in candidates.items():
            reason = backend.supports(request) if backend else f"has no kernels for {op!r}"
            if backend and reason is None:
                return Choice(request=request, backend=backend, refusals=refusals, notable=notable)
            refusals[name] = str(reason)
            if backend and (order is not None or backend.written_for(request)):
                notable[name] = str(reason)
        return Choice(request=request, backend=None, refusals=refusals)

    def _candidate(self, op: str, name: str) -> Backend[Any] | None:
        """The backend of that name; None if it serves other ops only, so that one order may be given for every op."""
        if name not in self._backends(op) and any(name in named for named in self._by_op.values()):
            return None
        return self.backend(op, name)

    def _backends(self, op: str) -> dict[str, Backend[Any]]:
        if op not in self._by_op:
            raise ConfigError(f"kernels: {_unknown('op', op, self._by_op)}")
        return self._by_op[op]


@functools.lru_cache(maxsize=256)
def _say_passed_over(op: str, name: str, reason: str, chosen: str) -> None:
    """One line in a process, on the first rank, for each (op, reason)."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_rank() != 0:
        return
    _LOGGER.warning("kernels: %s: %s is passed over (%s); %s serves instead.", op, name, reason, chosen)


def _unknown(kind: str, name: str, known: Iterable[str]) -> str:
    choices = list(known)
    near = get_close_matches(name, choices, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"unknown {kind} {name!r}.{hint} Known: {', '.join(choices)}."


@functools.cache
def default_registry(tuning_file: str | None = None) -> KernelRegistry:
    """The registry of all backends in this package.

    Args:
        tuning_file: Tuned configurations that go before the shipped ones; read once a process.

    Raises:
        ConfigError: The file cannot be used.
    """
    backends = KernelRegistry(importlib.import_module(name).BACKEND for name in _BACKEND_MODULES)
    return backends.tuned(tuning_table(tuning_file))
