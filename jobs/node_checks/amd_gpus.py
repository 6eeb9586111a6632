"""Print a node's AMD GPUs as JSON, as amdsmi reports them: `python -m jobs.node_checks.amd_gpus`.

It is a separate process, because a query hangs on a GPU that has fallen off the bus. It was not run on a GPU.
"""

import json
from collections.abc import Callable
from dataclasses import asdict
from types import ModuleType
from typing import Any

from bench.contract.node_facts import GpuFacts


def main() -> None:
    import amdsmi

    amdsmi.amdsmi_init()
    handles = amdsmi.amdsmi_get_processor_handles()
    print(json.dumps([asdict(facts(amdsmi, handle, index)) for index, handle in enumerate(handles)]))


def facts(amdsmi: ModuleType, gpu: Any, index: int) -> GpuFacts:
    """Return the facts of one GPU; None for what amdsmi refuses or does not know."""

    def reported(query: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return query(gpu, *arguments)
        except amdsmi.AmdSmiException:
            return None

    asic, clock = (
        reported(amdsmi.amdsmi_get_gpu_asic_info),
        reported(amdsmi.amdsmi_get_clock_info, amdsmi.AmdSmiClkType.GFX),
    )
    driver, vram = reported(amdsmi.amdsmi_get_gpu_driver_info), reported(amdsmi.amdsmi_get_gpu_vram_usage)
    temperature = (amdsmi.AmdSmiTemperatureType.JUNCTION, amdsmi.AmdSmiTemperatureMetric.CURRENT)
    return GpuFacts(
        index=index,
        uuid=_text(asic, "asic_serial"),
        name=_text(asic, "market_name"),
        driver=_text(driver, "driver_version"),
        memory_mib=_number(vram, "vram_total"),
        temperature_c=_whole(reported(amdsmi.amdsmi_get_temp_metric, *temperature)),
        sm_clock_mhz=_number(clock, "clk"),
        max_sm_clock_mhz=_number(clock, "max_clk"),
        ecc_uncorrected=_number(reported(amdsmi.amdsmi_get_gpu_total_ecc_count), "uncorrectable_count"),
    )


def _text(reported: dict[str, Any] | None, name: str) -> str | None:
    value = (reported or {}).get(name)
    return None if value in (None, "N/A") else str(value)


def _number(reported: dict[str, Any] | None, name: str) -> int | None:
    return _whole((reported or {}).get(name))


def _whole(value: Any) -> int | None:
    return value if type(value) is int else None


if __name__ == "__main__":
    main()
