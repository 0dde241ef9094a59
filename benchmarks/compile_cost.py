#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What it costs a user to include the library: processor time, memory and object size of a translation
unit with <bluefog/bluefog.hpp> beside one with <torch/torch.h> alone, and of one with the headers that
know nothing of torch.

    compile_cost.py --build FOLDER    a configured build of the benchmarks, whose compiler flags are used

Each file is compiled three times, in turn; of the processor time the median counts, of memory the
most. Prints a table, how many cores others took meanwhile, and one line of JSON per row."""

import argparse
import json
import os
import pathlib
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time

TORCH_ALONE = "#include <torch/torch.h>\nint main() { torch::nn::Linear net(2, 2); }\n"
WITH_BLUEFOG = """#include <torch/torch.h>
#include <bluefog/bluefog.hpp>
int main() {
  bluefog::communicator<bluefog::mpi_backend> comm;
  torch::nn::Linear net(2, 2);
  torch::optim::SGD sgd(net->parameters(), 0.1);
  bluefog::optim::adapt_with_combine optimizer(std::move(sgd), net, comm);
  optimizer.step();
}
"""
WITHOUT_TORCH = """#include <bluefog/communicator.hpp>
#include <bluefog/collective.hpp>
#include <bluefog/neighbor.hpp>
#include <bluefog/thread.hpp>
#include <bluefog/topology.hpp>
int main() {}
"""


def flags_of(build):
    """The compiler and its flags for a file that uses everything, as CMake would call it."""
    commands = json.loads((build / "compile_commands.json").read_text())
    for entry in commands:
        if "averaging_kernels" in entry["file"]:
            words = shlex.split(entry["command"])
            break
    else:
        sys.exit("compile_cost: the build has no benchmark averaging_kernels")
    while "g++" not in words[0] and "clang" not in words[0] and "c++" not in words[0]:
        words = words[1:]  # a compiler launcher
    kept = []
    skip = False
    for word in words:
        if skip:
            skip = False
        elif word in ("-o", "-c", "-MF", "-MT"):
            skip = True
        elif not word.startswith("-W") and word not in ("-MD", "-MMD"):
            kept.append(word)
    return kept


def compile_once(words, source, target):
    """Seconds of processor time, and the most memory in MiB that one of the compiler's processes had."""
    compiler = subprocess.Popen([*words, "-c", source, "-o", target])
    _, status, used = os.wait4(compiler.pid, 0)
    compiler.returncode = status  # it has been waited for
    if status != 0:
        sys.exit(f"compile_cost: {source} does not compile")
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def stripped_size(target):
    subprocess.run(["strip", "--strip-unneeded", target], check=True)
    return pathlib.Path(target).stat().st_size


def processor_times():
    """The time, and seconds of processor time so far: all of the machine, with what the hypervisor took away, and
    this program's own, with its compilers. Nothing where /proc does not say."""
    try:
        user, nice, system, _, _, hard, soft, stolen = pathlib.Path("/proc/stat").read_text().split()[1:9]
    except (OSError, ValueError):
        return None
    busy = sum(map(int, (user, nice, system, hard, soft, stolen))) / os.sysconf("SC_CLK_TCK")
    own = sum(used.ru_utime + used.ru_stime
              for used in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))
    return time.monotonic(), busy, own


def foreign_load(start, end):
    """How many cores others took from `start` to `end`, on average."""
    if not start or not end:
        return None
    return round(max(0.0, (end[1] - start[1] - (end[2] - start[2])) / (end[0] - start[0])), 3)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=pathlib.Path, required=True)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    words = flags_of(arguments.build)
    include = pathlib.Path(__file__).resolve().parent.parent / "include"
    words += [f"-I{include}", "-DBLUEFOG_HAS_MPI", "-DBLUEFOG_HAS_TORCH"]
    words += shlex.split(subprocess.run(["mpicxx", "-showme:compile"], capture_output=True, text=True).stdout)
    words += ["-DOMPI_SKIP_MPICXX", "-DMPICH_SKIP_MPICXX"]

    with tempfile.TemporaryDirectory() as folder:
        files = {}
        for name, text in (("torch alone", TORCH_ALONE), ("with bluefog", WITH_BLUEFOG),
                           ("bluefog without torch", WITHOUT_TORCH)):
            source = pathlib.Path(folder) / (name.replace(" ", "_") + ".cpp")
            source.write_text(text)
            files[name] = (str(source), str(source.with_suffix(".o")))
        start = processor_times()
        seconds = {name: [] for name in files}
        memory = {name: 0.0 for name in files}
        for _ in range(arguments.repeats):
            for name, (source, target) in files.items():
                processor, peak = compile_once(words, source, target)
                seconds[name].append(processor)
                memory[name] = max(memory[name], peak)
        foreign = foreign_load(start, processor_times())
        sizes = {name: stripped_size(target) for name, (_, target) in files.items()}

    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ratio = statistics.median(a / b for a, b in zip(seconds["with bluefog"], seconds["torch alone"]))
    growth = sizes["with bluefog"] - sizes["torch alone"]
    rows = [
        {"id": "B21", "work": "processor time of a unit with bluefog", "peer": "torch/torch.h alone",
         "value": round(ratio, 3), "target": "<= 1.10", "met": ratio <= 1.10},
        {"id": "B21", "work": "stripped object size added, KiB", "peer": "torch/torch.h alone",
         "value": round(growth / 1024, 1), "target": "<= 300", "met": growth <= 300 * 1024},
        {"id": "B21", "work": "processor time of a unit without torch, s", "peer": "-",
         "value": round(medians["bluefog without torch"], 2), "target": "<= 2",
         "met": medians["bluefog without torch"] <= 2},
    ]
    rows += [{"id": "B21", "work": f"peak memory of the compiler, {name}, MiB", "peer": "torch/torch.h alone",
              "value": round(memory[name]), "ratio": round(memory[name] / memory["torch alone"], 3),
              "target": "-", "met": None} for name in files]
    for name in files:
        print(f"{name:24} {medians[name]:7.2f} s processor time   {sizes[name] / 1024:9.1f} KiB   "
              f"{memory[name]:7.0f} MiB of memory at most")
    for row in rows:
        verdict = "" if row["met"] is None else f" (target {row['target']}) {'met' if row['met'] else 'MISSED'}"
        print(f"{row['work']:56} {row['value']:9}{verdict}")
    print(f"others took {foreign} cores; load {', '.join(f'{each:.2f}' for each in os.getloadavg())}")
    for row in rows:
        print(json.dumps({**row, "foreign_load": foreign}))


if __name__ == "__main__":
    main()
