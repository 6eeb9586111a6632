"""Grades `runstop why` on composed logs: a known cause among healthy lines and the errors of other ranks.

    python experiments/grade_why.py [--seed N] [--logs 200] [--misses]

Each log is drawn from experiments/failure_texts.py: a cause on one rank, and what the other ranks, the launcher and
Slurm print because of it, in random order, so that consequences may come first. Lines have the labels of srun, of
torchrun, of kubectl, or none; the lines of a rank may be interleaved with those of others, and may be in a file of
their own. One log of ten has a cause that no rule describes, and one of twenty has no failure: there a rule is wrong.

Printed per rule: cases, how many were found, and how often the rule was named for another cause; then precision (named
and right, of all named) and recall (right, of all with a known cause), and the misses. The seed is drawn anew unless it
is given, so that `why` is not tuned to one set. Exit code 1: precision or recall is below 95 %.
"""

import argparse
import random
import secrets
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from failure_texts import AFTER_SLURM, AFTERWARDS, CAUSES, HEALTHY, NOT_KNOWN

from bench import diagnosis
from bench.diagnosis import UNKNOWN

LEAST = 0.95
SHARE_NOT_KNOWN, SHARE_HEALTHY = 0.1, 0.05
ENDS_OF_JOB = ("SLU-07", "SLU-08", "SLU-09", "SLU-10")
"""Slurm cancels the step for these reasons, so it prints no failed task before."""
STOPPED = ("SLU-07", "SLU-08")
"""The ranks lived until Slurm stopped them: what they print comes after, and no collective times out any more."""
BEFORE_RANKS = ("SLU-02", "PYX-02", "PYX-07", "ENR-01", "ENR-03", "ENR-07", "HST-04", "HST-05", "HST-06", "KUB-01")
"""No rank was started."""
BEFORE_COLLECTIVES = ("NCC-05", "NCC-08", "HW-03", "HW-04")
"""The ranks have not formed a group yet, so no collective can fail in another one."""
Label = Callable[[int], str]
LABELS: dict[str, Label] = {
    "none": lambda rank: "",
    "srun": lambda rank: f"{rank}: ",
    "torchrun": lambda rank: f"[default{rank % 8}]:",
    "kubectl": lambda rank: f"[pod/trainer-{rank // 8}/main] ",
}


@dataclass(frozen=True)
class Case:
    """One composed log."""

    rule: str
    """The rule of its cause, or `unknown`."""
    cause: str
    files: dict[str, str]


def composed(draw: random.Random) -> Case:
    """Return a log with a cause that is drawn, or without a known one."""
    kind = draw.random()
    if kind < SHARE_HEALTHY:
        return Case(UNKNOWN, "no failure", _files(draw, [], [], slurm=False))
    if kind < SHARE_HEALTHY + SHARE_NOT_KNOWN:
        text = draw.choice(NOT_KNOWN)
        return Case(UNKNOWN, text, _files(draw, [text], [], slurm=False))
    rule = draw.choice(sorted(CAUSES))
    text = draw.choice(CAUSES[rule])
    others = [] if rule in BEFORE_RANKS else draw.choices(AFTERWARDS, k=draw.randint(0, 5))
    if rule in BEFORE_COLLECTIVES:
        others = [other for other in others if not any(name in other for name in ("NCCL", "gloo"))]
    if rule in STOPPED:
        others = [other for other in others if "Watchdog caught" not in other]
    slurm = rule not in (*ENDS_OF_JOB, *BEFORE_RANKS)
    return Case(rule, text, _files(draw, [text], others, slurm=slurm, is_first=rule in STOPPED))


def _files(
    draw: random.Random, cause: Sequence[str], others: Sequence[str], *, slurm: bool, is_first: bool = False
) -> dict[str, str]:
    """Return the files of a run by name: lines of blocks in random order, those of Slurm last and in their order."""
    name = draw.choice(sorted(LABELS))
    culprit, num_ranks = draw.randrange(8), 16
    blocks = [(rank, draw.choice(HEALTHY)) for rank in draw.choices(range(num_ranks), k=draw.randint(5, 40))]
    failing = [(culprit, text) for text in cause] + [(draw.randrange(num_ranks), text) for text in others]
    if not is_first:
        draw.shuffle(failing)
    streams = [_lines(draw, LABELS[name], rank, text) for rank, text in (*blocks, *failing)]
    lines = (
        _interleaved(draw, streams)
        if draw.random() < 0.3 and not is_first
        else [line for stream in streams for line in stream]
    )
    if slurm and name == "srun" and cause:
        lines += [line for text in AFTER_SLURM for line in _lines(draw, LABELS[name], culprit, text)]
    if draw.random() < 0.3:
        own = [line for line in lines if line.startswith(LABELS[name](culprit) or "\0")]
        return {
            "slurm-513.out": "\n".join(line for line in lines if line not in own) + "\n",
            "rank.out": "\n".join(own),
        }
    return {"slurm-513.out": "\n".join(lines) + "\n"}


def _lines(draw: random.Random, label: Label, rank: int, text: str) -> list[str]:
    """Return the lines of a block with drawn names, labelled unless the launcher prints them."""
    names = {
        "node": f"{draw.choice(('dgx-', 'gpu', 'node'))}{rank // 8}",
        "rank": rank,
        "gpu": rank % 8,
        "pid": draw.randint(1000, 99999),
        "line": draw.randint(10, 999),
        "job": 513,
        "gib": f"{draw.uniform(0.1, 30):.2f}",
        "ip": f"10.{draw.randint(0, 99)}.{draw.randint(0, 99)}.{draw.randint(1, 99)}",
        "path": draw.choice(("/workspace/llm", "/opt/train", "/data/team/run7", "/home/me/finetune")),
    }
    lines = text.format(**names).split("\n")
    return [line.removeprefix("@job ") if line.startswith("@job ") else label(rank) + line for line in lines]


def _interleaved(draw: random.Random, streams: Sequence[list[str]]) -> list[str]:
    """Return the lines of all streams, each in its order, as ranks that print at once do."""
    left, lines = [list(reversed(stream)) for stream in streams], []
    window = left[:3]
    rest = left[3:]
    while window:
        stream = draw.choice(window)
        lines.append(stream.pop())
        if not stream:
            window.remove(stream)
            window += rest[:1]
            del rest[:1]
    return lines


def named(case: Case, folder: Path) -> str:
    """Return the rule that `why` names for a log."""
    folder.mkdir()
    for name, text in case.files.items():
        (folder / name).write_text(text)
    return diagnosis.explain([folder]).rule or UNKNOWN


def graded(cases: Sequence[Case], *, misses: bool) -> bool:
    """Grade `why` on the cases, print the table, and return whether both shares are high enough."""
    with tempfile.TemporaryDirectory() as folder:
        answers = [(case, named(case, Path(folder, str(number)))) for number, case in enumerate(cases)]
    all_of, right, false = Counter[str](), Counter[str](), Counter[str]()
    for case, answer in answers:
        all_of[case.rule] += 1
        right[case.rule] += answer == case.rule
        false[answer] += answer != case.rule
    print(f"{'rule':<8} {'cases':>6} {'found':>6} {'false':>6}")
    for rule in sorted({*all_of, *false}):
        print(f"{rule:<8} {all_of[rule]:>6} {right[rule]:>6} {false[rule]:>6}")
    num_right = sum(count for rule, count in right.items() if rule != UNKNOWN)
    num_named = sum(answer != UNKNOWN for _, answer in answers)
    num_known = sum(case.rule != UNKNOWN for case in cases)
    precision, recall = num_right / max(1, num_named), num_right / max(1, num_known)
    print(
        f"precision {precision:.1%} ({num_right} of {num_named} named), "
        f"recall {recall:.1%} ({num_right} of {num_known})"
    )
    for case, answer in answers:
        if answer != case.rule:
            print(f"miss: {case.rule} was named {answer}: {case.cause.splitlines()[-1][:120]}")
            if misses:
                print(
                    "".join(f"    {name}| {line}\n" for name, text in case.files.items() for line in text.splitlines())
                )
    return precision >= LEAST and recall >= LEAST


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, help="repeat the logs of a seed; by default a new one is drawn")
    parser.add_argument("--logs", type=int, default=200, help="number of logs (default 200)")
    parser.add_argument("--misses", action="store_true", help="also print the whole log of each miss")
    args = parser.parse_args()
    seed = secrets.randbits(31) if args.seed is None else args.seed
    draw = random.Random(seed)
    print(f"{args.logs} composed logs, seed {seed}")
    return 0 if graded([composed(draw) for _ in range(args.logs)], misses=args.misses) else 1


if __name__ == "__main__":
    sys.exit(main())
