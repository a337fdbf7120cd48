"""Training: the manifest, the loop, and what a run writes."""
