"""Report the current line of each stalled rank, and determine which rank or network link caused the stall."""

import faulthandler
import json
import linecache
import os
import re
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from bench.errors import BenchError

_COLLECTIVE = f"{os.sep}torch{os.sep}distributed{os.sep}"
_WAIT = re.compile(r"\.wait\(")
"""Matches code that waits for a collective that was started earlier, as in megatron-core's pipelines."""
_ROOTS = (f"{os.sep}site-packages{os.sep}", f"{Path(__file__).parents[2]}{os.sep}")
"""Prefixes that are removed from shown paths."""
_MAX_CODE = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The report of one rank."""

    rank: int
    node: str
    phase: str
    step: int
    silent_s: float
    usual_s: float | None
    """Usual time of a step or an evaluation of this phase; None if none was measured."""
    at: str
    """The innermost line of the main thread's stack."""
    is_waiting: bool
    """Whether it waits for another rank, or for its GPU, which may wait for other GPUs."""


def current_line() -> tuple[str, bool]:
    """Return the innermost line of the main thread, and whether it waits for another rank there."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "no Python code", False
    code = _code(frame)
    return _shown(frame, code), _COLLECTIVE in frame.f_code.co_filename or bool(_WAIT.search(code))


def _code(frame: FrameType) -> str:
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()[:_MAX_CODE]


def _shown(frame: FrameType, code: str) -> str:
    file = frame.f_code.co_filename
    for root in _ROOTS:
        file = file.rpartition(root)[2]
    return f"{file}:{frame.f_lineno} in {frame.f_code.co_name}" + (f": {code}" if code else "")


def device_is_busy(gpu: int) -> bool:
    """Return whether this GPU of the node still has work. The host's line then does not show where the GPU waits."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return False
    with suppress(RuntimeError):  # a device error; the main thread raises it too
        return not torch.cuda.default_stream(gpu).query()
    return False


def write(path: Path, report: Report) -> None:
    """Write the report as one line of JSON, then the stacks of all threads; the file appears once it is complete."""
    part = path.with_name(path.name + ".part")
    with part.open("w") as file:
        file.write(json.dumps(asdict(report)) + "\n\n")
        file.flush()
        faulthandler.dump_traceback(file)
    part.rename(path)


def read(paths: Iterable[Path]) -> dict[int, Report]:
    """Return the reports by their ranks."""
    reports = {}
    for path in paths:
        with suppress(FileNotFoundError):  # it was just withdrawn
            report = Report(**json.loads(path.read_text().partition("\n")[0]))
            reports[report.rank] = report
    return reports


def verdict(
    reports: Mapping[int, Report], nodes: Sequence[str], stacks: str, *, ranks: Sequence[int] | None = None
) -> BenchError:
    """Return the error that names the cause of the stall. `ranks`: those that take part; None for all.

    `nodes` has the node of each rank, `stacks` names the files of the reports.

    A rank that is outside of a collective keeps the others waiting, even if some of them do not respond: a rank whose
    queue of kernels is full waits for its GPU in a call that may keep all its Python threads from running.
    """
    ranks = range(len(nodes)) if ranks is None else ranks
    silent = [rank for rank in ranks if rank not in reports]
    own = [nodes[rank] for rank in ranks]
    outside = [rank for rank, report in sorted(reports.items()) if not report.is_waiting]
    if silent and not outside:
        who, nodes_of = _places(silent, nodes), _names(nodes[rank] for rank in silent)
        blame = f"{who} did not respond and wrote no stack"
        fix = f"check {nodes_of}: either the process is stopped (state T in `ps`), or the node or its network is down; "
        fix += "then exclude the node and start the run again"
    elif outside:
        who, at = _places(outside, nodes), reports[outside[0]].at
        others = len(reports) - len(outside)
        blame = f"{who} stopped at {at}" + (f"; {others} other rank{'s' * (others > 1)} waited" if others else "")
        fix = f"check this line of code, and the whole stack in {stacks}"
        if silent:
            blame += f"; {_places(silent, nodes)} did not respond and wrote no stack"
            fix += f"; if this line is not the cause, check {_names(nodes[rank] for rank in silent)}"
    else:
        who = f"the network between {_names(own)}" if len(set(own)) > 1 else f"a link or a GPU of {own[0]}"
        blame = f"every rank waited for data that did not arrive; likely cause: {who}; "
        blame += f"rank {min(reports)} at {_first(reports).at}"
        fix = f"check the links and switches of {_names(own)} (`ibstat`, `ip -s link`, `dmesg -T`), then start again"
    what = f"{blame}; {_duration(reports[outside[0]] if outside else _first(reports))}"
    return BenchError(what, where=stacks, fix=fix, rule="RUN-17")


def _first(reports: Mapping[int, Report]) -> Report:
    return reports[min(reports)]


def _duration(report: Report) -> str:
    usual = "" if report.usual_s is None else f" (usual: {report.usual_s:.3g} s)"
    noun = "point" if report.phase == "measuring" else "step"
    return f"no progress for {report.silent_s:,.0f} s in {report.phase} after {noun} {report.step}{usual}"


def _places(ranks: Sequence[int], nodes: Sequence[str]) -> str:
    """Return ranks with their nodes: rank 3 on dgx-1, ranks 8, 9 on dgx-2."""
    by_node: dict[str, list[int]] = {}
    for rank in ranks:
        by_node.setdefault(nodes[rank], []).append(rank)
    return ", ".join(f"rank{'s' * (len(on) > 1)} {_names(on)} on {node}" for node, on in by_node.items())


def _names(values: Iterable[object]) -> str:
    """Return the distinct values, at most 8 of them."""
    names = list(dict.fromkeys(map(str, values)))
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
