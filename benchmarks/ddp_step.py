#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""PyTorch's DistributedDataParallel over gloo on the networks of training_step.cpp.

usage: ddp_step.py [--ranks N] [--ours FILE]

Alternates a step under DDP with a local one, one thread per rank, and prints the ratio: of each round the slowest
rank, of the rounds the median. With the output of training_step in FILE it also prints how this library's ratio to
the local step compares; the goals are 0.65 for gradient_allreduce and 0.5 for adapt_with_combine."""

import argparse
import json
import pathlib
import resource
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn

GOALS = {"gradient_allreduce": 0.65, "adapt_with_combine": 0.5}


def perceptron(width):
    return nn.Sequential(nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def convolutions():
    return nn.Sequential(nn.Unflatten(1, (1, 28, 28)), nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                         nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
                         nn.Linear(64 * 49, 128), nn.ReLU(), nn.Linear(128, 10))


WORK = {"mlp, 2 M": lambda: perceptron(1024), "mlp, 20 M": lambda: perceptron(4064), "cnn, 0.4 M": convolutions}


def stepper(net):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    x, y = torch.randn(32, 784), torch.randint(10, (32,))

    def step():
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()

    return step


def processor():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def cost(step, calls):
    """Seconds of the slowest rank, and processor seconds of a rank on average, per call."""
    dist.barrier()
    used, start = processor(), time.perf_counter()
    for _ in range(calls):
        step()
    seconds = torch.tensor([(time.perf_counter() - start) / calls])
    used = torch.tensor([(processor() - used) / calls])
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    dist.all_reduce(used)
    return seconds.item(), used.item() / dist.get_world_size()


def measure(rank, ranks, meeting, place):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    result = {}
    for name, make in WORK.items():
        torch.manual_seed(1)
        ours, local = stepper(nn.parallel.DistributedDataParallel(make())), stepper(make())
        calls = 1 if "20 M" in name else 4
        pairs = [(cost(ours, calls), cost(local, calls)) for _ in range(17)][2:]
        result[name] = {"ratio": statistics.median(a[0] / b[0] for a, b in pairs),
                        "processor": sum(a[1] for a, _ in pairs) / sum(b[1] for _, b in pairs)}
    if rank == 0:
        pathlib.Path(place).write_text(json.dumps(result))
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--ours", type=pathlib.Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        results = f"{place}/results"
        torch.multiprocessing.spawn(measure, (options.ranks, f"{place}/meeting", results), options.ranks)
        theirs = json.loads(pathlib.Path(results).read_text())
    judged = "ratio" if options.ranks <= torch.multiprocessing.cpu_count() else "processor"
    rows = [json.loads(line) for line in options.ours.read_text().splitlines() if line.startswith("{")] \
        if options.ours else []
    print(f"{'work':<12} {'ours':<20} {'against':<20} {judged:>10} {'goal':>5}")
    for name, seen in theirs.items():
        print(f"{name:<12} {'DDP':<20} {'local step':<20} {seen[judged]:10.3f}")
        for row in rows:
            if row.get("work") != name or row["peer"] != "local step":
                continue
            ours, goal = row["ours"], GOALS[row["ours"]]
            quotient = row[judged] / seen[judged]
            verdict = "met" if quotient <= goal else "MISSED"
            print(f"{name:<12} {ours:<20} {'DDP':<20} {quotient:10.3f} {goal:5.2f} {verdict}")
            print(json.dumps({"id": "B12", "work": name, "ours": ours, "peer": "DDP over gloo", "ranks": options.ranks,
                              judged: round(quotient, 4), "goal": goal, "verdict": verdict}))


if __name__ == "__main__":
    main()
