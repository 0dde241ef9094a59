#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs an example and compares what it prints with the comment that ends its source.

usage: check_output.py [--json FILE] SOURCE COMMAND [ARGUMENT...]

The comment starts with a line `// Expected output` (whatever follows on that line). In the lines below it
`<number>` stands for any number, `<text>` for any text within the line, a line `...` for any lines, and
everything else for itself. (Around lines that are too long for the formatter one writes `// clang-format off`
and `// clang-format on`.) With `--json FILE` the example is given that option too, and what it writes there is
compared with what it prints: for each line that starts with the name of the first value, as in `epoch 3/10`, one
JSON object whose numbers stand in that line, rounded and in order. Needs nothing but Python itself.
"""

import decimal
import difflib
import json
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


def refuse_constant(name):
    raise ValueError(f"{name} is no JSON")


def stands_for(printed, value):
    """Whether a printed number is `value`, rounded."""
    shown = decimal.Decimal(printed)
    unit = decimal.Decimal(1).scaleb(shown.as_tuple().exponent)
    return abs(shown - decimal.Decimal(value)) <= unit * decimal.Decimal("0.500001")


def fault_of_row(row, line):
    """What is wrong with a line of JSON that reports a printed line; nothing where it is right."""
    number = r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?"
    printed = iter(re.findall(number, line))
    for name, value in row.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return f"{name} is {value!r}, no number"
        if value < 0 or (name == "accuracy" and value > 1):
            return f"{name} cannot be {value}"
        if not any(stands_for(each, value) for each in printed):
            return f"{name} is {value}, which is not printed: {line}"
    return None


def check_json(file, actual):
    rows = [json.loads(line, parse_constant=refuse_constant) for line in file.read_text(encoding="utf-8").splitlines()]
    if len(rows) < 2 or any(not isinstance(row, dict) or len(row) < 2 for row in rows):
        sys.exit(f"{file}: wants an object of several numbers on each of several lines")
    lines = [line for line in actual if line.split(" ")[0] == next(iter(rows[0]))]
    if len(lines) != len(rows):
        sys.exit(f"{file}: {len(rows)} lines of JSON for {len(lines)} printed ones")
    for row, line in zip(rows, lines):
        fault = "other names" if row.keys() != rows[0].keys() else fault_of_row(row, line)
        if fault:
            sys.exit(f"{file}: {fault}")


def main():
    arguments = sys.argv[1:]
    report = None
    if arguments[:1] == ["--json"] and len(arguments) > 1:
        report = pathlib.Path(arguments[1])
        if report.exists():
            report.unlink()
        arguments = [*arguments[2:], "--json", str(report)]
    if len(arguments) < 2:
        sys.exit(__doc__)
    source, command = arguments[0], arguments[1:]
    wanted = promised(source)
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    actual = [line.rstrip() for line in done.stdout.rstrip().splitlines()]
    if done.returncode != 0:
        print(done.stdout)
        sys.exit(f"{command[0]} ended with {done.returncode}")
    if not fits(wanted, actual):
        print("\n".join(difflib.unified_diff(wanted, actual, "promised", "printed", lineterm="", n=50)))
        sys.exit(f"{source}: it prints something else than it promises")
    if report:
        check_json(report, actual)
    print(done.stdout, end="")


if __name__ == "__main__":
    main()
