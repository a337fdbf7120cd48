"""``python -m agilerl`` is the command line."""

from agilerl.cli import main

main()
