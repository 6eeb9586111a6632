"""Show a run of a kernels task: what it will measure, and what it measured."""

from bench.contract.plan import KernelsPlan


def plan_rows(plan: KernelsPlan) -> list[tuple[str, str]]:
    """Return what the plan says, by name, without what every plan says."""
    w, c = plan.world, plan.config
    device = c.cluster.gpu.name if c.cluster.gpu else c.cluster.device.name
    counts = {family: sum(point.family == family for point in plan.points) for family in _FAMILIES}
    nodes = f"{w.num_nodes} node{'s' if w.num_nodes > 1 else ''} with {w.ranks_per_node} x {device}"
    return [
        (
            "shapes of",
            f"{c.model.name}, {c.recipe.micro_batch_size or 1} x {c.data.seq_length:,} tokens, tp {c.parallel.tp or 1}",
        ),
        ("ranks", f"{w.num_ranks}; {nodes}"),
        *((_FAMILIES[family], f"{count} points") for family, count in counts.items() if count),
    ]


_FAMILIES = {"memcpy": "memory copies", "collectives": "collectives", "attention": "attention", "gemm": "GEMMs"}
