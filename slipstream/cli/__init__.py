"""The command line: `slipstream run | status | watch | generate | env | config`.

Importing this package loads only typer; each command imports what it needs when it runs.

Every error that a user can cause is a line on stderr that names the remedy; `--debug` adds the traceback.
"""

from __future__ import annotations

import sys
import time

STARTED = time.monotonic()  # the last line of a run counts from here


def main() -> None:
    """The console script."""
    from slipstream.cli.commands import app

    try:
        code = app(standalone_mode=False, prog_name="slipstream")
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:  # the reader of our output has left, as `| head` does
        sys.stderr.close()
        code = 141
    except Exception as error:
        code = explain(error)
    sys.exit(code if isinstance(code, int) else 0)


def explain(error: Exception) -> int:
    """Print an error, a line for each mistake. The exit code: 2 for what the user can mend, 1 for what only time or we can.

    A bug keeps its traceback: nobody can mend it from one line.
    """
    if "--debug" in sys.argv:
        import traceback
        traceback.print_exception(error)
    if type(error).__name__ == "NoArgsIsHelpError":  # the help is on the screen
        return 2
    if hasattr(error, "format_message"):  # a usage error of typer's command parser
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "slipstream"
        print(f"slipstream: {' '.join(error.format_message().split())} See `{path} --help`.", file=sys.stderr)  # pyright: ignore
        return 2
    if type(error).__name__ == "Abort":
        return 130
    from slipstream.errors import ConfigError, InvalidInput, SlipstreamError

    if isinstance(error, SlipstreamError):
        for sentence in getattr(error, "__notes__", [error.message]):
            print(f"slipstream: {' '.join(sentence.split())}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError | InvalidInput) else 1
    if isinstance(error, OSError):
        print(f"slipstream: {error}", file=sys.stderr)
        return 1
    if "--debug" not in sys.argv:
        import traceback
        traceback.print_exception(error)
        print("slipstream: this is a bug, please report it with the lines above", file=sys.stderr)
    return 1
