#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Starts whole MPI jobs that end in many ways, and checks exit status, output and time.

usage: run_jobs.py [--only NAME] [--flavour NAME] PROGRAM -- LAUNCHER WORD...

LAUNCHER WORD... is what starts as many ranks as the word RANKS among them is replaced by. Bounds on time are those
of the promise, and are widened once by what the same launcher needs for a job that does nothing wrong.
"""

import argparse
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time


class Job:
    """One scenario: what its whole job has to look like."""

    def __init__(self, scenario, fails, says=(), never=(), within=None, environment=(), alone=False, soon=None,
                 once=None, flavour=None, copying=False, small_memory=False, ranks=2, launcher=None):
        self.scenario, self.fails, self.never = scenario, fails, never
        self.says = [*says, soon[0]] if soon else says
        self.within, self.environment, self.alone = within, dict(environment), alone
        self.soon = soon  # what a line says, and within how many seconds
        self.once = once  # what exactly one line says
        self.flavour = flavour  # the only launcher that it is for
        self.copying = copying  # where processes may read each other's memory
        self.small_memory = small_memory  # with 1 MiB in /dev/shm
        self.ranks = ranks
        self.launcher = launcher  # another than the one of the command line


NOISE = [r"MPI_ERR", r"MPI_Abort|MPI_ABORT", r"after MPI_FINALIZE", r"[Ss]egmentation", r"terminate called",
         r"\berror\]"]
# A variable that is None is unset.
COPYING = {"OMPI_MCA_btl_vader_single_copy_mechanism": None, "OMPI_MCA_smsc": None}
NO_COPYING = {"OMPI_MCA_btl_vader_single_copy_mechanism": "none", "OMPI_MCA_smsc": "^cma"}
HINT = r"set OMPI_MCA_(?:btl_vader_single_copy_mechanism=none|smsc=\^cma)"
PATIENCE = {"BLUEFOG_STALL_WARNING": "1", "BLUEFOG_TIMEOUT": "3"}
JOBS = [
    # An exception on one rank ends the job soon, with that rank's message.
    Job("throw", True, [r"error\] rank 1: the data are gone"], within=2),
    Job("catch-outside", True, [r"caught: the data are gone", r"error\] rank 1: an exception ended"], within=2),
    Job("user-throws", True, [r"caught: the data are gone", r"error\] rank 1: an exception ended"], within=2),
    Job("terminate", True, [r"error\] rank 1: std::terminate"], within=2),
    # One that is dealt with ends nothing.
    Job("catch-inside", False, ["rank 1 goes on", "rank 0 is done", "rank 1 is done"], NOISE),
    Job("recover", False, ["rank 0 is done", "rank 1 is done"], NOISE),
    Job("lose-a-part", False, ["rank 0 is done", "rank 1 is done"], NOISE),
    # MPI is initialised and finalised once, by whoever was first.
    Job("plain", False, ["rank 0 is done", "rank 1 is done"], NOISE),
    Job("global", False, ["rank 0 has a communication thread", "rank 0 is done", "rank 1 is done"], NOISE),
    Job("global", False, ["rank 0 has no communication thread", "rank 1 is done"], NOISE,
        environment={"BLUEFOG_MPI_THREAD_LEVEL": "1"}),
    Job("again", False, ["rank 0 is done", "rank 1 is done"], NOISE),
    Job("user-initializes", False, ["rank 1 is done", "sum 2"], NOISE),
    Job("user-finalizes", False, ["rank 1 is done", "late: mpi_backend: MPI has been finalized"], NOISE),
    # A rank that is gone or silent does not hold the others for ever.
    Job("killed", True, within=8),
    Job("late", True, [r"rank 0: allreduce.*timed out.*rank 1"], within=4, environment=PATIENCE,
        soon=(r"stall on rank 0: allreduce", 2)),
    Job("late", True, [r"rank [02]: allreduce.*timed out.*; not heard from ranks 1, 3"], within=4,
        environment=PATIENCE, ranks=4),
    Job("late-caught", True, [r"caught: allreduce.*timed out.*rank 1"], within=6, environment=PATIENCE),
    *(Job(scenario, True, [r"caught: communicator.*timed out", r"rank [02]: communicator.*timed out.*rank 1"],
          within=9, environment=PATIENCE, ranks=3) for scenario in ("late-split", "late-companion")),
    Job("exit", True, [r"rank 0: the program ends with transfers"], within=3),
    Job("alone-at-construction", True, [r"rank 0: mpi_backend: timed out after .* do not make this communicator"],
        within=4, environment=PATIENCE, soon=(r"stall: mpi_backend has waited", 2)),
    # Ranks share the machine that they are on, and what counts as one may be set.
    Job("machines", False, ["rank 0 is 0 of 2 on machine 0 of 1; 2 in local, 1 in leaders",
                            "rank 1 is 1 of 2 on machine 0 of 1; 2 in local, 0 in leaders"], NOISE),
    Job("machines", False, ["rank 0 is 0 of 1 on machine 0 of 2; 1 in local, 2 in leaders",
                            "rank 1 is 0 of 1 on machine 1 of 2; 1 in local, 2 in leaders"], NOISE,
        environment={"BLUEFOG_NODES_PER_MACHINE": "1"}),
    Job("machines", False, ["rank 0 is 0 of 2 on machine 0 of 2; 2 in local, 2 in leaders",
                            "rank 1 is 1 of 2 on machine 0 of 2; 2 in local, 0 in leaders",
                            "rank 2 is 0 of 2 on machine 1 of 2; 2 in local, 2 in leaders",
                            "rank 3 is 1 of 2 on machine 1 of 2; 2 in local, 0 in leaders"], NOISE,
        environment={"BLUEFOG_NODES_PER_MACHINE": "2"}, ranks=4),
    # Lines on standard error have the time of day, or not.
    Job("plain", False, [r"(?m)^\[bluefog \d\d:\d\d:\d\d warning\] settings: BLUEFOG_TIMOUT is not"], alone=True,
        environment={"BLUEFOG_TIMOUT": "3"}),
    Job("plain", False, [r"(?m)^\[bluefog warning\] settings: BLUEFOG_TIMOUT is not"], alone=True,
        environment={"BLUEFOG_TIMOUT": "3", "BLUEFOG_LOG_HIDE_TIME": "1"}),
    # Started by a launcher of another MPI, each process would be rank 0 of 1.
    Job("plain", True, [r"Open MPI's mpirun started 2 ranks \(OMPI_COMM_WORLD_SIZE=2\) but MPI sees one"],
        flavour="MPICH", launcher=["mpirun.openmpi", "-np", "2"]),
    Job("plain", True, [r"MPICH's mpiexec .* started 2 ranks \(PMI_SIZE=2\) but MPI sees one"],
        flavour="Open MPI", launcher=["mpiexec.hydra", "-n", "2"]),
    Job("plain", True, [r"Open MPI's mpirun started 2 ranks \(OMPI_COMM_WORLD_SIZE=2\) but MPI sees one"],
        alone=True, environment={"OMPI_COMM_WORLD_SIZE": "2"}),
    Job("user-world", True, [r"Open MPI's mpirun started 2 ranks \(OMPI_COMM_WORLD_SIZE=2\) but MPI sees one"],
        alone=True, environment={"OMPI_COMM_WORLD_SIZE": "2"}),
    Job("plain", True, [r"MPICH's mpiexec .* started 4 ranks \(PMI_SIZE=4\) but MPI sees one"], alone=True,
        environment={"PMI_SIZE": "4"}),
    Job("plain", True, [r"Slurm's srun started 3 ranks \(SLURM_STEP_NUM_TASKS=3\)"], alone=True,
        environment={"SLURM_STEP_NUM_TASKS": "3"}),
    Job("plain", False, ["rank 0 is done"], NOISE, alone=True, environment={"SLURM_NTASKS": "3"}),
    Job("plain", False, ["rank 0 is done"], NOISE, alone=True,
        environment={"SLURM_STEP_NUM_TASKS": "3", "BLUEFOG_ALLOW_SINGLETON": "1"}),
    # What about the machine will trouble MPI is said by one rank, and only where it is so.
    Job("no-single-copy", False, once=HINT, environment=COPYING, flavour="Open MPI"),
    Job("no-single-copy", False, ["rank 1 is done"], [HINT], environment=NO_COPYING),
    Job("no-single-copy", False, ["rank 1 is done"], [HINT], environment={**COPYING, "BLUEFOG_LOG_LEVEL": "error"}),
    Job("no-single-copy", False, ["rank 0 is done"], [HINT], environment=COPYING, alone=True),
    Job("plain", False, ["rank 1 is done"], [HINT], environment=COPYING, copying=True),
    Job("plain", False, once="/dev/shm has [01] MiB free", flavour="Open MPI", small_memory=True),
]

# Starts the words after it where /dev/shm is small, which others on this machine do not see.
IN_SMALL_MEMORY = ["unshare", "--mount", *(["--map-root-user"] if os.geteuid() else []), "sh", "-c",
                   'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"', "sh"]


def why_not(job, flavour):
    """Returns why this job cannot be started here, or None."""
    if job.flavour not in (None, flavour):
        return f"is for {job.flavour}"
    if job.launcher and not shutil.which(job.launcher[0]):
        return f"there is no {job.launcher[0]}"
    if job.alone and flavour == "MPICH" and "PMI_SIZE" in job.environment:
        return "is its own launcher's variable: the library believes it"
    if job.copying and ctypes.CDLL(None).process_vm_readv(os.getpid(), None, 0, None, 0, 0) != 0:
        return "this machine forbids process_vm_readv"
    if job.small_memory:
        try:
            attempt = subprocess.run([*IN_SMALL_MEMORY, "true"], capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return "there is no unshare"
        if attempt.returncode != 0:
            return f"mounting is not allowed: {attempt.stderr.strip()}"
    return None


def run(command, environment):
    """Returns exit status, lines with the seconds at which they came, and seconds; a job that does not end
    counts as status None."""
    start = time.monotonic()
    environment = {name: value for name, value in {**os.environ, **environment}.items() if value is not None}
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               env=environment, start_new_session=True, text=True, errors="replace")
    late = threading.Event()

    def end():
        late.set()
        os.killpg(process.pid, signal.SIGKILL)

    clock = threading.Timer(60, end)
    clock.start()
    lines = [(time.monotonic() - start, line.rstrip("\n")) for line in process.stdout]
    status = process.wait()
    clock.cancel()
    return None if late.is_set() else status, lines, time.monotonic() - start


def problems_of(job, status, lines):
    output = "\n".join(line for _, line in lines)
    if status is None:
        yield "did not end within 60 s"
        return
    if job.fails != (status != 0):
        yield f"exit status {status}"
    for pattern in job.says:
        if not re.search(pattern, output):
            yield f"does not say /{pattern}/"
    if job.once and (count := len(re.findall(job.once, output))) != 1:
        yield f"says /{job.once}/ {count} times"
    for pattern in job.never:
        if re.search(pattern, output):
            yield f"says /{pattern}/"


def delays_of(job, lines, seconds, usual):
    if job.soon:
        pattern, limit = job.soon
        came = next((at for at, line in lines if re.search(pattern, line)), None)
        if came is not None and came > limit + usual:
            yield f"says /{pattern}/ after {came:.1f} s, with {usual:.1f} s for a job without a fault"
    if job.within and seconds > job.within + usual:
        yield f"took {seconds:.1f} s, with {usual:.1f} s for a job without a fault"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="the scenario of this name")
    parser.add_argument("--flavour", default="Open MPI", help="what the launcher is: Open MPI or MPICH")
    parser.add_argument("program")
    parser.add_argument("launcher", nargs="+")
    arguments = parser.parse_args()

    def launcher_of(job):
        return [str(job.ranks) if word == "RANKS" else word for word in job.launcher or arguments.launcher]

    usual = run([*launcher_of(Job("plain", False)), arguments.program, "plain"], {})[2]
    failed = 0
    for job in JOBS:
        if arguments.only not in (None, job.scenario):
            continue
        name = " ".join([job.scenario, *(f"{k}={v}" for k, v in sorted(job.environment.items()) if v is not None),
                         *(["alone"] if job.alone else []),
                         *([f"with {job.ranks} ranks"] if job.ranks != 2 else []),
                         *([f"by {job.launcher[0]}"] if job.launcher else []),
                         *(["in 1 MiB of /dev/shm"] if job.small_memory else [])])
        if reason := why_not(job, arguments.flavour):
            print(f"skipped         {name}: {reason}", flush=True)
            continue
        command = [arguments.program, job.scenario]
        if not job.alone:
            command = [*launcher_of(job), *command]
        if job.small_memory:
            command = [*IN_SMALL_MEMORY, *command]
        # On processors that others keep busy for a while nothing takes a known time: late is what is late
        # in each of three attempts. Everything else has to hold in the first.
        for _ in range(3):
            status, lines, seconds = run(command, job.environment)
            found = list(problems_of(job, status, lines))
            delays = list(delays_of(job, lines, seconds, usual))
            if found or not delays:
                break
        found += delays
        print(f"{'FAILED' if found else 'passed'} {seconds:5.1f} s  {name}", flush=True)
        if found:
            failed += 1
            print("\n".join(["  " + text for text in found] + [f"  | {at:5.1f} s  {line}" for at, line in lines]))
    print(f"{failed} jobs failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
