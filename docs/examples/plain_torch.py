"""Fine-tune a tiny Llama with a plain PyTorch loop: python plain_torch.py DATA SEED STEPS BATCH LR."""

import math
import sys

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

data, seed, steps, batch, lr = sys.argv[1], *map(int, sys.argv[2:5]), float(sys.argv[5])
torch.manual_seed(seed)
sizes = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 4, "vocab_size": 512}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
init = {"initializer_range": math.sqrt(2 / (5 * 128)), "rms_norm_eps": 1e-5}  # as runstop's own tiny Llama
model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, **init))


def rows(split):
    """Return the tokens of all rows, and the labels: -100 where a token does not count in the loss."""
    tokens = torch.from_numpy(np.load(f"{data}/{split}_tokens.npy")).long()
    counts = torch.from_numpy(np.load(f"{data}/{split}_counts.npy"))
    return tokens, torch.where(counts, tokens, -100)


tokens, labels = rows("train")
order = torch.randperm(len(tokens))
optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
cosine = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5 * (1 + math.cos(math.pi * n / steps)))
for step in range(1, steps + 1):
    own = order[torch.arange((step - 1) * batch, step * batch) % len(order)]
    loss = model(input_ids=tokens[own], labels=labels[own]).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    cosine.step()
    optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.4f}", flush=True)
with torch.no_grad():
    tokens, labels = rows("eval")
    print(f"evaluation loss {model(input_ids=tokens, labels=labels).loss.item():.4f}", flush=True)
