"""A kernels trial whose second rank hangs in a GEMM: `python -m tests.helpers.hanging_kernels PLAN --trial K`."""

import time
from typing import Any

from jobs.kernels import measure
from jobs.ranks.identity import from_environment
from jobs.tasks import kernels

_prepare = measure._LOCAL["gemm"]


def hang(*args: Any) -> Any:
    if from_environment().rank == 1:
        time.sleep(600)
    return _prepare(*args)


if __name__ == "__main__":
    measure._LOCAL["gemm"] = hang
    kernels.main()
