"""One attempt of a run as runners end and nodes are lost, with a fake Ray that records calls."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.backends.nodes.interruption import RESTART_EXIT_CODE
from bench.backends.ray import driver as ray_driver
from bench.backends.ray.placement_group import Ended, Group, LostError, Place
from bench.contract.run_files import PLAN, STATUS

STOPS = Ended(143, ("terminated",))
ALL_WELL = tuple((number, Ended(0, ())) for number in range(3))


class RayError(Exception):
    """Like the class in ray.exceptions."""


@dataclass
class Ray:
    """Runners end one by one in the order of `ends`; others end when they are stopped."""

    ends: list[tuple[int, Ended | RayError]]
    exists: bool = True
    stopped: list[int] = field(default_factory=list)
    commands: dict[int, tuple[list[str], dict[str, str]]] = field(default_factory=dict)
    over: dict[int, Ended | RayError] = field(default_factory=dict)

    def wait(self, calls: list[int], timeout: float) -> tuple[list[int], list[int]]:
        assert timeout > 0
        if self.ends:
            number, end = self.ends.pop(0)
            self.over[number] = end
        done = [call for call in calls if call in self.over]
        return done, [call for call in calls if call not in done]

    def get(self, call: Any, timeout: float | None = None) -> Any:
        result = [self.over.get(one, one) for one in call] if isinstance(call, list) else self.over[call]
        if isinstance(result, RayError):
            raise result
        return result

    def actor(self, number: int) -> Any:
        def run(words: list[str], environment: dict[str, str]) -> int:
            self.commands[number] = words, environment
            return number

        def stop() -> None:
            self.stopped.append(number)
            self.over.setdefault(number, STOPS)

        answers: dict[str, Callable[..., Any]] = {"run": run, "stop": stop}
        answers |= {"free_port": lambda: 20_001, "exists": lambda path: self.exists}
        return SimpleNamespace(**{name: SimpleNamespace(remote=answer) for name, answer in answers.items()})


@dataclass
class Driver:
    run: Path
    lines: list[str] = field(default_factory=list)
    num_checks: int = 0

    def say(self, text: str) -> None:
        self.lines.append(text)

    def check(self) -> None:
        self.num_checks += 1


@pytest.fixture
def tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, Ray, Driver]]:
    """Run an attempt on three nodes; return its exit code or error, the fake Ray, and the driver."""

    def run(*ends: tuple[int, Ended | RayError], exists: bool = True, words: tuple[str, ...] = ()) -> Any:
        ray, driver = Ray(list(ends), exists), Driver(tmp_path)
        module = SimpleNamespace(wait=ray.wait, get=ray.get, exceptions=SimpleNamespace(RayError=RayError))
        monkeypatch.setitem(sys.modules, "ray", module)
        places = [Place(f"rig{number}", f"10.0.0.{number}", f"id{number}") for number in range(3)]
        group = Group(None, [ray.actor(number) for number in range(3)], places)
        try:
            return ray_driver.run_attempt(group, words, driver), ray, driver
        except LostError as error:
            return str(error), ray, driver

    return run


Tried = Callable[..., tuple[Any, Ray, Driver]]


def test_each_node_gets_a_runner_with_the_token_of_this_attempt(tried: Tried, tmp_path: Path) -> None:
    (tmp_path / STATUS).touch()
    code, ray, driver = tried(*ALL_WELL, words=("--restarts",))
    assert (code, ray.stopped, driver.lines) == (0, [], []) and driver.num_checks == 1
    for number, (argv, environment) in ray.commands.items():
        own = ["--node", f"{number}", "--lead", "10.0.0.0:20001", "--restarts"]
        assert argv == ["-m", "bench.driver", str(tmp_path), *own]
        assert environment["RUNSTOP_NODE"] == f"rig{number}" and len(environment["RUNSTOP_TOKEN"]) == 64
    assert len({environment["RUNSTOP_TOKEN"] for _, environment in ray.commands.values()}) == 1
    _, second, _ = tried(*ALL_WELL)
    assert second.commands[0][1]["RUNSTOP_TOKEN"] != ray.commands[0][1]["RUNSTOP_TOKEN"]


def test_other_nodes_have_time_to_end_after_the_lead(tried: Tried) -> None:
    code, ray, _ = tried((0, Ended(RESTART_EXIT_CODE, ())), (2, Ended(0, ())), (1, Ended(0, ())))
    assert (code, ray.stopped) == (RESTART_EXIT_CODE, [])


def test_the_lead_has_time_to_record_a_lost_node(tried: Tried) -> None:
    error, ray, _ = tried((1, RayError("the actor died")), (0, Ended(RESTART_EXIT_CODE, ())), (2, Ended(1, ())))
    assert error == "RAY-04: node 1 (rig1) is lost: the actor died" and ray.stopped == []
    code, _, _ = tried((1, RayError("the actor died")), (0, Ended(0, ())), (2, Ended(0, ())))
    assert code == 0, "the run had ended before the node was lost"


def test_a_lost_lead_ends_the_others_at_once(tried: Tried) -> None:
    error, ray, _ = tried((0, RayError("the actor died")))
    assert error == "RAY-04: node 0 (rig0) is lost: the actor died" and ray.stopped == [1, 2]


def test_a_lead_that_does_not_end_after_the_others_is_stopped(tried: Tried, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_driver, "OTHERS_S", 0.05)
    code, ray, _ = tried((2, Ended(1, ())))
    assert (code, ray.stopped) == (143, [0, 1])


def test_last_lines_of_runners_are_printed_if_no_status_was_written(tried: Tried, tmp_path: Path) -> None:
    ends = [(0, Ended(1, ("Traceback", "no space"))), (1, Ended(1, ())), (2, Ended(1, ()))]
    code, _, driver = tried(*ends)
    assert code == 1 and driver.lines[:3] == ["node 0 (rig0): exit code 1", "Traceback", "no space"]
    assert driver.lines[3:] == ["node 1 (rig1): exit code 1", "node 2 (rig2): exit code 1"]
    (tmp_path / STATUS).touch()
    assert tried(*ends)[2].lines == []


def test_the_first_node_must_read_the_folder_unless_it_gets_the_plan(tried: Tried, tmp_path: Path) -> None:
    error, ray, _ = tried(exists=False)
    assert error == f"RAY-09: node 0 (rig0) cannot read {tmp_path / PLAN}" and not ray.commands
    assert tried(*ALL_WELL, exists=False, words=("--plan", "p"))[0] == 0
