#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs an example and compares what it prints with the comment that ends its source.

usage: check_output.py SOURCE COMMAND [ARGUMENT...]

The comment starts with a line `// Expected output` (whatever follows on that line). In the lines below it
`<number>` stands for any number, `<text>` for any text within the line, a line `...` for any lines, and
everything else for itself. (Around lines that are too long for the formatter one writes `// clang-format off`
and `// clang-format on`.) Needs nothing but Python itself.
"""

import difflib
import pathlib
import re
import subprocess
import sys

WILD = {"<number>": r"[-+]?(?:\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+|inf|nan)", "<text>": r".*?"}


def promised(source):
    lines = pathlib.Path(source).read_text(encoding="utf-8").rstrip().splitlines()
    starts = [i for i, line in enumerate(lines) if re.match(r"//\s*Expected output", line)]
    if not starts:
        sys.exit(f"{source}: no comment `// Expected output` at its end")
    comment = lines[starts[-1] + 1 :]
    if any(not line.startswith("//") for line in comment):
        sys.exit(f"{source}: something follows the comment `// Expected output`")
    comment = [line[2:].rstrip() for line in comment if "clang-format o" not in line]
    while comment and not comment[0]:
        comment.pop(0)
    while comment and not comment[-1]:
        comment.pop()
    indent = min((len(line) - len(line.lstrip()) for line in comment if line), default=0)
    return [line[indent:] for line in comment]


def pattern_of(line):
    parts = re.split("(<number>|<text>)", line)
    # Columns of numbers are padded to their width, so blanks match any count of blanks.
    exact = lambda part: re.sub(r"(?:\\ )+", r"\\s+", re.escape(part))
    return re.compile("".join(WILD.get(part) or exact(part) for part in parts))


def fits(wanted, actual):
    """Whether the lines fit, by dynamic programming over where a `...` ends."""
    reachable = {0}
    for line in wanted:
        if line.strip() == "...":
            reachable = set(range(min(reachable), len(actual) + 1))
        else:
            pattern = pattern_of(line)
            reachable = {i + 1 for i in reachable if i < len(actual) and pattern.fullmatch(actual[i])}
        if not reachable:
            return False
    return len(actual) in reachable


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    source, command = sys.argv[1], sys.argv[2:]
    wanted = promised(source)
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    actual = [line.rstrip() for line in done.stdout.rstrip().splitlines()]
    if done.returncode != 0:
        print(done.stdout)
        sys.exit(f"{command[0]} ended with {done.returncode}")
    if not fits(wanted, actual):
        print("\n".join(difflib.unified_diff(wanted, actual, "promised", "printed", lineterm="", n=50)))
        sys.exit(f"{source}: it prints something else than it promises")
    print(done.stdout, end="")


if __name__ == "__main__":
    main()
