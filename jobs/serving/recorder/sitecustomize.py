"""Record the processes of a Python server under torch.profiler, from inside.

Python imports this module at its start, because its folder is the first one of PYTHONPATH. In every process, a thread
waits for the file `start`, records all threads of its process until the file `stop` exists, and writes a trace. A
process without torch records nothing, nor does one without CUDA if the server uses GPUs. Standard library only: the
server may have an environment of its own.
"""

import importlib.util
import os
import sys
import threading
import time
from importlib.machinery import PathFinder
from pathlib import Path

FOLDER, DEVICE = "RUNSTOP_PROFILE_FOLDER", "RUNSTOP_PROFILE_DEVICE"
START, STOP, STARTED, TRACE = "start", "stop", "started_{}", "recorded_{}.trace.json.gz"
POLL_S = 0.05


def run_shadowed() -> None:
    """Run the site's own sitecustomize, which this one hides."""
    here = Path(__file__).resolve().parent
    spec = PathFinder.find_spec("sitecustomize", [path for path in sys.path if Path(path or ".").resolve() != here])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def record(folder: Path, device: str) -> None:
    """Wait for the start, record until the stop, and write the trace."""
    while not (folder / START).exists():
        time.sleep(POLL_S)
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "profiler") or (device == "cuda" and not torch.cuda.is_initialized()):
        return
    activity = torch.profiler.ProfilerActivity.CUDA if device == "cuda" else torch.profiler.ProfilerActivity.CPU
    settings = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(activities=[activity], experimental_config=settings) as profiler:
        (folder / STARTED.format(os.getpid())).touch()
        while not (folder / STOP).exists():
            time.sleep(POLL_S)
        if device == "cuda":
            torch.cuda.synchronize()
    trace = folder / TRACE.format(os.getpid())
    part = trace.with_name(f"part_{trace.name}")
    profiler.export_chrome_trace(str(part))
    part.rename(trace)


if FOLDER in os.environ:
    run_shadowed()
    threading.Thread(
        target=record,
        args=(Path(os.environ[FOLDER]), os.environ.get(DEVICE, "cuda")),
        name="runstop profile",
        daemon=True,
    ).start()
