"""The command line: ``agilerl``. Heavy imports happen inside the commands, so that ``--help`` is quick."""

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line; a user's mistake ends with one sentence and exit code 2, an interruption with 130."""
    from agilerl.cli.app import app
    from agilerl.errors import AgileRLError

    try:
        app()
    except AgileRLError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
