"""What an API server answers to a dry run of the manifest, by the rule that a refusal breaks."""

from concurrent.futures import Future

import pytest

from bench.backends.kubernetes import checks
from bench.planning import compose
from bench.rules.check import Answer, Subject
from bench.rules.finding import Finding

OTHER = {"version": Answer(500, "InternalError", "not asked here"), "may create Job": Answer(403, "Forbidden", "no")}


def findings(answer: Answer) -> list[tuple[str, str]]:
    """Return rule and text of what is found in the answer to one object's dry run, beside other answers."""
    answers = dict[str, Future[Answer]]()
    for name, value in {**OTHER, "dry run of Job run-1": answer}.items():
        answers[name] = Future()
        answers[name].set_result(value)
    plan = compose.compose(["task=lora_tiny", "cluster=kubernetes", "container.image=image"])
    found = list(checks.accepted(Subject(plan, "", (), answers)))
    assert found[-1] == "1 objects"
    return [(one.rule, one.what) for one in found if isinstance(one, Finding)]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (Answer(200, "{}", ""), []),
        (Answer(409, "AlreadyExists", "it is there"), []),
        (Answer(404, "NotFound", "no such kind"), []),
        (Answer(403, "Forbidden", "you may not"), [("KUB-07", "refused: you may not")]),
        (Answer(403, "Forbidden", "exceeded quota: small"), [("KUB-11", "refused: exceeded quota: small")]),
        (Answer(422, "Invalid", "no such field"), [("KUB-15", "refused: no such field")]),
    ],
)
def test_a_refusal_breaks_the_rule_of_its_reason(answer: Answer, expected: list[tuple[str, str]]) -> None:
    assert findings(answer) == expected
