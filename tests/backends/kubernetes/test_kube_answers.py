"""Answers of an API server to a dry run of the manifest, and the rules that a refusal breaks."""

from concurrent.futures import Future

import pytest

from bench.backends.kubernetes import checks
from bench.planning import compose
from bench.rules.check import Answer, Subject
from bench.rules.finding import Finding

REFUSED = "the API server refuses the object"
OTHER = {"version": Answer(500, "InternalError", "not queried here"), "may create Job": Answer(403, "Forbidden", "no")}


def findings(answer: Answer) -> list[tuple[str, str]]:
    """Return rule and message of the findings for the answer to one object's dry run, among other answers."""
    answers = dict[str, Future[Answer]]()
    for name, value in {**OTHER, "dry run of Job run-1": answer}.items():
        answers[name] = Future()
        answers[name].set_result(value)
    plan = compose.compose(["task=lora_tiny", "cluster=kubernetes", "container.image=image"])
    outcomes = list(checks.accepted(Subject(plan, "", (), answers)))
    assert outcomes[-1] == "1 objects"
    return [(one.rule, one.what) for one in outcomes if isinstance(one, Finding)]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (Answer(200, "{}", ""), []),
        (Answer(409, "AlreadyExists", "it is there"), []),
        (Answer(404, "NotFound", "no such kind"), []),
        (Answer(403, "Forbidden", "you may not"), [("KUB-07", f"{REFUSED}: you may not")]),
        (
            Answer(403, "Forbidden", "exceeded quota: small"),
            [("KUB-11", f"{REFUSED}: exceeded quota: small")],
        ),
        (Answer(422, "Invalid", "no such field"), [("KUB-15", f"{REFUSED}: no such field")]),
    ],
)
def test_a_refusal_breaks_the_rule_of_its_reason(answer: Answer, expected: list[tuple[str, str]]) -> None:
    assert findings(answer) == expected
