"""What every command does: say how it is used, and end well, by one line about a mistake, or by a signal."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable


def command(words: list[str], usage: str, body: Callable[[list[str]], object], stopped: str = "") -> None:
    """``body(words)``, without words or with -h ``usage``.

    Exit status 2 with one line on stderr for what cannot be done, 128 + N after signal N, 141 if nobody reads on.
    ``stopped`` is said to who stopped it; a KeyboardInterrupt may bring the number of another signal than Ctrl-C's.
    """
    try:
        if not words or {"-h", "--help"} & set(words):
            print(usage)
        else:
            body(words)
        sys.stdout.flush()
    except BrokenPipeError:  # what is still buffered must not be written at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(128 + signal.SIGPIPE) from None
    except (ValueError, OSError, MemoryError) as error:
        say(error)
        raise SystemExit(2) from None
    except KeyboardInterrupt as stop:
        if stopped:
            print(stopped, file=sys.stderr)
        raise SystemExit(128 + next(iter(stop.args), signal.SIGINT)) from None


def say(error: Exception) -> None:
    """One line on stderr, whatever stands in the name of a file."""
    print(*str(error).splitlines(), file=sys.stderr)
