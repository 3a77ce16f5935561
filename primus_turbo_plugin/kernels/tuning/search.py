"""The search for the fastest configuration of one case.

1. Every candidate is run once and its result compared, before anything is timed. What does not compile, does not launch or gives
   wrong numbers has failed, with the reason; it is never left out silently.
2. Those that pass are timed roughly; the fastest few and the default go on.
3. The finalists are timed in turns, so that a GPU that grows warm slows all of them alike.
4. The winner replaces the default only if it was faster by one percent in all rounds but one at most.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from primus_turbo_plugin.kernels.tuning.clock import Sample

C = TypeVar("C")
_Taken = TypeVar("_Taken", contravariant=True)

FINALISTS = 4
_ROUGH, _ROUNDS, _REPEATS = 3, 5, 5
_LEAST_GAIN = 0.01


class Watch(Protocol):
    """What times a candidate (`clock.Stopwatch`)."""

    def read(self, repeats: int) -> list[float]:
        """So many measurements in microseconds."""


class Case(Protocol[_Taken]):
    """One case on a device: operands, reference, clock.

    Attributes:
        errors: What a candidate raises when it cannot be compiled or launched.
    """

    errors: tuple[type[BaseException], ...]

    def check(self, config: _Taken) -> str | None:
        """Runs a candidate; None, or what is wrong with its result."""

    def watch(self, config: _Taken) -> Watch:
        """A clock for a candidate."""

    def is_alive(self) -> str | None:
        """None, or why the device takes no more work (an earlier candidate broke it)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial(Generic[C]):
    """What became of one candidate.

    Attributes:
        config: The configuration.
        outcome: `won`, `slower`, `failed` or `not tried`.
        sample: Its times; None where it was not timed.
        rough: Whether they are of the first, rough timing: no finalist.
        reason: Why it failed, was not tried, or did not win though it was faster.
    """

    config: C
    outcome: str
    sample: Sample | None = None
    rough: bool = False
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome(Generic[C]):
    """The result of a search.

    Attributes:
        trials: Every candidate, the default first.
        winner: The configuration to use; None where not even the default works.
    """

    trials: tuple[Trial[C], ...]
    winner: Trial[C] | None

    @property
    def default(self) -> Trial[C]:
        """The default's trial."""
        return self.trials[0]

    @property
    def failed(self) -> tuple[Trial[C], ...]:
        """Candidates that failed."""
        return tuple(trial for trial in self.trials if trial.outcome == "failed")

    @property
    def broken_by(self) -> str | None:
        """Why the search had to stop early: the device takes no more work."""
        return next((trial.reason for trial in self.trials if trial.outcome == "not tried"), None)


def search(candidates: Sequence[C], case: Case[C], fatal: Mapping[C, str] | None = None) -> Outcome[C]:
    """Finds the fastest of `candidates`; the first is the default.

    Args:
        candidates: At least the default.
        case: Runs, checks and times them.
        fatal: Candidates that would end this process, with the reason; they are not tried.
    """
    fatal = fatal or {}
    failures = {index: fatal[config] for index, config in enumerate(candidates) if config in fatal}
    rough: dict[int, float] = {}
    watches: dict[int, Watch] = {}
    dead: str | None = None
    for index, config in enumerate(candidates):
        if index in failures:
            continue
        dead = dead or (case.is_alive() if failures else None)
        if dead is not None:
            break
        reason, watch = _try(case, config)
        if reason is not None:
            failures[index] = f"failed: {reason}"
            continue
        assert watch is not None
        rough[index] = min(watch.read(_ROUGH))
        watches[index] = watch
        _keep_finalists(watches, rough)
    final = {} if dead else _final(watches)
    return _judge(candidates, failures, rough, final, dead)


def _try(case: Case[C], config: C) -> tuple[str | None, Watch | None]:
    try:
        wrong = case.check(config)
        return (wrong, None) if wrong is not None else (None, case.watch(config))
    except case.errors as error:
        text = " ".join(str(error).split())
        return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__, None


def _keep_finalists(watches: dict[int, Watch], rough: dict[int, float]) -> None:
    """Frees the clocks (and the memory of their outputs) of all but the default and the fastest few."""
    kept = {0, *sorted(rough, key=lambda index: rough[index])[:FINALISTS]}
    for index in [index for index in watches if index not in kept]:
        del watches[index]


def _final(watches: dict[int, Watch]) -> dict[int, list[list[float]]]:
    """Candidate -> round -> times."""
    times: dict[int, list[list[float]]] = {index: [] for index in watches}
    for _ in range(_ROUNDS):
        for index, watch in watches.items():
            times[index].append(watch.read(_REPEATS))
    return times


def _judge(
    candidates: Sequence[C],
    failures: dict[int, str],
    rough: dict[int, float],
    final: dict[int, list[list[float]]],
    dead: str | None,
) -> Outcome[C]:
    samples = {index: Sample.of([time for found in rounds for time in found]) for index, rounds in final.items()}
    best = min(samples, key=lambda index: samples[index].us, default=None)
    reasons: dict[int, str] = {}
    if best is not None and best != 0 and 0 in samples:
        gained = _rounds_gained(final[0], final[best])
        if gained < _ROUNDS - 1:
            reasons[best] = f"within noise: faster by {_LEAST_GAIN:.0%} in {gained} of {_ROUNDS} rounds"
            best = 0
    trials = []
    for index, config in enumerate(candidates):
        sample = samples.get(index)
        if index in failures:
            trial: Trial[Any] = Trial(config=config, outcome="failed", reason=failures[index])
        elif index == best:
            trial = Trial(config=config, outcome="won", sample=sample)
        elif sample is None and index in rough:
            sample = Sample(us=rough[index], low=rough[index], high=rough[index])
            trial = Trial(config=config, outcome="slower", sample=sample, rough=True)
        elif sample is None:
            trial = Trial(config=config, outcome="not tried", reason=dead or "")
        else:
            trial = Trial(config=config, outcome="slower", sample=sample, reason=reasons.get(index, ""))
        trials.append(trial)
    winner = None if best is None else trials[best]
    return Outcome(trials=tuple(trials), winner=winner)


def _rounds_gained(default: list[list[float]], winner: list[list[float]]) -> int:
    """Rounds in which the winner was clearly faster: within one, both were equally warm and equally disturbed."""
    medians = [(statistics.median(ours), statistics.median(theirs)) for ours, theirs in zip(default, winner)]
    return sum(theirs < (1 - _LEAST_GAIN) * ours for ours, theirs in medians)
