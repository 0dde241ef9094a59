#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Looks for the progress bar of 040_train_mnist: drawn where somebody watches, and nowhere else.

usage: check_progress.py PROGRAM [ARGUMENT...]

Trains for an epoch with standard output a terminal or a pipe, under a parent whose own is a terminal or a pipe. The bar
has to show where both are terminals, and only there: a terminal under a parent with a pipe is what mpirun gives its
ranks while its output goes to a file, and a pipe under a parent with a terminal is what `| tee` reads. Each drawing has
to be as long as its count of steps says, and the last one has to be wiped. Ends with 77, and a reason, where there are
no pseudo-terminals.
"""

import os
import re
import subprocess
import sys

BATCH = 4
WIDTH = 30
WIPE = "\r\033[K"
PARENT = "import subprocess, sys; sys.exit(subprocess.call(sys.argv[2:], stdout=int(sys.argv[1])))"


def read_to_end(file):
    parts = []
    try:
        parts.extend(iter(lambda: os.read(file, 1 << 16), b""))
    except OSError:  # the end of a terminal
        pass
    return b"".join(parts).decode()


def printed(command, parent, own):
    """What the command prints where standard output is `own`, and its parent's is `parent`."""
    ends = {"terminal": os.openpty(), "pipe": os.pipe()}  # to read from, to write to
    child = subprocess.Popen([sys.executable, "-c", PARENT, str(ends[own][1]), *command], pass_fds=[ends[own][1]],
                             stdin=subprocess.DEVNULL, stdout=ends[parent][1])
    for _, file in ends.values():
        os.close(file)
    text = read_to_end(ends[own][0])
    for file, _ in ends.values():
        os.close(file)
    if child.wait() != 0:
        sys.exit(f"{command[0]} ended with {child.returncode}: {text}")
    return text.replace("\r\n", "\n")  # how a terminal ends a line


def check_bar(text):
    """Whether the bar is drawn as the steps are made. What is printed without it."""
    steps = -(-int(re.search(r"(\d+) images to learn from", text).group(1)) // BATCH)
    drawings = re.findall(r"\repoch 1/1 \[(=*)( *)\] (\d+)/(\d+)", text)
    counts = [int(done) for _, _, done, _ in drawings]
    if not drawings or any(int(total) != steps for *_, total in drawings):
        sys.exit(f"no progress bar of {steps} steps on a terminal: {text!r}")
    if counts != sorted(set(counts)) or not 1 <= counts[0] <= counts[-1] <= steps:
        sys.exit(f"the progress bar counts {counts} of {steps}")
    for bar, rest, done, _ in drawings:
        if len(bar) != WIDTH * int(done) // steps or len(bar + rest) != WIDTH:
            sys.exit(f"the progress bar after {done} of {steps} steps is [{bar}{rest}]")
    line, wiped, result = text[text.rindex("\repoch") :].partition(WIPE)
    if not wiped or not line.endswith(f"{counts[-1]}/{steps}") or not result.startswith("epoch 1/1 "):
        sys.exit(f"the progress bar is not wiped: {text!r}")
    return re.sub(r"\r[^\r\n]*(?=\r)", "", text).replace(WIPE, "")


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    try:
        for file in os.openpty():
            os.close(file)
    except OSError as problem:
        print(f"skipped: there are no pseudo-terminals: {problem}")
        sys.exit(77)
    options = ["--backend", "threads", "--ranks", "1", "--model", "mlp", "--epochs", "1", "--batch-size", str(BATCH)]
    for parent in ["terminal", "pipe"]:
        for own in ["terminal", "pipe"]:
            text = printed([*sys.argv[1:], *options], parent, own)
            if parent == own == "terminal":
                text = check_bar(text)
            if not re.fullmatch(r"1 ranks [^\r\033\n]*\nepoch 1/1 [^\r\033\n]*\n", text):
                sys.exit(f"on a {own} under a parent on a {parent} it prints {text!r}")
    print("the progress bar is drawn where somebody watches, and only there")


if __name__ == "__main__":
    main()
