"""`--cpu-report`: which tests take the most CPU time, their own and their ended children's.

Wall time says little on a machine that is shared. The first test that asks for a fixture pays for it. With pytest-xdist
there is no report: the tests run in other processes.
"""

import time
from collections.abc import Iterator
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage

import pytest

from helpers import pool

NUM_SHOWN = 40


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpu-report", action="store_true", help=f"show the {NUM_SHOWN} tests that took the most CPU time"
    )


def cpu_s() -> float:
    """Return the CPU time of this process, of its children that have ended, and of forked ranks."""
    usages = getrusage(RUSAGE_SELF), getrusage(RUSAGE_CHILDREN)
    return sum(usage.ru_utime + usage.ru_stime for usage in usages) + pool.cpu_s()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    cpu_start_s, start_s = cpu_s(), time.perf_counter()
    try:
        return (yield)
    finally:
        item.config.stash[TIMES].append((cpu_s() - cpu_start_s, time.perf_counter() - start_s, item.nodeid))


TIMES = pytest.StashKey[list[tuple[float, float, str]]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[TIMES] = []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("--cpu-report"):
        times = sorted(config.stash[TIMES], reverse=True)
        terminalreporter.section("CPU time")
        total_s = sum(used_s for used_s, _, _ in times)
        terminalreporter.write_line(f"{total_s:8.1f} s   all {len(times)} tests, without imports and collection")
        for used_s, wall_s, name in times[:NUM_SHOWN]:
            terminalreporter.write_line(f"{used_s:8.2f} s   {name}   ({wall_s:.2f} s by the clock)")
