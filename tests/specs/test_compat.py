"""Facts about Megatron's releases, and that nothing else knows them."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
from packaging.version import Version

import primus_turbo_plugin
from primus_turbo_plugin.errors import UnsupportedError
from primus_turbo_plugin.specs import compat

pytestmark = pytest.mark.megatron

PACKAGE = Path(primus_turbo_plugin.__file__).parent


def test_release_older_than_the_oldest_is_refused_with_the_remedy() -> None:
    with pytest.raises(UnsupportedError, match=r"0\.15\.3 is installed.*needs 0\.16.*pip install"):
        compat.facts_of(Version("0.15.3"))


def test_release_newer_than_tested_warns_and_names_the_tested_ones() -> None:
    with pytest.warns(UserWarning, match=r"0\.21\.0 is newer.*0\.16, 0\.17, 0\.18, 0\.19"):
        compat.facts_of(Version("0.21.0"))


@pytest.mark.parametrize("text", ["0.16.0", "0.16.1", "0.17.1", "0.18.2", "0.19.0", "0.19.2", "0.19.5rc1"])
def test_tested_releases_are_silent(text: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compat.facts_of(Version(text)).version == Version(text)


def test_facts_change_where_the_docstring_says() -> None:
    """Each fact has a last release that needs it; the branch that reads it goes with that release."""
    by_release = {release: compat.facts_of(Version(f"{release}.0")) for release in compat.TESTED}
    assert [f.experts_are_a_pair for f in by_release.values()] == [True, False, False, False]
    assert [f.mtp_inner_slot == "transformer_layer" for f in by_release.values()] == [True, False, False, False]
    assert [f.cp_comm_type_list_is_shifted for f in by_release.values()] == [True, False, False, False]
    assert [f.hybrid_package for f in by_release.values()] == ["ssm.mamba_block"] * 2 + [
        "models.hybrid.hybrid_block"
    ] * 2


def test_facts_hold_in_the_installed_release() -> None:
    """What the release itself shows must agree with what its number says."""
    import inspect

    from megatron.core.models import backends
    from megatron.core.transformer import multi_token_prediction

    facts = compat.facts()
    slots = multi_token_prediction.MultiTokenPredictionLayerSubmodules.__dataclass_fields__
    assert facts.mtp_inner_slot in slots
    experts = backends.LocalSpecProvider().grouped_mlp_modules
    assert facts.experts_are_a_pair == (len(inspect.signature(experts).parameters) == 2)
    stack, submodules = compat.hybrid_classes()
    assert "attention_layer" in submodules.__dataclass_fields__
    assert issubclass(stack, object)


#: (what must not appear, why it would be a second place that knows releases)
FORBIDDEN = {
    r"hasattr\(": "ask compat for a named fact",
    r"(?:__version__|VERSION|package_info)\S*\s*[<>=!]=?|[<>]=?\s*Version\(|is_mcore_min_version": "compare versions in compat",
    r"try:\s*\n\s*(?:from|import) megatron": "an import that a release may lack belongs in compat",
}
#: Files whose subject is what is installed, or which parse versions of other packages.
ELSEWHERE = {"specs/compat.py", "diagnostics/inventory.py", "diagnostics/config_check.py"}


@pytest.mark.parametrize("pattern", FORBIDDEN)
def test_nothing_else_knows_megatrons_releases(pattern: str) -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        text = path.read_text()
        if name not in ELSEWHERE and "megatron" in text:
            found += [f"{name}: {match.group(0)!r}" for match in re.finditer(pattern, text)]
    assert not found, f"{FORBIDDEN[pattern]}: {found}"
