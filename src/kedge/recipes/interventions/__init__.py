"""Interventions: a model's output with changed activations, by patching between inputs, ablation or steering."""
