"""A program that becomes another: says who it is in a file, then executes it. The standard library alone.

``python launch.py PID_FILE LIMITS ARGV…``: LIMITS is JSON, soft and hard value by number. The file is there, whole,
before the program that it names begins: whoever started it may die at any moment and it can still be found.
"""

import json
import os
import resource
import sys


def main() -> None:
    pid_file, limits, *argv = sys.argv[1:]
    for number, (soft, hard) in json.loads(limits).items():
        if resource.getrlimit(int(number)) != (soft, hard):
            resource.setrlimit(int(number), (soft, hard))
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
        began = file.read().rpartition(")")[2].split()[19]
    draft = f"{pid_file}.{os.getpid()}"
    with open(draft, "w", encoding="ascii") as file:
        file.write(f"{os.getpid()}@{began}\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, pid_file)
    try:
        os.execvpe(argv[0], argv, _given())
    except OSError as error:
        sys.exit(f"{argv[0]}: {error.strerror}")


def _given() -> dict[bytes, bytes]:
    """The environment as it was given: Python adds LC_CTYPE to its own where the locale is C."""
    with open("/proc/self/environ", "rb") as file:
        return dict(word.split(b"=", 1) for word in file.read().split(b"\0") if b"=" in word)


if __name__ == "__main__":
    main()
