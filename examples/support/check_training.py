#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains by averaging parameters and by averaging gradients, and compares what 040_train_mnist reports of both.

usage: check_training.py COMMAND [ARGUMENT...]

Averaging parameters has to reach 95 % in the end, to come within one point of averaging gradients (by the mean of
the last three epochs, since 500 images tell no less apart), and to send at most 0.7 of its bytes.
"""

import json
import pathlib
import statistics
import subprocess
import sys
import tempfile


def train(command, optimizer):
    """The rows of JSON, one for each epoch."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "epochs.json"
        subprocess.run([*command, "--optimizer", optimizer, "--json", str(file)], check=True, stdin=subprocess.DEVNULL)
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def in_the_end(rows):
    return statistics.mean(row["accuracy"] for row in rows[-3:])


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    parameters = train(sys.argv[1:], "adapt_with_combine")
    gradients = train(sys.argv[1:], "gradient_allreduce")
    sent, baseline = parameters[-1]["bytes_per_step"], gradients[-1]["bytes_per_step"]
    said = (f"accuracy {in_the_end(parameters):.3f} against {in_the_end(gradients):.3f}, "
            f"bytes per step {sent} against {baseline}")
    if in_the_end(parameters) < 0.95 or in_the_end(parameters) < in_the_end(gradients) - 0.01:
        sys.exit(f"averaging parameters learns too little: {said}")
    if not 0 < sent <= 0.7 * baseline:
        sys.exit(f"averaging parameters sends too much: {said}")
    print(said)


if __name__ == "__main__":
    main()
