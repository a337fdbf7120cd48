"""agilerl: evolutionary hyperparameter search in reinforcement learning of language models."""

__version__ = "0.1.0"
