"""An OpenAI-compatible endpoint of a population: programs call it, and what it samples is trained on."""
