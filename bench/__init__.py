"""Run LLM benchmarks from a config to a checked, MLPerf-style score.

The names below are the public interface; `docs/api.md` has an example of each function. A name is imported on first
use, since ranks import this package for its contract alone.
"""

import sys

_ROOT = __file__[: -len("/bench/__init__.py")]

if sys.argv[:1] == ["-m"] and not getattr(sys.flags, "safe_path", False) and sys.path[0] != _ROOT:
    # `python -m bench VERB` puts the working directory first in sys.path, and so does an empty entry of PYTHONPATH. It
    # may be a run folder of another user, whose argparse.py would run. A checkout keeps its own folder.
    sys.path[:] = [path for path in sys.path if path not in ("", sys.path[0])]

from typing import TYPE_CHECKING, Any  # noqa: E402

if TYPE_CHECKING:
    from bench.contract.plan import Plan
    from bench.diagnosis import Explanation, explain
    from bench.errors import BenchError, ConfigError, LogError, SubmitError
    from bench.history.compare import Compared
    from bench.history.compare import compare_runs as compare
    from bench.launch.submit import job, submit
    from bench.mlperf.forecast import Forecast, forecast
    from bench.mlperf.official import Verdict, official_verdict
    from bench.mlperf.published import samples_to_target
    from bench.mlperf.published import systems as published_systems
    from bench.mlperf.reader import Event, Follower
    from bench.mlperf.reader import read as read_log
    from bench.mlperf.result import Result, parse
    from bench.mlperf.score import Score, score
    from bench.mlperf.system_tables import System
    from bench.planning.compose import compose as plan
    from bench.report import write as write_report
    from bench.report import write_study
    from bench.report.sets import load as load_sets
    from bench.results.study import StudyResult
    from bench.runs.result import RunResult
    from bench.runs.result import read as read_run
    from bench.studies import read as read_study
    from bench.watch.lines import View
    from bench.watch.replay import replay

    __version__: str

_PUBLIC = {
    "BenchError": "bench.errors:BenchError",
    "ConfigError": "bench.errors:ConfigError",
    "LogError": "bench.errors:LogError",
    "SubmitError": "bench.errors:SubmitError",
    "Plan": "bench.contract.plan:Plan",
    "plan": "bench.planning.compose:compose",
    "Compared": "bench.history.compare:Compared",
    "compare": "bench.history.compare:compare_runs",
    "job": "bench.launch.submit:job",
    "submit": "bench.launch.submit:submit",
    "RunResult": "bench.runs.result:RunResult",
    "read_run": "bench.runs.result:read",
    "Event": "bench.mlperf.reader:Event",
    "Follower": "bench.mlperf.reader:Follower",
    "read_log": "bench.mlperf.reader:read",
    "Result": "bench.mlperf.result:Result",
    "parse": "bench.mlperf.result:parse",
    "Verdict": "bench.mlperf.official:Verdict",
    "official_verdict": "bench.mlperf.official:official_verdict",
    "Score": "bench.mlperf.score:Score",
    "score": "bench.mlperf.score:score",
    "System": "bench.mlperf.system_tables:System",
    "published_systems": "bench.mlperf.published:systems",
    "samples_to_target": "bench.mlperf.published:samples_to_target",
    "Forecast": "bench.mlperf.forecast:Forecast",
    "forecast": "bench.mlperf.forecast:forecast",
    "View": "bench.watch.lines:View",
    "replay": "bench.watch.replay:replay",
    "Explanation": "bench.diagnosis:Explanation",
    "explain": "bench.diagnosis:explain",
    "load_sets": "bench.report.sets:load",
    "write_report": "bench.report:write",
    "StudyResult": "bench.results.study:StudyResult",
    "read_study": "bench.studies:read",
    "write_study": "bench.report:write_study",
}
"""Each public name, with the module and attribute that define it."""

__all__ = (  # in the order of docs/api.md; a literal, so that editors and type checkers can read it
    "BenchError",
    "Compared",
    "ConfigError",
    "Event",
    "Explanation",
    "Follower",
    "Forecast",
    "LogError",
    "Plan",
    "Result",
    "RunResult",
    "Score",
    "StudyResult",
    "SubmitError",
    "System",
    "Verdict",
    "View",
    "compare",
    "explain",
    "forecast",
    "job",
    "load_sets",
    "official_verdict",
    "parse",
    "plan",
    "published_systems",
    "read_log",
    "read_run",
    "read_study",
    "replay",
    "samples_to_target",
    "score",
    "submit",
    "write_report",
    "write_study",
)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in _PUBLIC:
        raise AttributeError(f"module 'bench' has no attribute {name!r}")
    from importlib import import_module

    module, attribute = _PUBLIC[name].split(":")
    value = globals()[name] = getattr(import_module(module), attribute)
    return value


def __dir__() -> "list[str]":  # quoted for Python 3.8, which bench.installed refuses
    return sorted({*globals(), *__all__, "__version__"})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("runstop")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "unknown: not installed"
