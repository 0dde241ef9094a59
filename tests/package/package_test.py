#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Installs the package, and builds and runs consumers of it. Run by CTest, one step at a time."""

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import venv


def parse():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step", choices=["install", "find_package", "components", "subdirectory", "fetch_content", "errors", "libtorch"])
    parser.add_argument("--source", type=pathlib.Path, required=True)
    parser.add_argument("--work", type=pathlib.Path, required=True)
    parser.add_argument("--cmake", required=True)
    parser.add_argument("--generator", required=True)
    parser.add_argument("--compiler", required=True)
    parser.add_argument("--launcher", default="")
    parser.add_argument("--mpi-compiler", default="")
    parser.add_argument("--mpiexec", default="")
    parser.add_argument("--torch", default="", help="the libtorch folder of this build")
    parser.add_argument("--nccl", default="", help="the folder of this build's nccl.h")
    parser.add_argument("--nccl-library", default="", help="the file of this build's NCCL")
    return parser.parse_args()


A = parse()
PREFIX = A.work / "prefix"


def run(*command, env=None):
    print("$", *command, flush=True)
    done = subprocess.run([str(c) for c in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
    print(done.stdout, flush=True)
    return done


def require(condition, what):
    if not condition:
        sys.exit(f"not so: {what}")


def configure(source, build, *options, env=None):
    """Configures from nothing. Says where MPI is, as this build knows, and nothing about libtorch."""
    shutil.rmtree(build, ignore_errors=True)
    command = [A.cmake, "-S", source, "-B", build, "-G", A.generator, f"-DCMAKE_CXX_COMPILER={A.compiler}"]
    if A.launcher:
        command.append(f"-DCMAKE_CXX_COMPILER_LAUNCHER={A.launcher}")
    if A.mpi_compiler:
        command += [f"-DMPI_CXX_COMPILER={A.mpi_compiler}", f"-DMPIEXEC_EXECUTABLE={A.mpiexec}"]
    return run(*command, *options, env=env)


def with_or_without(torch=None):
    torch = A.torch if torch is None else torch
    options = [f"-DBLUEFOG_WITH_MPI={'ON' if A.mpi_compiler else 'OFF'}", f"-DBLUEFOG_WITH_TORCH={'ON' if torch else 'OFF'}",
               f"-DBLUEFOG_WITH_NCCL={'ON' if A.nccl else 'OFF'}"]
    return options + ([f"-DTorch_DIR={torch}"] if torch else [])


def build_and_run(build, torch, nccl=None):
    nccl = bool(A.nccl) if nccl is None else nccl
    require(run(A.cmake, "--build", build).returncode == 0, "it builds")
    app = build / "app"
    commands = [[app]]
    if A.mpiexec:
        commands.append([A.mpiexec, "-n", "2", app])
    for command in commands:
        done = run(*command)
        require(done.returncode == 0 and done.stdout.count("bluefog works") == 1, "it runs, and rank 0 says so")
        require(("with torch" in done.stdout) == torch, "it has what this build has of torch")
        require(("with nccl" in done.stdout) == nccl, "it has what this build has of NCCL")


def install():
    """Installs from a build of its own, which is gone before anybody uses the installation."""
    shutil.rmtree(PREFIX, ignore_errors=True)
    for prefix, torch in ((PREFIX / "whole", A.torch), (PREFIX / "without_torch", "")):
        build = A.work / "deleted"
        done = configure(A.source, build, "-DBLUEFOG_BUILD_TESTS=OFF", "-DBLUEFOG_BUILD_EXAMPLES=OFF",
                         "-DBLUEFOG_BUILD_BENCHMARKS=OFF", *with_or_without(torch))
        require(done.returncode == 0, "it configures")
        require(run(A.cmake, "--install", build, "--prefix", prefix).returncode == 0, "it installs")
        shutil.rmtree(build)
        for path in prefix.rglob("*"):
            if path.is_file():
                text = path.read_text(encoding="utf-8")
                # libtorch may lie in the source tree (.venv); nothing else there may be named.
                text = text.replace(A.torch, "") if A.torch else text
                require(str(A.source) + "/" not in text and str(A.work) not in text, f"{path} names no folder of the build")


def find_package():
    build = A.work / "find_package"
    done = configure(A.source / "tests/package/find_package", build, f"-DCMAKE_PREFIX_PATH={PREFIX / 'whole'}")
    require(done.returncode == 0, "two lines of CMake suffice")
    build_and_run(build, bool(A.torch))
    if A.torch and A.mpiexec:
        done = run(A.mpiexec, "-n", "2", build / "first_program")
        require(done.returncode == 0 and "2 ranks agree on y = 3.00 x + 0.50" in done.stdout,
                "the README's first program trains from the installed package")


def configure_consumer(build, *options):
    return configure(A.source / "tests/package/components", build, f"-DCMAKE_PREFIX_PATH={PREFIX / 'whole'}",
                     f"-DCONSUMER_MPI={'ON' if A.mpi_compiler else 'OFF'}", *options)


def components():
    build = A.work / "components"
    require(configure_consumer(build).returncode == 0, "components are found one by one")
    build_and_run(build, torch=False, nccl=False)
    if A.nccl:
        require(configure_consumer(build, "-DCONSUMER_NCCL=ON").returncode == 0, "so is NCCL")
        build_and_run(build, torch=False)
        find_nccl_by_its_configuration(build)
    if A.torch:
        require(configure_consumer(build, "-DCONSUMER_TORCH=ON").returncode == 0, "so is torch, alone and with MPI")
        build_and_run_tensors(build)


def find_nccl_by_its_configuration(build):
    folder = A.work / "nccl_config"
    folder.mkdir(exist_ok=True)
    (folder / "NCCLConfig.cmake").write_text(f"""
add_library(NCCL::nccl UNKNOWN IMPORTED)
set_target_properties(NCCL::nccl PROPERTIES
  IMPORTED_LOCATION "{A.nccl_library}" INTERFACE_INCLUDE_DIRECTORIES "{A.nccl}" MADE_BY_ITS_CONFIGURATION TRUE)
""")
    (folder / "NCCLConfigVersion.cmake").write_text("set(PACKAGE_VERSION_COMPATIBLE TRUE)\n")
    done = configure_consumer(build, "-DCONSUMER_NCCL=ON", f"-DNCCL_DIR={folder}")
    require(done.returncode == 0, "so is an NCCL with a package configuration")
    require(f"NCCL of its own configuration: {A.nccl_library} with CUDA::cudart CUDA::nvrtc" in said(done.stdout),
            "its target is taken, with what the library needs besides")


def build_and_run_tensors(build):
    require(run(A.cmake, "--build", build).returncode == 0, "it builds")
    done = run(build / "tensors")
    require(done.returncode == 0 and done.stdout == "tensors of 3 ranks averaged\n", "torch alone is enough for tensors")
    needed = run("ldd", build / "tensors").stdout
    require("libtorch_cpu" in needed and "libmpi" not in needed, "it links libtorch, and no MPI")


def inside_another_project(torch):
    build = A.work / A.step
    done = configure(A.source / "tests/package" / A.step, build, f"-DBLUEFOG_SOURCE={A.source}", *with_or_without(torch))
    require(done.returncode == 0, "it configures inside another project")
    build_and_run(build, bool(torch))


def subdirectory():
    inside_another_project(A.torch)


def fetch_content():
    inside_another_project("")  # once fetched it is a subdirectory, which is tried with libtorch


def said(output):
    """The message of a failed configuration, on one line."""
    return " ".join(output.split())


def refused(prefix, *options, python=None):
    build = A.work / "errors"
    env = dict(os.environ)
    if python:
        env["PATH"] = f"{python}{os.pathsep}{env['PATH']}"
    shutil.rmtree(build, ignore_errors=True)
    command = [A.cmake, "-S", A.source / "tests/package/errors", "-B", build, "-G", A.generator,
               f"-DCMAKE_CXX_COMPILER={A.compiler}", f"-DCMAKE_PREFIX_PATH={prefix}", *options]
    if A.mpi_compiler:
        command += [f"-DMPI_CXX_COMPILER={A.mpi_compiler}", f"-DMPIEXEC_EXECUTABLE={A.mpiexec}"]
    done = run(*command, env=env)
    require(done.returncode != 0, "it is refused")
    return said(done.stdout)


def errors():
    whole, without_torch = PREFIX / "whole", PREFIX / "without_torch"

    text = refused(whole, "-DCONSUMER_COMPONENTS=pigeons")
    require("no component 'pigeons'" in text, "an unknown component is named")

    text = refused(without_torch, "-DCONSUMER_COMPONENTS=torch")
    require("without its component 'torch'" in text, "a component that was left out is named")

    if not A.nccl:
        text = refused(whole, "-DCONSUMER_COMPONENTS=nccl")
        require("without its component 'nccl'" in text, "NCCL that was left out is named")

    text = refused(whole, "-DCONSUMER_COMPONENTS=core", "-DCONSUMER_VERSION=0.2")
    require("0.1" in text and "0.2" in text, "another minor version does not fit")

    done = configure(A.source, A.work / "errors", "-DBLUEFOG_WITH_MPI=ON", "-DBLUEFOG_WITH_TORCH=OFF", "-DBLUEFOG_WITH_NCCL=OFF",
                     "-DCMAKE_DISABLE_FIND_PACKAGE_MPI=ON")
    text = said(done.stdout)
    require(done.returncode != 0 and "no MPI found" in text and "`apt-get install libopenmpi-dev openmpi-bin`" in text
            and "-DBLUEFOG_WITH_MPI=OFF" in text, "without MPI it says how to get one, and how to do without")

    if A.nccl:
        old = A.work / "old_nccl"
        (old / "include").mkdir(parents=True, exist_ok=True)
        (old / "include/nccl.h").write_text("#define NCCL_MAJOR 2\n#define NCCL_MINOR 10\n#define NCCL_PATCH 3\n")
        text = refused(whole, "-DCONSUMER_COMPONENTS=nccl", f"-DNCCL_ROOT={old}")
        require(f"NCCL 2.10.3 in {old}/include is older than 2.18" in text, "an NCCL that is too old is named")

        text = refused(whole, "-DCONSUMER_COMPONENTS=nccl", "-DNCCL_LIBRARY=")
        require("libnccl was not found (NCCL_ROOT names the folder" in text, "a missing library is named, with what to do")

    if A.torch:
        text = refused(whole, "-DCONSUMER_COMPONENTS=torch", "-DTorch_DIR=/nonexistent")
        require("Torch_DIR=/nonexistent holds no libtorch" in text and "pip install torch" in text,
                "a wrong Torch_DIR is named, with what to do")

        text = refused(whole, "-DCONSUMER_COMPONENTS=torch", "-DBLUEFOG_TORCH_PYTHON=/bin/false")
        require("/bin/false -m pip install torch" in text, "a Python without torch is named, with what to do")

        # Neither a hint, nor a Python with torch on PATH.
        poor = A.work / "poor"
        poor.mkdir(exist_ok=True)
        (poor / "python3").write_text("#!/bin/sh\nexit 1\n")
        (poor / "python3").chmod(0o755)
        text = refused(whole, "-DCONSUMER_COMPONENTS=torch", "-Dbluefog_torch_HINT=/nonexistent", python=poor)
        require("no libtorch found" in text and "Torch_DIR" in text and "pip install torch" in text,
                "without any libtorch it says how to get and name one")


def fake_libtorch(name, needs):
    """A libtorch folder as the zip files have it, whose libraries need `needs` to load."""
    folder = A.work / name
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "lib").mkdir(parents=True)
    for each in ("include", "share", "lib/libtorch_cpu.so", "lib/libc10.so"):
        (folder / each).symlink_to(pathlib.Path(A.torch) / each)
    (folder / "lib/libtorch_global_deps.so").write_text(needs + "\n")
    return folder


def python_with_torch():
    """A Python environment with a torch in it: the torch's folder, and environment variables where its python3 is first."""
    folder = A.work / "on_path"
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, symlinks=True)
    site = next(folder.glob("lib/python3*/site-packages"))
    torch = fake_libtorch(site.relative_to(A.work) / "torch", "libc.so.6")
    (torch / "__init__.py").write_text("raise SystemExit('torch was imported')\n")
    unwanted = ("Torch_DIR", "CMAKE_PREFIX_PATH", "PYTHONHOME", "PYTHONPATH")
    env = {name: value for name, value in os.environ.items() if name not in unwanted}
    env["PATH"] = f"{folder / 'bin'}{os.pathsep}{env['PATH']}"
    return torch.resolve(), env


def libtorch():
    """Each way to name a libtorch is understood."""
    if not A.torch:
        return
    source = A.source / "tests/package/libtorch"
    cpu = fake_libtorch("libtorch_cpu", "libc.so.6")
    python = A.work / "with_torch" / "python3"
    python.parent.mkdir(exist_ok=True)
    python.write_text(f"#!/bin/sh\nprintf %s '{A.torch}'\n")
    python.chmod(0o755)
    site = A.work / "environment/lib/python3.99/site-packages"
    site.mkdir(parents=True, exist_ok=True)
    if not (site / "torch").exists():
        (site / "torch").symlink_to(A.torch)

    for option, expected in (
        (f"-DTorch_DIR={cpu}/share/cmake/Torch", cpu),
        (f"-DTorch_DIR={cpu}", cpu),
        (f"-DTorch_ROOT={cpu}", cpu),
        (f"-DCMAKE_PREFIX_PATH=/nonexistent;{cpu}", cpu),
        (f"-DCMAKE_PREFIX_PATH={A.work}/environment", A.torch),
        (f"-DBLUEFOG_TORCH_PYTHON={python}", A.torch),
        (f"-Dbluefog_torch_HINT={cpu}", cpu),
    ):
        done = configure(source, A.work / "libtorch", f"-DBLUEFOG_SOURCE={A.source}", option)
        require(done.returncode == 0 and f"links {expected}/lib/libtorch_cpu.so" in done.stdout, f"{option} is understood")

    on_path, env = python_with_torch()
    done = configure(source, A.work / "libtorch", f"-DBLUEFOG_SOURCE={A.source}", env=env)
    require(done.returncode == 0 and f"links {on_path}/lib/libtorch_cpu.so" in done.stdout,
            "without a hint the python3 on PATH is asked, and does not load what it has")

    cuda = fake_libtorch("libtorch_cuda", "libcudart.so.99")
    done = configure(source, A.work / "libtorch", f"-DBLUEFOG_SOURCE={A.source}", f"-DTorch_DIR={cuda}")
    require(done.returncode != 0 and "pip install --no-deps nvidia-cuda-runtime nvidia-cuda-cupti" in said(done.stdout),
            "what a CUDA build lacks is said, with the line that installs it")


globals()[A.step]()
