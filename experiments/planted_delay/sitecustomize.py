"""Delays one rank of a training of engine=megatron, or lets it hang: to see that runstop finds it.

    PYTHONPATH=experiments/planted_delay:$PYTHONPATH PLANT_RANK=1 PLANT_SHARE=0.12 PLANT_STEP=40 \\
        runstop launch task=pretrain_gpt3_126m model.weights=random …

Python imports a module of this name at its start. From step PLANT_STEP on, the rank computes for PLANT_SHARE of a step
longer: on a GPU a kernel keeps its stream busy, on a CPU the process sleeps. With PLANT_HANG=STEP it sleeps at this
step for 10 minutes.
"""

import builtins
import os
import sys
import time
from typing import Any

HANG_S = 600
CYCLES = 100_000_000
real_import = builtins.__import__


def importing(name: str, *arguments: Any, **options: Any) -> Any:
    """Import a module; after the training loop was imported, plant the delay in it."""
    module = real_import(name, *arguments, **options)
    loop = sys.modules.get("jobs.engines.megatron.loop")
    if builtins.__import__ is importing and hasattr(loop, "_forward_step"):  # the end of the file
        builtins.__import__ = real_import
        plant(loop)
    return module


def plant(loop: Any) -> None:
    """Replace the function of a training step."""
    import torch

    train_step, is_gpu = loop.train_step, torch.cuda.is_available()
    share, first = float(os.environ.get("PLANT_SHARE", "0")), int(os.environ.get("PLANT_STEP", "40"))
    hang, known = int(os.environ.get("PLANT_HANG", "0")), dict[str, float]()

    def late(engine: Any, rows: Any, indices: Any, step: int) -> Any:
        if step == hang:
            time.sleep(HANG_S)
        if share and step == first // 2:
            known["began"] = synchronized(torch)
        elif share and step == first:
            usual_s = (synchronized(torch) - known["began"]) / (first - first // 2)
            known["delay_s"] = share * usual_s
            known["cycles"] = known["delay_s"] * cycles_per_s(torch) if is_gpu else 0
            print(f"from step {first} on, {1e3 * known['delay_s']:.2f} ms more than {1e3 * usual_s:.2f} ms", flush=True)
        if share and step >= first:
            torch.cuda._sleep(int(known["cycles"])) if is_gpu else time.sleep(known["delay_s"])
        return train_step(engine, rows, indices, step)

    loop.train_step = late


def synchronized(torch: Any) -> float:
    """Return the time after the GPU, if any, has done all its work, in seconds."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def cycles_per_s(torch: Any) -> float:
    """Return how many cycles of torch.cuda._sleep this GPU does in a second."""
    torch.cuda._sleep(CYCLES // 10)
    began = synchronized(torch)
    torch.cuda._sleep(CYCLES)
    return CYCLES / (synchronized(torch) - began)


if os.environ.get("RANK") == os.environ.get("PLANT_RANK", "none"):
    builtins.__import__ = importing
