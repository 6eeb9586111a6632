"""Test the registry: every rule has a title and a fix, and every ID in the code is in it."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bench
import jobs
from bench.diagnosis import log_scan
from bench.errors import BenchError
from bench.rules import RULES
from bench.rules.finding import broken, errors
from bench.rules.signs import SIGNS, Sign
from helpers.examples import in_proportion

IDS = re.compile(r"\b(?:PYX|SLU|HST|ENR|MPI|NCC|HW|CFG|RUN|LOG|REC|EVL|SCO|PCK|KUB|RAY|SRV)-\d\d\b")
PACKAGES = [Path(package.__file__).parent for package in (bench, jobs)]
SOURCES = sorted(path for package in PACKAGES for name in ("*.py", "*.sh") for path in package.rglob(name))


def test_every_rule_has_a_title_and_a_fix() -> None:
    for id, rule in RULES.items():
        assert IDS.fullmatch(id) and rule.id == id
        assert rule.title and rule.fix and rule.title != rule.fix
        assert "\n" not in rule.title + rule.fix
    assert len({rule.title for rule in RULES.values()}) == len(RULES)


def test_every_id_is_defined_once() -> None:
    defined = [
        id
        for path in SOURCES
        if path.parent.name == "rules" and not path.stem.startswith("signs")
        for id in re.findall(r'^    "(\S+)": \(', path.read_text(), re.M)
    ]
    assert sorted(defined) == sorted(RULES)


@pytest.mark.long
def test_code_uses_known_rules_only() -> None:
    assert {
        source.name: names for source in SOURCES if (names := set(IDS.findall(source.read_text())) - RULES.keys())
    } == {}


def test_no_python_message_begins_with_a_rule_id() -> None:
    """Errors and findings have the rule in a field; only shell scripts put it into their text."""
    message = re.compile(rf"""["']{IDS.pattern}: """)
    assert [path for path in SOURCES if path.suffix == ".py" and message.search(path.read_text())] == []


@pytest.mark.parametrize(
    ("rule", "what", "shown"),
    [
        (None, "no file", "no file"),
        ("CFG-06", "no file", "CFG-06: no file"),
        ("CFG-06", "CFG-06: none", "CFG-06: none"),
    ],
)
def test_error_shows_its_rule_once_and_keeps_it_as_a_field(rule: str | None, what: str, shown: str) -> None:
    error = BenchError(what, where="here", fix="do this", rule=rule)
    assert (error.rule, error.what) == (rule, what)
    assert str(error) == f"{shown}\n  where: here\n  fix:   do this"


def test_errors_of_findings() -> None:
    error = broken("CFG-06", "no rows", "/data")
    warning = broken("ENR-11", "no record", "a.sqsh", fix="import it again", severity="warning", line=3)
    assert errors([warning, error]) == [error]
    assert (error.fix, warning.fix, warning.line) == (RULES["CFG-06"].fix, "import it again", 3)
    assert str(warning) == "warning ENR-11: no record (a.sqsh); import it again"


def test_signs_belong_to_rules() -> None:
    assert {sign.rule for sign in SIGNS} <= RULES.keys()
    assert sum(len(rule.signs) for rule in RULES.values()) == len(SIGNS)


def test_lines_of_a_healthy_run_contain_no_keyword() -> None:
    """Otherwise every line would be searched with every pattern."""
    lines = (
        b"[rank3]: step 120 of 800, loss 1.3072, lr 3.9e-4",
        b'{"key": "train_loss", "value": 1.3}',
        b"8 ranks, 1 GPU each",
    )
    for line in lines:
        assert [key for key in log_scan.keywords_of_signs() if key in line.translate(log_scan.FOLD)] == []


@pytest.mark.parametrize("sign", SIGNS, ids=lambda sign: sign.rule)
@given(data=st.data())
@settings(max_examples=in_proportion(8))
def test_every_match_of_a_sign_contains_a_keyword(sign: Sign, data: st.DataObject) -> None:
    text = data.draw(st.from_regex(sign.pattern))
    folded = text.translate(log_scan.FOLD)
    assert any(key in folded for key in log_scan.keywords_of_pattern(sign.pattern))
    assert any(key in folded for key in log_scan.keywords_of_signs())
