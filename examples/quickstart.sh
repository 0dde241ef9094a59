#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# From a bare Debian machine to four ranks that train a network on handwritten digits, by averaging
# with one neighbour per step.
#
#   examples/quickstart.sh [--threads] [--ranks N] [--mnist DIR] [options of 040_train_mnist...]
#
#   --threads    the ranks are threads of one process, without mpirun
#   --ranks N    how many there are, 4 by default
#   --mnist DIR  a folder with MNIST's files (unpacked), instead of the 5,000 digits it fetches
#
# Installs what is missing (apt-get as root or with sudo; PyPI into .venv), builds, runs. The second
# run finds everything there.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/support/dependencies.sh"

threads=no
ranks=4
mnist=""
options=()
while [ $# -gt 0 ]; do
  case "$1" in
    --threads) threads=yes ;;
    --ranks)
      [ $# -ge 2 ] || fail "--ranks needs a number"
      ranks="$2"
      shift
      ;;
    --ranks=*) ranks="${1#--ranks=}" ;;
    --backend | --backend=*) fail "$1: with --threads ranks are threads, else mpirun starts them" ;;
    --data | --data=*) fail "$1: name the folder by --mnist" ;;
    --mnist)
      [ $# -ge 2 ] || fail "--mnist needs a folder"
      mnist="$2"
      shift
      ;;
    --mnist=*) mnist="${1#--mnist=}" ;;
    --help | -h)
      sed -n '/^# From/,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
      exit 0
      ;;
    *) options+=("$1") ;;
  esac
  shift
done
[[ "$ranks" =~ ^[1-9][0-9]*$ ]] || fail "--ranks needs a number, got $ranks"

need_commands
need_headers
need_mpi default
need_torch "$torch_version"
if [ -z "$mnist" ]; then
  need_digits
  mnist="$root/.data/mnist"
fi
[ -e "$mnist/train-images-idx3-ubyte" ] || fail "$mnist has no file train-images-idx3-ubyte; unpack MNIST there"

mkdir -p "$root/build"
build="$root/build/quickstart"
if [ ! -e "$build/build.ninja" ]; then
  say "Configuring in $build"
  cmake -S "$root" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DBLUEFOG_BUILD_TESTS=OFF \
    -DBLUEFOG_BUILD_BENCHMARKS=OFF -DBLUEFOG_TORCH_PYTHON="$torch_python" >"$root/build/quickstart.log" 2>&1 ||
    { cat "$root/build/quickstart.log" >&2; fail "cannot configure"; }
fi
say "Building examples/040_train_mnist.cpp"
cmake --build "$build" --target 040_train_mnist >&2 || fail "cannot build"

trainer="$build/examples/040_train_mnist"
if [ "$threads" = yes ]; then
  say "Training with $ranks ranks, threads of one process"
  exec "$trainer" --backend threads --ranks "$ranks" --data "$mnist" "${options[@]}"
fi

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# More ranks than cores, also as root; Open MPI 4, Open MPI 5 and MPICH each take what they know.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_hwloc_base_binding_policy=none OMPI_MCA_mpi_yield_when_idle=1
export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe PRTE_MCA_hwloc_default_binding_policy=none
say "Training with $ranks ranks under mpirun"
exec mpirun -np "$ranks" "$trainer" --data "$mnist" "${options[@]}"
