"""A training of twelve steps through the entry points, and what its log says of each."""

from pathlib import Path
from typing import Any

from bench.mlperf import reader

STEPS = 12
WORDS = (
    "model.weights=random",
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.ffn_hidden_size=96",
    "data.train_rows=64",
    "data.eval_rows=8",
    "data.seq_length=24",
    f"task.training.max_steps={STEPS}",
    "recipe.global_batch_size=8",
    "recipe.micro_batch_size=2",
    "recipe.lr_warmup_steps=2",
    "recipe.eval_every_samples=24",
    "recipe.log_every_steps=1",
)


def values(log: Path, key: str, after: int = 0) -> list[tuple[int, Any]]:
    """Return (step, value) of the records of a key after a step."""
    values = ((event.metadata.get("step", 0), event.value) for event in reader.read(log)[0] if event.key == key)
    return [(step, value) for step, value in values if step > after]
