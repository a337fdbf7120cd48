"""One run on several processes: islands of a population, and the machinery to start and connect them."""
