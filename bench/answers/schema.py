"""The answers of `--json`, one class for each kind.

The classes are the contract: tests/console/test_json_answers.py writes docs/json.md and docs/schemas/ from them, and
compares both with the kept copies.

Every answer names its schema: runstop/KIND/MAJOR.MINOR. A new field raises MINOR. A field that is removed, is renamed,
or changes its type or meaning raises MAJOR.

One thing has one name in all answers. Units are in names: `_ms`, `_s`, `_min`, `_gib`. Times are ISO 8601 in UTC.
"""

from collections.abc import Mapping

import msgspec

from bench.answers.base import Answer, Evaluation, Part
from bench.answers.results import (
    Checker,
    Clue,
    ComparedValues,
    Comparison,
    Diagnosis,
    Difference,
    HistoryRun,
    ImportedLoad,
    LogPattern,
    Node,
    NodeFinding,
    Package,
    Regression,
    Rule,
    Score,
    ScoredTrial,
    ServedLoad,
    Span,
    Study,
    StudyPlan,
    StudyTitle,
    Trial,
    TrialVerdict,
    Verification,
)
from bench.answers.runs import (
    Calibration,
    Check,
    Coming,
    Doctor,
    Download,
    DownloadPlan,
    Image,
    Layout,
    LogLine,
    Plan,
    Progress,
    Run,
    Scaling,
    Script,
    WatchedTrial,
    WrongFile,
)

__all__ = (
    "ANSWERS",
    "Answer",
    "Calibration",
    "Check",
    "Checker",
    "Clue",
    "Coming",
    "ComparedValues",
    "Comparison",
    "Diagnosis",
    "Difference",
    "Doctor",
    "Download",
    "DownloadPlan",
    "Evaluation",
    "HistoryRun",
    "Image",
    "ImportedLoad",
    "Layout",
    "LogLine",
    "LogPattern",
    "Node",
    "NodeFinding",
    "Package",
    "Part",
    "Plan",
    "Progress",
    "Regression",
    "Rule",
    "Run",
    "Score",
    "ScoredTrial",
    "Scaling",
    "Script",
    "ServedLoad",
    "Span",
    "Study",
    "StudyPlan",
    "StudyTitle",
    "Trial",
    "TrialVerdict",
    "Verification",
    "WatchedTrial",
    "WrongFile",
)

ANSWERS: Mapping[str, tuple[type[msgspec.Struct], ...]] = {
    "plan": (Plan, Layout, Scaling),
    "doctor": (Doctor,),
    "render": (Script,),
    "runs": (Run,),
    "logs": (LogLine,),
    "watch": (Progress,),
    "parse": (TrialVerdict, ImportedLoad),
    "why": (Diagnosis,),
    "rules": (Rule,),
    "score": (Score,),
    "report": (Trial,),
    "pack": (Package,),
    "verify": (Verification,),
    "compare": (Comparison,),
    "history": (HistoryRun, Regression),
    "nodes": (Node,),
    "study": (Study, StudyPlan, StudyTitle),
    "image": (Image,),
    "fetch": (DownloadPlan, Download),
    "calibrate": (Calibration,),
}
"""The answers of each verb."""
