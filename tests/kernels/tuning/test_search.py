"""The search: honest comparison, no candidate wins with wrong numbers, no failure is swallowed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from primus_turbo_plugin.kernels.tuning.clock import Sample
from primus_turbo_plugin.kernels.tuning.search import Outcome, search

CANDIDATES = ["default", "b", "c", "d", "e", "f", "g"]


class FakeCase:
    """Candidates with scripted times: `times[name]` is a time, or a function of the reading's number."""

    errors = (RuntimeError, ValueError)

    def __init__(
        self, times: dict[str, float | Callable[[int], float]], wrong: dict[str, str | Exception] | None = None
    ) -> None:
        self.times, self.wrong = times, wrong or {}
        self.checked: list[str] = []
        self.readings = 0
        self.dead: str | None = None

    def check(self, config: str) -> str | None:
        self.checked.append(config)
        wrong = self.wrong.get(config)
        if isinstance(wrong, Exception):
            raise wrong
        return wrong

    def watch(self, config: str) -> FakeWatch:
        assert config in self.checked, "timed before it was checked"
        return FakeWatch(self, self.times[config])

    def is_alive(self) -> str | None:
        return self.dead


class FakeWatch:
    def __init__(self, case: FakeCase, time: float | Callable[[int], float]) -> None:
        self.case, self.time = case, time

    def read(self, repeats: int) -> list[float]:
        found = []
        for _ in range(repeats):
            self.case.readings += 1
            found.append(self.time(self.case.readings) if callable(self.time) else self.time)
        return found


def outcome_of(times: dict[str, float | Callable[[int], float]], **fields: object) -> Outcome[str]:
    base: dict[str, float | Callable[[int], float]] = dict.fromkeys(CANDIDATES, 200.0)
    return search(CANDIDATES, FakeCase({**base, **times}, **fields))  # type: ignore[arg-type]


def test_the_fastest_wins() -> None:
    outcome = outcome_of({"default": 100.0, "e": 70.0, "c": 80.0})
    assert outcome.winner is not None
    assert (outcome.winner.config, outcome.winner.outcome) == ("e", "won")
    assert outcome.default.sample == Sample(us=100.0, low=100.0, high=100.0)
    assert [trial.config for trial in outcome.trials] == CANDIDATES


@pytest.mark.parametrize(("us", "wins"), [(99.5, False), (98.5, True)])
def test_a_gain_below_one_percent_does_not_replace_the_default(us: float, wins: bool) -> None:
    outcome = outcome_of({"default": 100.0, "c": us})
    assert outcome.winner is not None
    assert outcome.winner.config == ("c" if wins else "default")


def test_a_gain_within_the_noise_does_not_replace_the_default_and_says_so() -> None:
    """Every second round somebody else uses the GPU while the default runs."""
    outcome = outcome_of({"default": lambda n: 130.0 if n % 50 < 25 else 100.0, "c": 99.0})
    assert outcome.winner is outcome.default
    trial = outcome.trials[2]
    assert trial.outcome == "slower"
    assert "within noise: faster by 1% in " in trial.reason


def test_a_gpu_that_grows_warm_does_not_hide_a_gain() -> None:
    """Times grow by 0.1 % a reading: timed one after the other, the default, first, would seem the faster."""
    warm = {name: (lambda n, us=us: us * (1 + n / 1000)) for name, us in {"default": 100.0, "e": 97.0}.items()}
    outcome = outcome_of(warm)  # type: ignore[arg-type]
    assert outcome.winner is not None
    assert outcome.winner.config == "e"


def test_wrong_numbers_never_win_and_are_kept_with_the_reason() -> None:
    outcome = outcome_of({"default": 100.0, "b": 1.0, "c": 90.0}, wrong={"b": "tile (0, 1) has 3.0 dB"})
    assert outcome.winner is not None
    assert outcome.winner.config == "c"
    assert [(trial.config, trial.reason) for trial in outcome.failed] == [("b", "failed: tile (0, 1) has 3.0 dB")]


def test_what_does_not_compile_is_kept_with_the_error() -> None:
    wrong = {"b": RuntimeError("PassManager::run\n failed"), "g": ValueError("out of resource: shared memory")}
    outcome = outcome_of({"default": 100.0}, wrong=wrong)
    assert {trial.config: trial.reason for trial in outcome.failed} == {
        "b": "failed: RuntimeError: PassManager::run failed",
        "g": "failed: ValueError: out of resource: shared memory",
    }


def test_an_error_of_our_own_is_not_a_candidates_failure() -> None:
    with pytest.raises(KeyError):
        outcome_of({}, wrong={"b": KeyError("a bug")})


def test_a_default_that_fails_gives_way_and_none_at_all_wins_where_all_fail() -> None:
    outcome = outcome_of({"d": 90.0}, wrong={"default": "not finite"})
    assert outcome.winner is not None
    assert outcome.winner.config == "d"
    assert outcome.default.sample is None
    nothing = outcome_of({}, wrong=dict.fromkeys(CANDIDATES, "not finite"))
    assert nothing.winner is None
    assert len(nothing.failed) == len(CANDIDATES)


def test_a_broken_gpu_ends_the_search_and_the_rest_is_not_blamed() -> None:
    case = FakeCase(dict.fromkeys(CANDIDATES, 100.0), {"c": RuntimeError("illegal memory access")})
    case.dead = "the GPU takes no more work"
    outcome = search(CANDIDATES, case)
    assert case.checked == ["default", "b", "c"]
    assert [trial.outcome for trial in outcome.trials] == ["slower", "slower", "failed", *["not tried"] * 4]
    assert outcome.broken_by == "the GPU takes no more work"
    assert outcome.winner is None
