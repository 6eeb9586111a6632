"""Facts of two sound nodes with two ranks and two H200 each, as their ranks write them."""

from dataclasses import replace

from bench.contract.node_facts import GpuFacts, Interface, Machine, Port, RankFacts, Results, Software

NOW_MS = 1_790_000_000_000
UP = Port("mlx5_0:1", "4: ACTIVE", "5: LinkUp", "InfiniBand", "400 Gb/sec (4X NDR)")
PORTS = (UP, replace(UP, port="mlx5_1:1"))
DOWN = replace(UP, port="mlx5_2:1", state="1: DOWN")
GPU = GpuFacts(0, "GPU-ab5e", "NVIDIA H200", "580.1", 143771, 37, 345, 1980, 0, "No", "No", "0x0000000000000001")
MACHINE = Machine(
    cpu=None,
    num_cpus=None,
    memory_gib=1.0,
    memory_limit_gib=None,
    page_bytes=4096,
    huge_pages=None,
    shm_mib=None,
    shm_free_mib=None,
    architecture="x86_64",
    kernel="6.8",
    interfaces=(
        Interface("lo", "unknown", None, ()),
        Interface("eth0", "up", None, ()),
        Interface("ib0", "down", 1, ()),
    ),
    infiniband=(*PORTS, DOWN),
    infiniband_devices=True,
    gpus=(GPU, replace(GPU, index=1)),
    gpus_refused=None,
    gpu_links=None,
    results=Results("/runs/7", 200, None),
    paths=(),
)
RANK = RankFacts(
    rank=0,
    local_rank=0,
    world_size=4,
    node="dgx-0",
    hostname="dgx-0",
    attempt=None,
    time_ms=NOW_MS,
    software=Software(None, False, "Debian 12", "3.11", "python", {"torch": "2.13.0"}),
    cuda_visible_devices="0,1",
    num_cpus=1,
    memlock_bytes=-1,
    environment=(),
    not_as_planned=(),
    machine=None,
)
SOUND = tuple(
    replace(RANK, rank=rank, local_rank=rank % 2, node=f"dgx-{rank // 2}", machine=None if rank % 2 else MACHINE)
    for rank in range(4)
)
