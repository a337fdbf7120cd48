"""Evolution of hyperparameters and adapters: fitness, selection, mutation, lineage. Numbers only, no torch."""
