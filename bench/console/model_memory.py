"""Show what Llama 2's sizes need to be trained, beside the published table."""

from bench.console.sheet import Sheet
from bench.contract.schema import Config
from bench.planning import model_memory as needs
from bench.planning.parameters import parameters

WHY = """\
published: Run:ai 2024, "LLMs don't fit into a single GPU"; GB are 1e9 bytes, and numbers of GPUs are powers of two
weights differ because the table takes 7, 13 and 70 billion parameters, and the models have 6.74, 13.02 and 68.98
training: here a weight, its gradient and Adam's two moments, one number each; the table has 3.5 to 3.7 numbers a weight
  and does not say of what. Neither counts activations, which grow with the batch; the second table does
FP16: half of FP32 only if master weights and moments had 16 bits, too; mixed precision takes 18 bytes a weight, not 8
INT8: it would mean gradients and moments of 8 bits, which lose the small steps of training. What 8 and 4 bits are used
  for is the operands of GEMMs beside larger states (FP8), and frozen weights under adapters"""
PLANNED = (
    "states: weights, gradients, master weights and moments; GiB on one GPU: with rows of 4,096 tokens, one a "
    "micro-batch, all layers recomputed, and CUDA's own memory\nGPUs: the fewest on which a split fits, of {most} at "
    "most; tp and pp split the model, dp shards only the optimizer's states"
)


def sheets(configs: dict[str, Config]) -> list[Sheet]:
    """Return the published table beside our arithmetic, and what the engine needs; configs are by the model's name."""
    return [_published(configs), _planned(configs)]


def _published(configs: dict[str, Config]) -> Sheet:
    columns = (
        *("model", "precision", "weights (GB)", "published weights", "training (GB)", "published training"),
        *("GPUs of 40 GB", "published GPUs", "GPUs of 80 GB", "GPUs of 141 GB"),
    )
    rows = []
    for (model, precision), published in needs.PUBLISHED.items():
        counted = needs.counted(parameters(configs[model].model), precision)
        gpus = [str(count) for count in counted.num_gpus.values()]
        rows.append(
            (
                *(model, precision, f"{counted.weights_gb:.1f}", f"{published.weights_gb:g}"),
                *(f"{counted.training_gb:.0f}", f"{published.training_gb:g}"),
                *(gpus[0], str(published.num_gpus), *gpus[1:]),
            )
        )
    return Sheet("memory of training, by arithmetic", rows, columns, WHY)


def _planned(configs: dict[str, Config]) -> Sheet:
    of_gpus = (f"GPUs of {capacity} GB" for capacity in needs.CAPACITIES)
    columns = ("model", "what is trained", "states (GB)", "GiB on one GPU", *of_gpus)
    rows = []
    for model, config in configs.items():
        for way in needs.WAYS:
            planned = needs.planned(config, way)
            gpus = [str(count or f"over {needs.MOST_GPUS}") for count in planned.num_gpus.values()]
            states = f"{needs.states_gb(config, way):.1f}"
            rows.append((model, way.name, states, f"{planned.one_gpu_gib:.1f}", *gpus))
    caption = PLANNED.format(most=needs.MOST_GPUS)
    return Sheet("memory of training, as this engine does it (estimates)", rows, columns, caption)
