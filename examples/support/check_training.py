#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains with what 040_train_mnist offers, and compares what it reports.

usage: check_training.py COMMAND [ARGUMENT...]
       check_training.py --threads PROGRAM [ARGUMENT...]

Averaging parameters has to reach 95 % in the end, to come within one point of averaging gradients (by the mean of
the last three epochs, since 500 images tell no less apart), and to send at most 0.7 of its bytes. Ranks that do not
communicate have to send nothing, and to have learnt less together after two epochs: what averages models that began
apart and stayed so may reach 70 % at most, which each of them passes alone. The models have to be equal where gradients
are averaged, somewhat apart where parameters are, and further apart where nothing is. How long it took to reach 95 % is
printed, not judged.

With --threads the ranks are four threads of one process, which average on a ring with two neighbors, and have to
send twice of what they send to one; their models are as those of processes.
"""

import json
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile


def train(command, optimizer, *options):
    """How many images there are to learn from, and the rows of JSON, one for each epoch."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "epochs.json"
        done = subprocess.run([*command, "--optimizer", optimizer, *options, "--json", str(file)], check=True,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        print(done.stdout, end="", flush=True)
        images = int(re.search(r"(\d+) images to learn from", done.stdout).group(1))
        return images, [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def in_the_end(rows):
    return statistics.mean(row["accuracy"] for row in rows[-3:])


def time_to(accuracy, images, rows):
    """In which epoch that much is reached, and after how many seconds of training."""
    seconds = 0
    for row in rows:
        seconds += images / row["images_per_second"]
        if row["accuracy"] >= accuracy:
            return f"{accuracy:.0%} in epoch {row['epoch']}, after {seconds:.1f} s of training"
    return f"{accuracy:.0%} never reached"


def judge_models(gradients, parameters, local):
    """Whether rows tell of the average of the ranks' models, and how far those are from it."""
    if any(row["accuracy"] > 0.7 for row in local):
        sys.exit(f"ranks that do not communicate average to {[row['accuracy'] for row in local]}, as if they did")
    equal, near, far = ([row["distance"] for row in rows] for rows in (gradients, parameters, local))
    if not max(equal) < 1e-3 < min(near) <= max(near) < min(far):
        sys.exit(f"distances {equal} where gradients are averaged, {near} where parameters are, {far} where nothing is")


def compare_optimizers(command):
    images, parameters = train(command, "adapt_with_combine")
    _, gradients = train(command, "gradient_allreduce")
    sent, baseline = parameters[-1]["bytes_per_step"], gradients[-1]["bytes_per_step"]
    said = (f"accuracy {in_the_end(parameters):.3f} against {in_the_end(gradients):.3f}, "
            f"bytes per step {sent} against {baseline}, {time_to(0.95, images, parameters)}")
    if in_the_end(parameters) < 0.95 or in_the_end(parameters) < in_the_end(gradients) - 0.01:
        sys.exit(f"averaging parameters learns too little: {said}")
    if not 0 < sent <= 0.7 * baseline:
        sys.exit(f"averaging parameters sends too much: {said}")
    print(said)

    _, local = train(command, "local", "--epochs", "2")
    alone, together = local[1]["accuracy"], parameters[1]["accuracy"]
    said = f"accuracy after two epochs {alone:.3f} without communication, {together:.3f} with it"
    if len(local) != 2 or any(row["bytes_per_step"] != 0 for row in local):
        sys.exit(f"ranks that do not communicate send {[row['bytes_per_step'] for row in local]} bytes per step")
    if alone >= together:
        sys.exit(f"communication teaches nothing: {said}")
    judge_models(gradients, parameters, local)
    print(said)


def compare_neighbors(command):
    options = ["--backend", "threads", "--ranks", "4", "--model", "mlp", "--epochs", "1"]
    _, one = train(command, "adapt_then_combine", *options, "--topology", "one_peer_exponential")
    _, two = train(command, "adapt_then_combine", *options, "--topology", "ring")
    said = f"bytes per step {two[0]['bytes_per_step']} on a ring, {one[0]['bytes_per_step']} to one neighbor"
    if len(one) != 1 or len(two) != 1 or not 0 < 2 * one[0]["bytes_per_step"] == two[0]["bytes_per_step"]:
        sys.exit(f"two neighbors do not get twice of what one gets: {said}")
    if min(one[0]["accuracy"], two[0]["accuracy"]) < 0.5:
        sys.exit("an epoch teaches next to nothing")
    _, gradients = train(command, "gradient_allreduce", *options)
    _, local = train(command, "local", *options)
    judge_models(gradients, one + two, local)
    print(said)


def main():
    if len(sys.argv) < 2 or sys.argv[1:] == ["--threads"]:
        sys.exit(__doc__)
    if sys.argv[1] == "--threads":
        compare_neighbors(sys.argv[2:])
    else:
        compare_optimizers(sys.argv[1:])


if __name__ == "__main__":
    main()
