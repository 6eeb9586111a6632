"""The hardware of a node, from the files that its kernel would show and from what its drivers would print."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from bench.contract.node_facts import Disk, GpuFacts, Interface, Port
from jobs.node_checks import amd_gpus, hardware

GPU = "0, GPU-a, NVIDIA H200, 580.1, 143771, 40, 345, 1980, 0"


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the folder that takes the place of /."""

    def moved(path: str | Path) -> Path:
        return tmp_path / str(path).lstrip("/")

    for name in ("CPU", "BLOCK", "KFD"):
        monkeypatch.setattr(hardware, name, moved(getattr(hardware, name)))
    monkeypatch.setattr(hardware, "Path", moved)
    return tmp_path


def write(root: Path, **texts: str) -> None:
    """Write files, with __ for each slash of a name."""
    for name, text in texts.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


CPUINFO = "".join(
    f"processor\t: {cpu}\nmodel name\t: EPYC 9654: 96-Core\nphysical id\t: {cpu // 2}\ncpu cores\t: 96\n\n"
    for cpu in range(4)
)


def test_the_processors_of_a_node(root: Path) -> None:
    unknown = dict.fromkeys(("cpu", "num_sockets", "cores_per_socket", "max_cpu_mhz", "cpu_caches"))
    assert hardware.processors() == unknown and hardware.cpu_model() is None
    write(root, proc__cpuinfo=CPUINFO)
    cpu0 = root / "sys/devices/system/cpu/cpu0"
    write(cpu0, cpufreq__cpuinfo_max_freq="3707812\n")
    caches = [
        ("1", "Data", "32K"),
        ("1", "Instruction", "48K"),
        ("2", "Unified", "1024K"),
        ("3", "", "32768K"),
        ("4", "Data", ""),
    ]
    for number, cache in enumerate(caches):
        for name, text in zip(("level", "type", "size"), cache, strict=True):
            write(cpu0, **{f"cache__index{number}__{name}": text})
    assert hardware.processors() == {
        "cpu": "EPYC 9654: 96-Core",
        "num_sockets": 2,
        "cores_per_socket": 96,
        "max_cpu_mhz": 3707,
        "cpu_caches": "L1d 32K, L1i 48K, L2 1024K, L3 32768K",
    }
    write(root, proc__cpuinfo="model name: A\ncpu cores: many\n")
    assert hardware.processors() | {"max_cpu_mhz": None, "cpu_caches": None} == unknown | {"cpu": "A"}


def test_the_disks_of_a_node(root: Path) -> None:
    """Sizes are in sectors of 512 bytes, also for disks with larger ones."""
    disks = {
        "nvme0n1": ("7501476528", "0", "SAMSUNG MZWLO\n"),
        "sda": ("1953525168", "1", "ST1000\n"),
        "sdb": ("4194303", "0", ""),
        "vda": ("2097152", "1", None),
        "sdc": ("0", "1", "no medium"),
        "sdd": ("?", "1", "damaged"),
    }
    for name, (sectors, rotational, model) in disks.items():
        files = {"size": sectors, "queue__rotational": rotational} | ({} if model is None else {"device__model": model})
        write(root / "sys/block" / name, **files)
        (root / "sys/block" / name / "device").mkdir(exist_ok=True)
    write(root, sys__block__loop0__size="4096")
    assert hardware.disks() == (
        Disk("nvme0n1", "NVMe SSD", 3576, "SAMSUNG MZWLO"),
        Disk("sda", "HDD", 931, "ST1000"),
        Disk("sdb", "SSD", 1, ""),
        Disk("vda", "virtual disk", 1, None),
    )


def test_the_network_of_a_node(root: Path) -> None:
    """A speed of -1 is unknown. An interface without a state, as bonding_masters is none, is left out."""
    net = root / "sys/class/net"
    write(
        net,
        runstop8__operstate="up\n",
        runstop8__speed="100000\n",
        runstop9__operstate="down",
        runstop9__speed="-1",
        bonding_masters="",
    )
    write(root, proc__net__if_inet6=f"fe80{'0' * 27}1 02 40 20 80 runstop8\n{'0' * 31}1 01 80 10 80 runstop7\n")
    assert hardware.interfaces() == (
        Interface("runstop8", "up", 100000, ("fe80::1",)),
        Interface("runstop9", "down", None, ()),
    )
    ports = root / "sys/class/infiniband"
    write(
        ports / "mlx5_1/ports/1", state="4: ACTIVE", phys_state="5: LinkUp", link_layer="InfiniBand", rate="400 Gb/sec"
    )
    write(ports / "mlx5_0/ports/2", state="1: DOWN")
    assert hardware.infiniband() == (
        Port("mlx5_0:2", "1: DOWN", None, None, None),
        Port("mlx5_1:1", "4: ACTIVE", "5: LinkUp", "InfiniBand", "400 Gb/sec"),
    )


@pytest.mark.skipif(not Path("/sys/class/net/lo").exists(), reason="no loopback interface here")
def test_the_loopback_address_of_this_machine() -> None:
    assert hardware.addresses("lo")[0] == "127.0.0.1" and hardware.addresses("no such one") == ()


@pytest.mark.parametrize(
    ("release", "text"),
    [({"NAME": "Debian", "VERSION": "12"}, "Debian 12"), ({"NAME": "Arch"}, "Arch"), ({}, None), (OSError, None)],
)
def test_the_operating_system(monkeypatch: pytest.MonkeyPatch, release: Any, text: str | None) -> None:
    def read() -> dict[str, str]:
        if release is OSError:
            raise OSError
        return dict(release)

    monkeypatch.setattr(hardware.platform, "freedesktop_os_release", read)
    assert hardware.operating_system() == text


def test_gpus_and_their_links_from_what_the_drivers_print(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    """The links to the host are those of GPUs whose width is known; rows of other lengths are left out."""
    printed = {
        "--query-gpu=index,uuid,name,driver_version,": f"{GPU}\n{GPU.replace('GPU-a', 'GPU-b')}\n",
        "--query-remapped-rows=": "GPU-b, Yes, No\nGPU-a\n",
        "--query-gpu=uuid,clocks_event_reasons.active": "GPU-b, 0x4\n",
        "--query-gpu=uuid,pcie.link.gen.max": "GPU-a, 5, 16\nGPU-b, 5, [N/A]\n",
        "topo": "GPU0 GPU1\n",
    }
    refuses = ["clocks_throttle"]

    def answer(command: list[str]) -> tuple[str | None, str | None]:
        assert command[0] == "nvidia-smi" and command[2] in ("-m", "--format=csv,noheader,nounits")
        if any(name in command[1] for name in refuses):
            return "no such field", None
        return None, next(text for name, text in printed.items() if command[1].startswith(name))

    monkeypatch.setattr(hardware, "printed_by", answer)
    monkeypatch.setattr(hardware.shutil, "which", {"nvidia-smi": "/bin/nvidia-smi"}.get)
    first = GpuFacts(0, "GPU-a", "NVIDIA H200", "580.1", 143771, 40, 345, 1980, 0, pcie="PCIe gen 5 x16")
    second = GpuFacts(0, "GPU-b", "NVIDIA H200", "580.1", 143771, 40, 345, 1980, 0, "Yes", "No", "0x4")
    assert hardware.gpus() == ((first, second), None, "GPU0 GPU1\n")
    refuses.append("--query-gpu=index")
    assert hardware.gpus() == (None, "no such field", None)
    monkeypatch.setattr(hardware.shutil, "which", lambda name: None)
    assert hardware.gpus() == (None, f"nvidia-smi{hardware.NOT_INSTALLED}", None)
    write(root, dev__kfd="")
    amd = GpuFacts(0, *[None] * 8)
    monkeypatch.setattr(hardware, "amd_gpus", lambda: ((amd,), None))
    assert hardware.gpus() == ((amd,), None, None)


def test_gpus_of_amd(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What amdsmi refuses or does not know is None; its errors end a traceback."""
    monkeypatch.setattr(hardware.importlib.util, "find_spec", lambda name: None)
    assert hardware.amd_gpus() == (None, f"amdsmi{hardware.NOT_INSTALLED}")
    monkeypatch.setattr(hardware.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(hardware, "printed_by", lambda command: ("Traceback\n  main()\n no driver \n", None))
    assert hardware.amd_gpus() == (None, "no driver")
    module = ModuleType("amdsmi")
    started: list[str] = []

    class AmdSmiException(Exception):
        pass

    def refused(gpu: int) -> None:
        raise AmdSmiException

    known: dict[str, Any] = {
        "AmdSmiException": AmdSmiException,
        "AmdSmiClkType": SimpleNamespace(GFX="gfx"),
        "AmdSmiTemperatureType": SimpleNamespace(JUNCTION="junction"),
        "AmdSmiTemperatureMetric": SimpleNamespace(CURRENT="current"),
        "amdsmi_init": lambda: started.append("amdsmi"),
        "amdsmi_get_processor_handles": lambda: [7, 8],
        "amdsmi_get_gpu_asic_info": lambda gpu: {
            "asic_serial": f"0x{gpu}",
            "market_name": "N/A" if gpu == 8 else "MI300X",
        },
        "amdsmi_get_clock_info": lambda gpu, kind: {"clk": 132, "max_clk": 2100.5} if kind == "gfx" else {},
        "amdsmi_get_gpu_driver_info": lambda gpu: {"driver_version": 6.12},
        "amdsmi_get_gpu_vram_usage": lambda gpu: {"vram_total": 196592},
        "amdsmi_get_temp_metric": lambda gpu, *kind: 40 + gpu if kind == ("junction", "current") else None,
        "amdsmi_get_gpu_total_ecc_count": lambda gpu: {"uncorrectable_count": True} if gpu == 7 else refused(gpu),
    }
    for name, value in known.items():
        setattr(module, name, value)
    monkeypatch.setitem(sys.modules, "amdsmi", module)
    amd_gpus.main()
    printed = capsys.readouterr().out
    monkeypatch.setattr(hardware, "printed_by", lambda command: (None, printed if command[1] == "-m" else None))
    first = GpuFacts(0, "0x7", "MI300X", "6.12", 196592, 47, 132, None, None)
    second = GpuFacts(1, "0x8", None, "6.12", 196592, 48, 132, None, None)
    assert hardware.amd_gpus() == ((first, second), None) and started == ["amdsmi"]
