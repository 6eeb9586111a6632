"""What the plan estimates: parameters, FLOPs, activations, memory, network and the time of a step."""
