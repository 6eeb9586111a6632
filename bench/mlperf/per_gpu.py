"""What a result says per GPU once a user has said how many GPUs there were."""

from dataclasses import replace

from bench.contract import mllog
from bench.mlperf.benchmarks import BENCHMARKS
from bench.mlperf.reader import is_number
from bench.mlperf.result import Result


def with_gpus(result: Result, num_gpus: int | None) -> Result:
    """Return a result with its rates per GPU; what the log itself says of its GPUs stands."""
    if num_gpus is None or result.num_gpus is not None:
        return result
    per_gpu = None if result.throughput_samples_s is None else result.throughput_samples_s / num_gpus
    known = BENCHMARKS.get(result.benchmark or "")
    tokens = result.hyperparameters.get("max_sequence_length") or (known.sequence_length if known else None)
    work, peak = result.tflop_per_sample, result.hyperparameters.get(mllog.ACCELERATOR_PEAK_TFLOPS)
    tflops = per_gpu * work if per_gpu and work else None
    return replace(
        result,
        num_gpus=num_gpus,
        tokens_s_gpu=per_gpu * tokens if per_gpu and isinstance(tokens, int | float) else None,
        tflops_gpu=tflops,
        mfu=tflops / peak if tflops and is_number(peak) and peak > 0 else None,
    )
