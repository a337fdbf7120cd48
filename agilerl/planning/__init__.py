"""What a run needs, as arithmetic without torch: time, memory, and how to lay a population over devices."""
