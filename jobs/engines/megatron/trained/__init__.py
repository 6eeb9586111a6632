"""The transformer layer that trains all weights: hand-written passes for Llama and GPT-3, in FP32, BF16 and FP8."""
