"""What `primus-turbo tune` prints, and what it writes down."""

from __future__ import annotations

import dataclasses
import datetime
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from primus_turbo_plugin.diagnostics.tables import section, table
from primus_turbo_plugin.diagnostics.tune.gemm_tasks import GemmTask
from primus_turbo_plugin.kernels.tuning.clock import Sample
from primus_turbo_plugin.kernels.tuning.codec import decode, encode
from primus_turbo_plugin.kernels.tuning.entry import Entry, Failure
from primus_turbo_plugin.kernels.tuning.search import Outcome, Trial
from primus_turbo_plugin.kernels.tuning.table import TuningTable
from primus_turbo_plugin.kernels.tuning.tunable import Tunable, tunables

_SHOWN_FAILURES, _SHOWN_TIMES = 6, 3


def short(config: Any) -> str:
    """A configuration in one line: its required fields, and those that differ from the class's defaults."""
    parts = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value != field.default:
            parts.append(f"{field.name}={value}")
    return " ".join(parts)


def entry_of(
    tunable: Tunable[Any, Any], key: Any, outcome: Outcome[Any], device: str, backends: Mapping[str, float]
) -> Entry | None:
    """What goes into the file; None where nothing won. A default that failed has no time and is among the failures."""
    winner, default = outcome.winner, outcome.default.sample
    if winner is None or winner.sample is None:
        return None
    return Entry(
        op=tunable.op,
        versions=tunable.versions,
        key=encode(key),
        config=encode(winner.config),
        source="measured",
        device=device,
        us=round(winner.sample.us, 2),
        default_us=None if default is None else round(default.us, 2),
        date=datetime.date.today().isoformat(),
        candidates=len(outcome.trials),
        failures=tuple(Failure(config=encode(trial.config), reason=trial.reason) for trial in outcome.failed),
        backends={name: round(us, 2) for name, us in backends.items()},
    )


def outcome_lines(
    task: GemmTask, key: Any, outcome: Outcome[Any], backends: Mapping[str, Sample | str], *, verbose: bool
) -> list[str]:
    """One case: the winner, the default, the next best, every failure."""
    lines = [f"{key}   ({task.name})"]
    timed = sorted((trial for trial in outcome.trials if trial.sample is not None), key=_time_of)
    always = (outcome.winner, outcome.default)
    shown = [trial for place, trial in enumerate(timed) if verbose or place < _SHOWN_TIMES or trial in always]
    rows = [_trial_row(task, trial, is_default=trial is outcome.default) for trial in shown]
    rows += [_backend_row(task, name, found) for name, found in backends.items()]
    lines += table(rows)
    lines += failure_lines(outcome, verbose=verbose)
    untried = sum(trial.outcome == "not tried" for trial in outcome.trials)
    if untried:
        lines.append(f"  {untried} candidates not tried: {outcome.broken_by}")
    if outcome.winner is None:
        lines.append("  nothing works here: no entry is written")
    return lines


def _time_of(trial: Trial[Any]) -> tuple[bool, float]:
    """Finalists first: the times of the others are of another moment."""
    assert trial.sample is not None
    return trial.rough, trial.sample.us


def failure_lines(outcome: Outcome[Any], *, verbose: bool) -> list[str]:
    """Each reason with how many candidates it struck; every candidate where `verbose`."""
    if verbose:
        return table(
            [("failed", trial.reason.removeprefix("failed: "), short(trial.config)) for trial in outcome.failed]
        )
    counts = Counter(trial.reason for trial in outcome.failed)
    example = {trial.reason: short(trial.config) for trial in reversed(outcome.failed)}
    rows = [
        ("failed", f"{count}x", f"{reason.removeprefix('failed: ')} ({example[reason]})")
        for reason, count in counts.most_common(_SHOWN_FAILURES)
    ]
    more = len(counts) - _SHOWN_FAILURES
    return table(rows) + ([f"  {more} more reasons; --verbose shows all, and the file has them"] if more > 0 else [])


def _trial_row(task: GemmTask, trial: Trial[Any], *, is_default: bool) -> tuple[str, ...]:
    sample = trial.sample
    assert sample is not None
    note = f" ({trial.reason})" if trial.reason else ""
    label = trial.outcome + (", default" if is_default else "")
    time = f"about {sample.us:.1f} us" if trial.rough else _time(sample)
    return label, time, _rate(task, sample), short(trial.config) + note


def _backend_row(task: GemmTask, name: str, found: Sample | str) -> tuple[str, ...]:
    if isinstance(found, str):
        return f"backend {name}", "-", "-", found
    return f"backend {name}", _time(found), _rate(task, found), ""


def _time(sample: Sample) -> str:
    return f"{sample.us:.1f} us [{sample.low:.1f} {sample.high:.1f}]"


def _rate(task: GemmTask, sample: Sample) -> str:
    return f"{task.flops / sample.us / 1e6:.1f} TFLOP/s"


def dry_lines(task: GemmTask, key: Any, tunable: Tunable[Any, Any], current: str, *, verbose: bool) -> list[str]:
    """What would be tried for a case, and what was struck out and why."""
    candidates, struck = tunable.candidates(key), tunable.struck_out(key)
    lines = [f"{key}   ({task.name})", f"  now: {short(tunable.default(key))} ({current})"]
    lines.append(f"  {len(candidates)} candidates, {len(struck)} struck out")
    shown: Sequence[Any] = candidates if verbose else candidates[:4]
    lines += table([("try", short(config)) for config in shown])
    if len(candidates) > len(shown):
        lines.append(f"  ... and {len(candidates) - len(shown)} more; --verbose lists them")
    if verbose:
        return lines + table([("out", reason, short(config)) for config, reason in struck])
    counts = Counter(reason for _, reason in struck)
    return lines + table([("out", f"{count}x", reason) for reason, count in counts.most_common()])


def table_lines(tuning: TuningTable, arch: str) -> list[str]:
    """Every entry that applies on an architecture: where it is from, what it gains, what it chose."""
    rows = []
    for case, entry in tuning.entries.items():
        if entry.arch != arch or entry.op not in tunables():
            continue
        tunable = tunables()[entry.op]
        key = decode(tunable.key_type, entry.key, "key")
        config = decode(tunable.config_type, entry.config, "configuration")
        times = "-"
        if entry.us and entry.default_us:
            times = f"{entry.us:.1f} us, default {entry.default_us:.1f} us ({entry.default_us / entry.us:.2f}x)"
        elif entry.us:
            times = f"{entry.us:.1f} us, default failed"
        others = [f"{name} {us:.1f} us" for name, us in entry.backends.items() if name != "triton"]
        failed = f"{len(entry.failures)} of {entry.candidates} failed" if entry.failures else ""
        said = "; ".join(part for part in (entry.device, entry.date, *others, failed, entry.note) if part)
        rows.append((str(key), tuning.origins[case], entry.source, times, f"{short(config)} ({said})"))
    if not rows:
        return [f"No tuned configuration applies on {arch}: every kernel runs its default."]
    return table([("case", "from", "", "time", "configuration"), *rows])


def backend_advice(times: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Which backend was fastest for which case, and the setting that puts it first.

    Args:
        times: Case's name -> backend -> microseconds.
    """
    fastest = {case: min(found, key=lambda name: found[name]) for case, found in times.items() if len(found) > 1}
    if not fastest:
        return []
    lines = section("Fastest backend", [(case, name, _others(times[case], name)) for case, name in fastest.items()])
    winners = Counter(fastest.values())
    if len(winners) == 1:
        names = [next(iter(winners))]
        names += [name for name in _all_names(times.values()) if name not in names]
        lines.append(f"The same everywhere: kernels: {{gemm_nt: [{', '.join(names)}, reference]}}")
    else:
        lines.append("They differ: set 'kernels' by module pattern where it matters (docs/tuning.md).")
    return lines


def _others(found: Mapping[str, float], winner: str) -> str:
    return ", ".join(f"{found[name] / found[winner]:.2f}x {name}" for name in found if name != winner)


def _all_names(times: Iterable[Mapping[str, float]]) -> list[str]:
    return list(dict.fromkeys(name for found in times for name in found))
