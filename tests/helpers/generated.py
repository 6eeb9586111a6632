"""Answers of our generator, once per rank of TP: `python -m tests.helpers.generated FOLDER …`.

It reads the model and the runs from FOLDER/requests.json, and rank 0 writes FOLDER/answers.json.
"""

import json
import sys
from pathlib import Path

import torch

from bench.contract import codec
from bench.contract.generation import Sampling, WeightPrecision
from bench.contract.model import Model
from jobs.engines.generation import Request
from tests.helpers import tiny_llama


def main() -> None:
    torch.distributed.init_process_group("gloo")
    for folder in sys.argv[1:]:
        answer(Path(folder))
    torch.distributed.destroy_process_group()


def answer(folder: Path) -> None:
    content = json.loads((folder / "requests.json").read_text())
    from jobs.engines.megatron.generation.generator import MegatronGenerator
    from jobs.engines.megatron.generation.ranks import Ranks

    model, answers = codec.typed(Model, content["model"]), []
    ranks = Ranks(torch.distributed.group.WORLD)
    for precision, temperature, requests in content["runs"]:
        options = tiny_llama.GenerationOptions(
            WeightPrecision[precision], sampling=Sampling(temperature=temperature, top_k=50)
        )
        generator = MegatronGenerator(tiny_llama.plan(model, options), 0, ranks=ranks, device=torch.device("cpu"))
        generator.load(folder / "hf")
        batch = [Request(tuple(one["prompt"]), one["length"]) for one in requests]
        answers.append([answer.tokens for answer in generator.generate(batch, seed=3)])
    if ranks.rank == 0:
        (folder / "answers.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
