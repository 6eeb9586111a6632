"""Logits of the engine for a test, once per rank: `python -m tests.helpers.logits NAME.json …`.

It writes NAME.pt next to each plan. The plans are of as many ranks each, in any layout. NAME_adapted.pt are the logits
with adapters_0, which are drawn and saved if they are not there; a plan without LoRA has none. Of plans in FP8 or NF4
there are NAME_RANK.pt instead, each rank's base as it was loaded, and NAME.refused, why LoRA in BF16 could not load it.
"""

import sys
from pathlib import Path

import torch

from bench.contract import plan_kinds
from bench.contract.checkpoint import Stored, preferred
from bench.contract.schema import Precision
from bench.contract.training import Trains
from bench.errors import ConfigError
from jobs.engines.megatron.groups import end_ranks, split, start_ranks
from jobs.ranks.identity import from_environment

BATCH = 2


def tokens(seq_length: int, vocab_size: int) -> torch.Tensor:
    """Return the rows [B, S] that every logit in the test is of."""
    return torch.randint(vocab_size, (BATCH, seq_length), generator=torch.Generator().manual_seed(5))


def main() -> None:
    by_path = {Path(path): plan_kinds.load(Path(path)) for path in sys.argv[1:]}
    who = from_environment()
    start_ranks(next(iter(by_path.values())), who)
    from megatron.core import parallel_state

    from jobs.engines.megatron import checkpoint, model

    for seed, (path, plan) in enumerate(by_path.items()):  # what is not loaded is another one in each
        parallel_state.destroy_model_parallel()
        split(plan)
        base, adapters = Path(str(plan.base_dir)), path.parent / "adapters_0"
        engine = model.build(plan, seed)
        checkpoint.load(engine, base, adapters=False)
        if preferred(plan.config) is not Stored.plain:
            write_quantized(engine, path.with_name(f"{path.stem}_{who.rank}.pt"))
            write_refusal(engine, base, path.with_suffix(".refused"))
            continue
        write(engine, path.with_suffix(".pt"))
        if plan.config.training.lora is None:
            continue
        if adapters.exists():
            checkpoint.load(engine, adapters, adapters=True)
        else:
            draw(engine)
            checkpoint.save(engine, adapters, adapters=True)
        write(engine, path.with_name(f"{path.stem}_adapted.pt"))
    end_ranks()


def write_quantized(engine, path: Path) -> None:
    """Save each linear's quantised values and scales, and all other weights of the base, by name."""
    from jobs.engines.megatron.lora import is_adapter

    (chunk,) = engine.unwrapped_chunks()
    tensors = {name: weight.detach() for name, weight in chunk.named_parameters() if not is_adapter(name)}
    scales = {
        f"{name}.scale": part.weight_scale for name, part in chunk.named_modules() if hasattr(part, "weight_scale")
    }
    torch.save(tensors | scales, path)


def write_refusal(engine, base: Path, path: Path) -> None:
    """Write why LoRA in BF16 could not load the base, if it could not."""
    from jobs.engines.megatron import checkpoint

    engine.plan.config.precision, engine.plan.config.task.training.trains = Precision.bf16, Trains.lora
    try:
        checkpoint.load(engine, base, adapters=False)
    except ConfigError as error:
        path.write_text(str(error))


def draw(engine) -> None:
    """Give each adapter's B random values: the same where TP ranks share it, different ones where it is split."""
    from megatron.core import parallel_state

    torch.manual_seed(3)
    for parameter_name, parameter in engine.unwrapped_chunks()[0].named_parameters():
        if parameter_name.endswith("lora_b"):
            own = parallel_state.get_tensor_model_parallel_rank() if parameter.tensor_model_parallel else 0
            parameter.data.copy_(torch.randn(parameter.shape) * (own + 1) / 10)


def write(engine, path: Path) -> None:
    """Save the logits [B, S, V] of all TP ranks, on the last pipeline stage."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    seq_length, vocab_size = engine.plan.config.data.seq_length, engine.plan.config.model.vocab_size
    rows = tokens(seq_length, vocab_size).to(engine.device)
    positions = torch.arange(seq_length, device=engine.device).expand(BATCH, -1)

    def step(iterator, chunk):
        return chunk(rows, positions, None), lambda out, non_loss_data: out

    engine.chunks[0].eval()
    with torch.no_grad():
        outputs = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=None,
            model=engine.chunks[0],
            num_microbatches=1,
            seq_length=seq_length,
            micro_batch_size=BATCH,
            forward_only=True,
            collect_non_loss_data=True,
        )
        if outputs:
            logits = gather_from_tensor_model_parallel_region(outputs[0])
            group = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_data_parallel_rank()
            if group == (0, 0):
                torch.save(logits, path)


if __name__ == "__main__":
    main()
