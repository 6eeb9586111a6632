"""Fine-tune a tiny Llama with TRL's SFTTrainer, on any number of ranks.

torchrun --nproc-per-node RANKS trl_sft.py DATA SEED STEPS BATCH LR OUTPUT
"""

import hashlib
import math
import os
import sys

import numpy as np
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

data, seed, steps, batch, lr = sys.argv[1], *map(int, sys.argv[2:5]), float(sys.argv[5])
ranks = int(os.environ.get("WORLD_SIZE", "1"))

sizes = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 4, "vocab_size": 512, "rms_norm_eps": 1e-5}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
for name, weight in model.named_parameters():
    if weight.dim() > 1:  # the same random weights as in runstop's engine=huggingface, from the seed and the name
        number = int(hashlib.sha256(f"{seed} {name}".encode()).hexdigest()[:12], 16)
        is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
        std = math.sqrt(2 / (5 * 128) / (2 * 4 if is_output else 1))
        weight.data.normal_(std=std, generator=torch.Generator().manual_seed(number))


def rows(split, order=None):
    """Return rows that are tokens already, in this order; labels are -100 where a token does not count in the loss."""
    tokens, counts = (np.load(f"{data}/{split}_{name}.npy") for name in ("tokens", "counts"))
    order = np.arange(len(tokens)) if order is None else order(len(tokens))
    return Dataset.from_dict({"input_ids": tokens[order], "labels": np.where(counts, tokens, -100)[order]})


trainer = SFTTrainer(
    model=model,
    args=SFTConfig(
        output_dir=sys.argv[6],
        max_steps=steps,
        per_device_train_batch_size=batch // ranks,
        per_device_eval_batch_size=64 // ranks,
        learning_rate=lr,
        lr_scheduler_type="cosine",
        adam_beta2=0.98,
        max_grad_norm=1.0,
        seed=seed,
        train_sampling_strategy="sequential",  # the rows are shuffled already
        dataset_kwargs={"skip_prepare_dataset": True},
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        logging_steps=1,
        disable_tqdm=True,
        save_strategy="no",
        report_to="none",
    ),
    train_dataset=rows("train", np.random.default_rng(seed).permutation),  # as runstop shuffles its first epoch
    eval_dataset=rows("eval"),
    processing_class=PreTrainedTokenizerFast.from_pretrained(f"{data}.sample"),
)
trainer.train()
trainer.evaluate()
