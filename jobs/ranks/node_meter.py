"""Read the power of the whole node from its ACPI power meter, which many servers have in their power supplies.

The kernel's driver acpi_power_meter shows it below /sys/class/hwmon, which containers see, too. Source: the kernel's
documentation, "Kernel driver power_meter".
"""

from contextlib import suppress
from pathlib import Path

HWMON = Path("/sys/class/hwmon")
NAME = "power_meter"
"""The name that the driver gives its devices."""
VALUES = ("power1_average", "device/power1_average", "power1_input")
"""Files with a value in microwatts; older kernels have them in the folder of the device."""


def find() -> Path | None:
    """Return the file with the node's power; None if the node has no meter, or several, whose sum may count twice."""
    files = [file for folder in sorted(HWMON.glob("hwmon*")) if (file := _value(folder)) is not None]
    return files[0] if len(files) == 1 else None


def watts(file: Path) -> float | None:
    """Return the power in watts; None if the meter has no value now."""
    with suppress(OSError, ValueError):
        return int(file.read_text()) / 1e6
    return None


def _value(folder: Path) -> Path | None:
    for name_file in (folder / "name", folder / "device/name"):
        with suppress(OSError):
            if name_file.read_text().strip() == NAME:
                return next((folder / name for name in VALUES if watts(folder / name) is not None), None)
    return None
