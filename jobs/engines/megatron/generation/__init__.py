"""Generation with the weights and layers that the engine trains: prompts in, answers out."""
