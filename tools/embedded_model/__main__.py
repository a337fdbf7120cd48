"""``python -m tools.embedded_model build [--out DIR]`` and ``verify [DIR]``."""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from agilerl.errors import CheckpointError
from agilerl.models.tiny import tiny_model_path
from tools.embedded_model.verify import differences

# Matrix products are added up in an order that depends on the widest instructions the processor has. Asking for
# AVX2 makes processors that have more than that agree with those that do not. Read by the libraries when they load.
ARITHMETIC = {"MKL_CBWR": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "1"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 fine, 1 files differ or cannot be checked."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.embedded_model", description="Rebuild or check the embedded base model."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    builder = commands.add_parser("build", help="train it again from nothing (minutes on one core)")
    builder.add_argument("--out", type=Path, default=Path("tiny-model"), help="folder to write (default: tiny-model)")
    verifier = commands.add_parser("verify", help="compare files with the checksums of the shipped ones")
    verifier.add_argument("folder", type=Path, nargs="?", default=tiny_model_path(), help="default: the shipped files")
    options = parser.parse_args(arguments)
    return _build(options.out) if options.command == "build" else _verify(options.folder)


def _build(folder: Path) -> int:
    os.environ.update(ARITHMETIC)
    # Imported here: torch must load after the environment is set, and verify needs none of it.
    from tools.embedded_model.build import build

    start = time.monotonic()
    build(folder)
    print(f"built {folder} in {time.monotonic() - start:.0f} s")
    return _verify(folder)


def _verify(folder: Path) -> int:
    try:
        problems = differences(folder, tiny_model_path())
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 1
    for problem in problems:
        print(problem, file=sys.stderr)
    if not problems:
        print(f"{folder} holds the shipped embedded base, byte for byte")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
