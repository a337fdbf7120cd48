"""One run on several processes: islands of a population, and how they are started and connected."""
