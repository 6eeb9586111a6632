"""One registry: every rule says what is wrong and what to do, and every id in the code is one of its."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bench
from bench.diagnosis import words
from bench.rules import RULES
from bench.rules.signs import SIGNS, Sign

IDS = re.compile(r"\b(?:PYX|SLU|ENR|MPI|NCC|HW|CFG|RUN|LOG|REC|EVL|SCO|PCK)-\d\d\b")
SOURCES = sorted(Path(bench.__file__).parent.rglob("*.py"))


def test_every_rule_says_what_is_wrong_and_what_to_do() -> None:
    for id, rule in RULES.items():
        assert IDS.fullmatch(id) and rule.id == id
        assert rule.title and rule.fix and rule.title != rule.fix
        assert "\n" not in rule.title + rule.fix
    assert len({rule.title for rule in RULES.values()}) == len(RULES)


def test_no_id_stands_twice_in_the_sources_of_the_registry() -> None:
    defined = [
        id
        for path in SOURCES
        if path.parent.name == "rules" and path.stem != "signs"
        for id in re.findall(r'^    "(\S+)": \(', path.read_text(), re.M)
    ]
    assert sorted(defined) == sorted(RULES)


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_the_code_names_known_rules_only(source: Path) -> None:
    assert set(IDS.findall(source.read_text())) <= RULES.keys()


def test_signs_belong_to_rules() -> None:
    assert {sign.rule for sign in SIGNS} <= RULES.keys()
    assert sum(len(rule.signs) for rule in RULES.values()) == len(SIGNS)


@pytest.mark.parametrize("sign", SIGNS, ids=lambda sign: sign.rule)
@given(data=st.data())
@settings(max_examples=8)
def test_whatever_a_sign_matches_holds_a_word_that_is_looked_for(sign: Sign, data: st.DataObject) -> None:
    text = data.draw(st.from_regex(sign.pattern))
    folded = text.translate(words.FOLD)
    assert any(word in folded for word in words.of_pattern(sign.pattern))
    assert any(word in folded for word in words.of_signs())
