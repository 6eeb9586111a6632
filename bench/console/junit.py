"""Write results as JUnit XML, so that CI systems show failures with their fixes.

Source of the elements: the schema of Jenkins' xUnit plugin, junit-10.xsd.
"""

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import masking
from bench.errors import ConfigError
from bench.history.regression import Change, Judgement
from bench.rules.check import Checked
from bench.rules.finding import Finding, errors

_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One test case; passed unless it has a failure or a reason why it was skipped."""

    group: str
    name: str
    failure: str = ""
    """In one line."""
    details: str = ""
    skipped: str = ""
    output: str = ""


def write(path: Path, suite: str, cases: Sequence[Case]) -> None:
    """Write one suite.

    Raises:
        ConfigError: the file cannot be written.
    """
    counts = {
        "tests": str(len(cases)),
        "failures": str(sum(bool(case.failure) for case in cases)),
        "errors": "0",
        "skipped": str(sum(bool(case.skipped) for case in cases)),
    }
    root = ET.Element("testsuites")
    element = ET.SubElement(root, "testsuite", {"name": _text(suite), **counts})
    for case in cases:
        _add(element, case)
    ET.indent(root)
    try:
        ET.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)
    except OSError as error:
        what = f"the file cannot be written: {error.strerror}"
        raise ConfigError(what, where=f"--junit {path}", fix="give --junit a file in a folder that exists") from error


def _add(suite: ET.Element, case: Case) -> None:
    element = ET.SubElement(suite, "testcase", classname=_text(case.group), name=_text(case.name))
    if case.failure:
        failure = ET.SubElement(element, "failure", message=_text(case.failure), type="failure")
        failure.text = _text(case.details or case.failure)
    elif case.skipped:
        ET.SubElement(element, "skipped", message=_text(case.skipped))
    if case.output:
        ET.SubElement(element, "system-out").text = _text(case.output)


def _text(text: str) -> str:
    """Return a text with secrets masked, and without characters that XML cannot hold."""
    return _NOT_XML.sub("?", masking.masked(text))


def of_checks(tiers: Iterable[Sequence[Checked]]) -> list[Case]:
    """Return one case for each check of the doctor; warnings are output of a case that passes."""
    return [_of_check(check) for checked in tiers for check in checked]


def _of_check(check: Checked) -> Case:
    failed = errors(check.findings)
    warnings = [finding for finding in check.findings if finding.severity != "error"]
    return Case(
        group=f"doctor.{check.tier}",
        name=check.what,
        failure="; ".join(finding.titled for finding in failed),
        details="\n\n".join(map(_finding, failed)),
        skipped=check.unknown,
        output="\n\n".join([*filter(None, [check.seen]), *map(_finding, warnings)]),
    )


def _finding(finding: Finding) -> str:
    return f"{finding.titled}\n  where: {finding.where}\n  fix:   {finding.fix}"


def of_judgements(judgements: Iterable[Judgement]) -> list[Case]:
    """Return one case for each measurement whose newest runs are compared with earlier ones."""
    return [_of_judgement(one) for one in judgements]


def _of_judgement(one: Judgement) -> Case:
    history = one.task_history
    is_worse = one.change is Change.regression
    newest = history.runs[-1].folder
    fix = f"runstop compare EARLIER {newest} shows which settings, hardware and software differ"
    return Case(
        group=f"history.{history.task}",
        name=f"{one.measurement} on {history.hardware}, settings {history.settings}",
        failure=f"regression: {one.text}" if is_worse else "",
        details=f"{one.text}\n  where: {newest}\n  fix:   {fix}" if is_worse else "",
        skipped=one.text if one.change is Change.not_judged else "",
        output="" if is_worse else f"{one.change}: {one.text}",
    )
