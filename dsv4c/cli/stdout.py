"""Data on stdout: UTF-8 whatever the terminal's encoding, at once, and a message where it cannot be written."""

import os
import sys

from dsv4c.errors import InputError


def write_stdout(text: str) -> None:
    # Python leaves a stream out that was closed before it started.
    if sys.stdout is None:
        raise InputError("stdout is closed", hint="send the output somewhere")
    try:
        sys.stdout.buffer.write(text.encode())
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        drop_stdout()
        raise InputError(
            f"cannot write to stdout: {error.strerror or error}",
            hint="check where the output is sent, and the space there",
        ) from None


def drop_stdout() -> None:
    """Python writes what is left at exit, and would complain a second time."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
