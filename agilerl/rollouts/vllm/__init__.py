"""vLLM as the engine of rollouts: inside the process, or as a server."""
