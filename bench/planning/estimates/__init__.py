"""Estimates of the plan: parameters, FLOPs, activations, memory, network and the time of a step."""
