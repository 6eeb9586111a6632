"""Read the flight records of stalled ranks and the report of NCCL's RAS: which rank did not enter which collective.

A record is JSON, or a pickle that torch wrote at NCCL's time-out. A pickle can run any code when it is read, so only
lists, dicts, texts and numbers are accepted (`_Plain`).
"""

import io
import json
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.contract import regular_files, run_files
from bench.diagnosis.log_scan import shown

MAX_BYTES = 1 << 26
MAX_RANKS = 8
"""Ranks listed in a sentence."""
_RANK = re.compile(r"flight_(\d{1,7})(?:\.json)?")
_SECTIONS = ("Errors", "Warnings")
_RAS_LINES = 6


class _Plain(pickle.Unpickler):
    """Reads pickles of built-in containers, and refuses anything else."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(
            f"the pickle uses {module}.{name}, but may contain only lists, dicts, texts and numbers"
        )


@dataclass(frozen=True, slots=True)
class Collective:
    """The last collective that a rank has entered in a group."""

    group: str
    number: int
    name: str
    sizes: str
    is_over: bool
    since_ns: int


def cited(folder: Path) -> str | None:
    """Return what the flight records and RAS show about a stall; None without such files."""
    texts = [_stalled(records(folder)), *_ras(folder)]
    return "; ".join(filter(None, texts)) or None


def records(folder: Path) -> dict[int, Any]:
    """Return the readable records of a run folder by rank; of two of a rank, the one that our ranks wrote."""
    by_rank: dict[int, Any] = {}
    for path in sorted((folder / run_files.RANK_LOGS).glob("*flight_*"), key=lambda path: path.suffix == ".json"):
        if match := _RANK.search(path.name):
            with suppress(OSError, ValueError, EOFError, pickle.UnpicklingError, AttributeError, IndexError, KeyError):
                by_rank[int(match[1])] = _read(path)
    return by_rank


def _read(path: Path) -> Any:
    with regular_files.opened(path) as file:
        raw = file.read(MAX_BYTES)
    return json.loads(raw) if path.suffix == ".json" else _Plain(io.BytesIO(raw)).load()


def _last_collectives(record: Any) -> Iterator[Collective]:
    """Yield the last collective of each group in a record; damaged entries are skipped."""
    last: dict[str, Collective] = {}
    for entry in record.get("entries", ()) if isinstance(record, dict) else ():
        with suppress(KeyError, TypeError, ValueError, IndexError, AttributeError):
            if entry["is_p2p"]:
                continue
            one = Collective(
                group=str(entry["process_group"][0]),
                number=int(entry["collective_seq_id"]),
                name=str(entry["profiling_name"]).partition(":")[2] or str(entry["profiling_name"]),
                sizes=str(entry["input_sizes"]),
                is_over=bool(entry["retired"]) or entry["state"] == "completed",
                since_ns=int(entry["time_created_ns"]),
            )
            if one.number >= last.get(one.group, one).number:
                last[one.group] = one
    yield from last.values()


def _stalled(of_ranks: Mapping[int, Any]) -> str | None:
    """Return the sentence about the group that waits for the longest time, and has a rank that others wait for."""
    groups: dict[str, dict[int, Collective]] = {}
    for rank, record in sorted(of_ranks.items()):
        for one in _last_collectives(record):
            groups.setdefault(one.group, {})[rank] = one
    waiting = {group: [one for one in ranks.values() if not one.is_over] for group, ranks in groups.items()}
    order = sorted((group for group in waiting if waiting[group]), key=lambda g: min(w.since_ns for w in waiting[g]))
    sentences = [_of_group(groups[group], _named(group, of_ranks)) for group in order]
    blaming = [text for text, is_blaming in sentences if is_blaming]
    return next(iter(blaming or [text for text, _ in sentences]), None)


def _of_group(ranks: Mapping[int, Collective], group: str) -> tuple[str, bool]:
    """Return what a group waits for, and whether a rank is to blame."""
    furthest = max(one.number for one in ranks.values() if not one.is_over)
    inside = {rank: one for rank, one in ranks.items() if one.number == furthest and not one.is_over}
    behind = [rank for rank, one in ranks.items() if one.number < furthest]
    name = next(iter(inside.values())).name
    collective = f"collective {furthest:,} ({name}) of {group}"
    if behind:
        return f"flight recorder: {_who(behind)} did not enter {collective}, in which {_who(inside)} waited", True
    if len(calls := {(one.name, one.sizes) for one in inside.values()}) > 1:
        others = ", ".join(f"{name} of {sizes}" for name, sizes in sorted(calls))
        return f"flight recorder: ranks called different collectives as number {furthest:,} of {group}: {others}", True
    return f"flight recorder: {_who(inside)} entered {collective}, but it did not end", False


def _named(group: str, of_ranks: Mapping[int, Any]) -> str:
    """Return a group with its description, such as the one of megatron-core."""
    for record in of_ranks.values():
        for entry in record.get("entries", ()) if isinstance(record, dict) else ():
            with suppress(KeyError, TypeError, IndexError):
                if str(entry["process_group"][0]) == group:
                    about = str(entry["process_group"][1])
                    return "all ranks" if about == "default_pg" else shown(f"group {about or group}".encode())
    return f"group {group}"


def _who(ranks: Mapping[int, Any] | Sequence[int]) -> str:
    listed = sorted(ranks)
    more = f" and {len(listed) - MAX_RANKS} more" if len(listed) > MAX_RANKS else ""
    return f"rank{'s' * (len(listed) > 1)} {', '.join(map(str, listed[:MAX_RANKS]))}{more}"


def _ras(folder: Path) -> Iterator[str]:
    """Yield the first lines of the errors and warnings in the report of RAS."""
    for path in sorted((folder / run_files.RANK_LOGS).glob(f"*{run_files.RAS_ENDING}"))[:1]:
        with suppress(OSError), regular_files.opened(path) as file:
            lines = file.read(MAX_BYTES).decode(errors="replace").splitlines()
            starts = [n for n, line in enumerate(lines) if line.strip() in _SECTIONS]
            reported = [line.strip() for start in starts for line in lines[start + 2 : start + 2 + 2 * _RAS_LINES]]
            reported = [line for line in reported if line and line not in _SECTIONS and set(line) != {"="}]
            if reported:
                yield "NCCL RAS: " + shown(", ".join(dict.fromkeys(reported[:_RAS_LINES])).encode())
