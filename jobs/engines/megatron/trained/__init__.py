"""The transformer layer whose weights are trained: one hand-written pass for Llama and GPT-3, in FP32, BF16 and FP8."""
