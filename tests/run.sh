#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds and runs the whole test suite, after installing what is missing.
#
#   tests/run.sh [--preset NAME] [--mpi NAME] [--torch VERSION] [--define NAME=VALUE]... [-- options of ctest...]
#
#   --preset NAME    release (default), debug, clang, asan or tsan
#   --mpi NAME       default (the mpicxx on PATH), openmpi4 or mpich (Debian's), openmpi5 (PyPI's 5.0.11)
#   --torch VERSION  2.11.0 (default), another one that PyPI has, newest, or off
#   --define N=V     a further CMake variable
#
# Ends with CTest's summary; the exit status is non-zero if anything failed.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../examples/support/dependencies.sh"

preset=release
mpi=default
torch="$torch_version"
defines=()
while [ $# -gt 0 ]; do
  case "$1" in
    --preset | --mpi | --torch | --define) [ $# -ge 2 ] || fail "$1 needs a value" ;;&
    --preset) preset="$2" && shift ;;
    --mpi) mpi="$2" && shift ;;
    --torch) torch="$2" && shift ;;
    --define) defines+=("-D$2") && shift ;;
    --)
      shift
      break
      ;;
    --help | -h)
      sed -n '/^# Builds/,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
      exit 0
      ;;
    *) fail "unknown option $1; see --help" ;;
  esac
  shift
done

need_commands
need_headers tests
case "$preset" in
  clang | asan | tsan) need_clang ;;
esac
if [ "$preset" = tsan ]; then
  torch=off
else
  need_mpi "$mpi"
  defines+=("${mpi_options[@]}")
fi
if [ "$torch" = off ]; then
  defines+=(-DBLUEFOG_WITH_TORCH=OFF)
else
  need_torch "$torch"
  defines+=("-DBLUEFOG_TORCH_PYTHON=$torch_python")
  need_digits
fi

build="$root/build/$preset"
[ "$mpi" = default ] || build+="-$mpi"
[ "$torch" = "$torch_version" ] || build+="-torch-$torch"

cd "$root"
say "Configuring in $build"
cmake --preset "$preset" -B "$build" "${defines[@]}" >&2
say "Building"
cmake --build "$build" >&2
say "Testing"
exec ctest --test-dir "$build" --output-on-failure --no-tests=error -j "$(nproc)" "$@"
