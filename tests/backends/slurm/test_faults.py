"""The rows of the fault matrix: each run ends in the state that tells the truth, is explained, and loses no trial."""

from concurrent.futures import Future

import pytest
from fault_matrix import Played, in_home, play
from faults import FAULTS
from user import User

pytestmark = pytest.mark.slurm
ROWS = {fault.name: fault for fault in FAULTS}
assert len(ROWS) == len(FAULTS), "two rows have one name"


@pytest.mark.parametrize("row", [name for name, fault in ROWS.items() if fault.in_gate])
def test_a_fault_of_the_gate(row: str, played: dict[str, "Future[Played]"]) -> None:
    check(played[row].result())


@pytest.mark.faults
@pytest.mark.parametrize("row", [name for name, fault in ROWS.items() if not fault.in_gate])
def test_a_fault(row: str, user: User) -> None:
    check(play(in_home(user, ROWS[row]), ROWS[row]))


def check(played: Played) -> None:
    if played.skipped:
        pytest.skip(played.skipped)
    assert not played.wrong, "\n".join(played.wrong)
