"""``python -m agilerl.cli`` is the command line, for launchers that want a module: accelerate launch, torchrun."""

from agilerl.cli import main

main()
