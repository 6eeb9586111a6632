"""Fine-tune a tiny Llama with a plain PyTorch loop, on any number of ranks.

torchrun --nproc-per-node RANKS plain_torch.py DATA SEED STEPS BATCH LR
"""

import hashlib
import math
import sys

import numpy as np
import torch
from torch import distributed
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

data, seed, steps, batch, lr = sys.argv[1], *map(int, sys.argv[2:5]), float(sys.argv[5])
distributed.init_process_group("gloo")  # reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
rank, ranks = distributed.get_rank(), distributed.get_world_size()

sizes = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 4, "vocab_size": 512, "rms_norm_eps": 1e-5}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
for name, weight in model.named_parameters():
    if weight.dim() > 1:  # the same random weights as in runstop's engine=huggingface, from the seed and the name
        number = int(hashlib.sha256(f"{seed} {name}".encode()).hexdigest()[:12], 16)
        is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
        std = math.sqrt(2 / (5 * 128) / (2 * 4 if is_output else 1))
        weight.data.normal_(std=std, generator=torch.Generator().manual_seed(number))
model = DistributedDataParallel(model)


def rows(split):
    """Return the tokens of all rows, and the labels: -100 where a token does not count in the loss."""
    tokens = torch.from_numpy(np.load(f"{data}/{split}_tokens.npy")).long()
    counts = torch.from_numpy(np.load(f"{data}/{split}_counts.npy"))
    return tokens, torch.where(counts, tokens, -100)


def losses(tokens, labels):
    """Return the mean loss of each row, over its tokens that count."""
    logits, labels = model(input_ids=tokens).logits[:, :-1], labels[:, 1:]
    each = cross_entropy(logits.transpose(1, 2), labels, reduction="none")  # 0 for the label -100
    return each.sum(dim=1) / (labels != -100).sum(dim=1)


def show(text, values):
    """Print the mean over the values of all ranks, which have the same number of values."""
    total = values.detach().mean()
    distributed.all_reduce(total)
    if rank == 0:
        print(f"{text} {total.item() / ranks:.4f}", flush=True)


tokens, labels = rows("train")
order = np.random.default_rng(seed).permutation(len(tokens))  # as runstop shuffles its first epoch
optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.0)
cosine = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5 * (1 + math.cos(math.pi * n / steps)))
for step in range(1, steps + 1):
    own = order[np.arange((step - 1) * batch + rank, step * batch, ranks) % len(order)]
    loss = losses(tokens[own], labels[own]).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    cosine.step()
    optimizer.zero_grad()
    show(f"step {step} loss", loss)
with torch.no_grad():
    tokens, labels = rows("eval")
    show("evaluation loss", losses(tokens[rank::ranks], labels[rank::ranks]))
distributed.destroy_process_group()
