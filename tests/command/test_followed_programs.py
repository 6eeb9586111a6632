"""The runner follows a program whose output and end the test sets, by a clock of the test."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.contract import mllog, plan_kinds, run_files
from bench.contract.plan_kinds import TrainingPlan
from bench.contract.program import Per
from bench.contract.stall import Stall
from bench.errors import BenchError
from bench.planning import compose
from helpers import written_records
from jobs.command import describe, run
from jobs.ranks.guard import Guard
from jobs.ranks.identity import Rank
from jobs.ranks.program import Begun

WORDS = (
    *("task=my_program", "cluster=local", "cluster.device=cpu"),
    *("engine.command.argv=[train,'{seed}']", "recipe.log_every_steps=1"),
)
PLAIN = (
    "engine.command.adapter=plain",
    r"engine.command.patterns=['step (?P<step>\d+) loss (?P<loss>\S+)','all (?P<total_time_s>\S+)']",
)


BEGUN = (
    "stop init_stop",
    "start run_start",
    '. timed_from 1 {"samples_count": 4, "step": 1}',
    'start block_start {"samples_count": 4, "step": 1}',
)


@dataclass
class Scripted:
    """A program: at each time it prints bytes; from `ended_s` on it has its exit code."""

    prints: list[tuple[float, bytes]]
    ended_s: float
    code: int = 0
    is_kept_open: bool = False
    """Whether another process still holds the output open after the last time."""
    left_behind: list[str] = field(default_factory=list)
    now_s: float = 100.0
    stopped_within_s: float | None = None
    started: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        self.prints = [*self.prints]  # `read` empties it

    def __call__(self, argv: list[str], environment: dict[str, str], folder: Path) -> "Scripted":
        self.started = (argv, environment, folder)
        return self

    def read(self, wait_s: float) -> bytes:
        if self.prints:
            self.now_s, chunk = self.prints.pop(0)
            return chunk
        self.now_s += wait_s
        return b""

    @property
    def is_open(self) -> bool:
        return bool(self.prints) or self.is_kept_open or self.now_s < self.ended_s

    @property
    def exit_code(self) -> int | None:
        return self.code if self.now_s >= self.ended_s else None

    def state(self) -> str:
        return "train (7) is sleeping"

    def left(self) -> list[str]:
        return self.left_behind

    def stop(self, within_s: float) -> None:
        self.stopped_within_s = within_s


@pytest.fixture(scope="module")
def plan() -> TrainingPlan:
    return planned(*PLAIN)


def with_program(plan: TrainingPlan, **settings: Any) -> TrainingPlan:
    """Return the plan with other settings of its program."""
    assert plan.config.program is not None
    return replace(
        plan,
        config=replace(
            plan.config, engine=replace(plan.config.engine, command=replace(plan.config.program, **settings))
        ),
    )


def planned(*overrides: str) -> TrainingPlan:
    words = (*WORDS, "task.training.max_steps=2", "recipe.global_batch_size=4")
    return plan_kinds.required(compose.compose([*words, *overrides]), TrainingPlan)


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return a function that follows a program to its end, and returns the records of its log."""
    monkeypatch.setattr(describe, "system", lambda plan: {"num_ranks": plan.world.num_ranks})
    monkeypatch.setenv("SLURMD_NODENAME", "node1")
    logs: list[mllog.Writer] = []

    def follow(plan: TrainingPlan, program: Scripted, *, rank: int = 0) -> list[str]:
        monkeypatch.setattr(run, "Child", program)
        monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=lambda: program.now_s))
        path = tmp_path / f"log{len(logs)}"
        logs.append(mllog.Writer(path if rank == 0 else None))
        begun = Begun(
            plan, plan.trials[0], Rank(rank, rank, 2, "here", 1234), logs[-1], tmp_path, Guard(tmp_path / "error")
        )

        def end() -> list[str]:
            begun.guard.finish()
            return written_records.of_log(path)

        follow.end = end
        run.run(begun)
        return written_records.of_log(path) if rank == 0 else []

    yield follow
    for log in logs:
        log.close()


def test_the_whole_log_of_a_program(
    plan: TrainingPlan, followed: Any, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """What was printed before and after the end is read, also the last line without a line break."""
    (tmp_path / "rank_logs").mkdir()
    (tmp_path / run_files.caches(0)).write_text("node1 cleared\n")
    program = Scripted([(101.0, b"step 1 lo"), (103.0, b"ss 5.5\nall 3.5\n"), (103.5, b"step 2 loss 4.5")], 103.25)
    records = followed(plan, program)
    argv, environment, folder = program.started
    assert (argv, environment["MASTER_PORT"], folder) == (["train", "1"], "1234", tmp_path)
    assert "RANK" not in environment and capfd.readouterr().out == "step 1 loss 5.5\nall 3.5\nstep 2 loss 4.5"
    assert (tmp_path / "rank_logs/trial_0.output").is_dir()
    assert (tmp_path / run_files.program_checkpoints(0)).is_dir()
    assert records == [
        '. cache_clear true {"node": "node1"}',
        "start init_start",
        '. program ["train", "{seed}"] {"per": "job", "adapter": "plain", "placeholders": ["seed"]}',
        '. initial_weights "program"',
        '. data_source "program"',
        '. submission_division "open"',
        '. submission_org "runstop (my_program: not a submission)"',
        '. submission_platform "local machine (my_program: not a submission)"',
        '. submission_status "research"',
        ". seed 1",
        ". global_batch_size 4",
        '. config_filename "task/my_program.yaml"',
        ". num_ranks 2",
        *BEGUN,
        '. train_loss 5.5 {"samples_count": 4, "step": 1, "by_program": true}',
        '. train_loss 4.5 {"samples_count": 8, "step": 2, "by_program": true}',
        '. tracked_stats {"train_step_time": 0.5, "throughput": 8.0, "step_times": [0.5]} '
        '{"samples_count": 8, "step": 2}',
        '. program_output 0 {"lines": 3, "bytes": 39, "not_kept_bytes": 0, "unreadable": 0, "first_unreadable": "", '
        '"runner_s": 3.5, "by_program": {"total_time_s": 3.5}}',
        'stop block_stop {"samples_count": 8, "step": 2}',
        'stop run_stop {"samples_count": 8, "step": 2, "status": "success"}',
    ]


BOTH_STEPS = b"step 1 loss 5\nstep 2 loss 4\n"


@pytest.mark.parametrize(
    ("program", "rule", "what"),
    [
        (
            Scripted([(101.0, b"no GPU\n \n")], 102.0, code=3),
            "RUN-20",
            "the program of rank 0 ended with exit code 3; its last line: no GPU",
        ),
        (
            Scripted([(101.0, b"step 1 loss 5\n"), (102.0, b"los")], 101.5, code=-9),
            "RUN-20",
            "the program of rank 0 ended with signal 9 (Killed); its last line: los",
        ),
        (
            Scripted([(101.0, BOTH_STEPS)], 102.0, left_behind=list("abcdefghi")),
            "RUN-22",
            "still run: a, b, c, d, e, f, g, h",
        ),
        (Scripted([(101.0, b"nothing to read\n")], 102.0), "RUN-21", "the adapter has found no training step"),
        (Scripted([(101.0, b"step 1 loss nan\n")], 102.0), "RUN-05", "the training loss is nan at step 1,"),
    ],
)
def test_a_program_that_fails(plan: TrainingPlan, followed: Any, program: Scripted, rule: str, what: str) -> None:
    with pytest.raises(BenchError) as raised:
        followed(plan, replace(program))
    assert raised.value.rule == rule and what in str(raised.value.what)


def test_the_end_of_a_program_that_must_end(
    plan: TrainingPlan, followed: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """It gets its time to stop, what it still prints is kept but not read, and its log is aborted."""
    program = Scripted(
        [(101.0, b"step 1 loss 5\n"), (102.0, b"step 2 loss nan\n"), (103.0, b"rest\n"), (104.0, b"!")], 103.5
    )
    with pytest.raises(BenchError, match="the training loss is nan at step 2"):
        followed(plan, program)
    records = followed.end()
    assert program.stopped_within_s == 5.0 and capfd.readouterr().out == "step 1 loss 5\nstep 2 loss nan\nrest\n!"
    assert records[records.index(BEGUN[-1]) + 1 :] == [
        '. train_loss 5.0 {"samples_count": 4, "step": 1, "by_program": true}',
        '. program_output 0 {"lines": 2, "bytes": 36, "not_kept_bytes": 0, "unreadable": 0, "first_unreadable": "", '
        '"runner_s": 4.0}',
        'stop run_stop {"status": "aborted"}',
    ]


@pytest.mark.parametrize(
    ("program", "read_until_s"),
    [
        (Scripted([(101.0, BOTH_STEPS)], 101.0), 101.0),
        (Scripted([(101.0, BOTH_STEPS), (103.0, b"")], 101.0, is_kept_open=True), 103.1),
        (Scripted([(101.0, BOTH_STEPS), (103.5, b"worker\n")], 101.0, is_kept_open=True), 103.6),
        (Scripted([(101.0, BOTH_STEPS), *((101 + n / 2, b"x\n") for n in range(1, 30))], 101.0), 105.5),
        (Scripted([(101.0, b"x\n"), (101.1, b"")], 101.0, code=1, is_kept_open=True), 101.1),
    ],
)
def test_output_is_read_for_two_seconds_after_the_end(
    plan: TrainingPlan, followed: Any, program: Scripted, read_until_s: float
) -> None:
    """It is read twice as long if another process floods it, and not after a failure, which must be reported first."""
    script = replace(program)
    if program.code:
        with pytest.raises(BenchError, match="exit code 1"):
            followed(plan, script)
    else:
        followed(plan, script)
    assert script.now_s == pytest.approx(read_until_s)


def test_the_output_of_other_ranks_is_only_kept(plan: TrainingPlan, followed: Any) -> None:
    per_rank = with_program(plan, per=Per.rank)
    assert followed(per_rank, Scripted([(101.0, b"step 1 loss nan\n"), (500.0, b"")], 600.0), rank=1) == []
    with pytest.raises(BenchError, match="the program of rank 1 ended with exit code 1"):
        followed(per_rank, Scripted([], 101.0, code=1), rank=1)
    idle = Scripted([], 101.0)
    assert followed(plan, idle, rank=1) == [] and idle.started == (), "it starts on rank 0 only"


def test_a_program_that_stalls_is_ended_with_its_state_and_its_last_line(plan: TrainingPlan, followed: Any) -> None:
    lines = [(100.0 + 10 * step, b"step %d loss 4\n" % step) for step in (1, 2, 3)]
    program = Scripted([*lines, (131.0, b"saving\n"), (331.0, b""), (331.5, b"")], 900.0)
    with pytest.raises(BenchError) as raised:
        followed(plan, program)
    assert (raised.value.rule, raised.value.where, program.now_s) == ("RUN-17", "node1, engine.command", 331.5)
    assert raised.value.what == (
        "no progress for 200 s in training after step 3 (usual: 10 s): the program printed nothing; "
        "train (7) is sleeping; its last line: saving"
    )


def test_the_file_of_a_program_is_read_while_it_grows_and_again_if_it_becomes_shorter(
    plan: TrainingPlan, followed: Any, tmp_path: Path
) -> None:
    """Printed lines then say nothing, but are counted. The last line of the file has no line break."""
    path = tmp_path / "train.log"

    class Writing(Scripted):
        def read(self, wait_s: float) -> bytes:
            chunk = super().read(wait_s)
            if chunk:
                path.write_bytes(chunk)
            return b"printed\n" if chunk else b""

    contents = (b"step 1 l", b"step 1 loss 5\nall 90000\n", b"step 2 loss 4")
    script = Writing([(101.0, b""), *((102.0 + place, text) for place, text in enumerate(contents))], 105.0)
    records = followed(with_program(plan, file=str(path)), script)
    assert [one.split(" {")[0] for one in records[records.index(BEGUN[-1]) + 1 :] if "tracked" not in one] == [
        ". train_loss 5.0",
        ". train_loss 4.0",
        ". program_output 0",
        "stop block_stop",
        "stop run_stop",
    ]
    assert '"lines": 3, "bytes": 24' in records[-3] and '"total_time_s": 90000.0' in records[-3]


def test_damaged_records_are_counted_and_the_first_one_is_logged(followed: Any) -> None:
    good = ':::MLLOG {"namespace": "", "time_ms": 1, "event_type": "%s", "key": "%s", "value": null, "metadata": {}}\n'
    lines = [
        (good % ("POINT_IN_TIME", "other" * 60)).replace("null", "NaN"),
        ':::MLLOG {"key": \n',
        good % ("INTERVAL_START", "run_start"),
        good % ("POINT_IN_TIME", "program_output"),
        good % ("INTERVAL_END", "run_stop"),
    ]
    records = followed(planned(), Scripted([(101.0, "".join(lines).encode())], 102.0))
    [output] = [json.loads(one.split(" ", 3)[3]) for one in records if one.startswith(". program_output")]
    assert (output["lines"], output["unreadable"], len(output["first_unreadable"])) == (5, 3, 200)
    assert output["first_unreadable"].startswith("the record otherother") and records[-2].startswith("stop run_stop")


def test_a_program_that_resumes_begins_after_the_first_step_of_the_first_attempt(
    plan: TrainingPlan, followed: Any, tmp_path: Path
) -> None:
    earlier = tmp_path / run_files.attempt(0, 1) / plan.trials[0].log
    earlier.parent.mkdir(parents=True)
    with mllog.Writer(earlier) as log:
        log.event(mllog.TIMED_FROM, 1)
    for resumes, shown in ((True, ['. resumed 2 {"samples_count": 8, "step": 2, "by_program": true}']), (False, [])):
        records = followed(with_program(plan, resumes=resumes), Scripted([(101.0, b"step 2 loss 4\n")], 102.0))
        assert [one for one in records if one.startswith(". resumed")] == shown


@pytest.mark.parametrize(
    ("reported_s", "printed_s", "now_s", "exceeded"),
    [
        ([0, 10], [], 1000, None),
        ([0, 10, 20], [], 60, None),
        ([0, 10, 20], [], 60.5, (40.5, 10, "printed nothing")),
        ([0, 10, 30, 40], [], 81, (41, 10, "printed nothing")),
        ([0, 1, 2], [], 32, None),
        ([0, 1, 2], [], 33, (31, 1, "printed nothing")),
        ([0, 10, 20], [419], 420, None),
        ([0, 10, 20], [419], 421, (401, 10, "printed lines, but none of them is a step or an evaluation")),
        ([*range(0, 505, 5), *range(501, 552)], [], 590, (39, 1, "printed nothing")),
    ],
)
def test_the_usual_pause_between_two_reports_limits_the_next_one(
    reported_s: list[float], printed_s: list[float], now_s: float, exceeded: Any
) -> None:
    """The limit is four usual pauses and at least 30 s; ten times as long for a program that prints other lines."""
    for stall, expected in ((Stall(factor=4, floor_s=30), exceeded), (None, None)):
        pace = run.Pace(stall)
        for time_s in reported_s:
            pace.reported(time_s)
        for time_s in printed_s:
            pace.printed(time_s)
        assert pace.exceeded(now_s) == expected
