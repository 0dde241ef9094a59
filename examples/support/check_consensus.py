#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Averages with one neighbor per round, and expects what the theory of exponential graphs says of the error.

usage: check_consensus.py PROGRAM [ARGUMENT...]

PROGRAM is 020_average_consensus. Of 8 ranks, a power of two, all have the average after log2 8 = 3 rounds, but for
rounding, and not before. Of 6 ranks the three rounds leave a part, which is at most 0.216506 of what the error was.
"""

import json
import pathlib
import subprocess
import sys
import tempfile


def errors(command, ranks):
    """The relative error before the first round, and after each of three."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "rounds.json"
        subprocess.run([*command, "--backend", "threads", "--ranks", str(ranks), "--dynamic", "--rounds", "3",
                        "--json", str(file)], check=True, stdin=subprocess.DEVNULL)
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    if [row["round"] for row in rows] != [0, 1, 2, 3]:
        sys.exit(f"three rounds are reported as {rows}")
    return [row["relative_error"] for row in rows]


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    exact = errors(sys.argv[1:], 8)
    if not (exact[3] < 1e-14 < 0.1 < exact[2] < exact[1] < exact[0]):
        sys.exit(f"8 ranks do not have the average after three rounds, or have it before: {exact}")
    near = errors(sys.argv[1:], 6)
    if not 1e-3 < near[3] / near[0] <= 0.216507:
        sys.exit(f"6 ranks leave another error than theory says: {near}")


if __name__ == "__main__":
    main()
