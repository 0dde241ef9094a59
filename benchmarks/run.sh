#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds the benchmarks and runs them one after the other. Each prints a table and, for scripts, one
# line of JSON per row.
#
#   benchmarks/run.sh [NAME...]
#
#   NAME  e.g. averaging_kernels; without one, all of them. training_step also runs ddp_step.py
#
# Run it on a machine that does nothing else; what was disturbed says so (`"valid": false`).

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../examples/support/dependencies.sh"

known=(averaging_kernels topology_cost engine_dispatch neighbor_allreduce allreduce_vs_averaging
  gradient_bucket_allreduce optimizer_cost training_step compile_cost)
chosen=("$@")
for name in "${chosen[@]}"; do
  case "$name" in
    --help | -h)
      sed -n '/^# Builds/,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
      echo "NAME is one of ${known[*]}"
      exit 0
      ;;
  esac
  [[ " ${known[*]} " == *" $name "* ]] || fail "no benchmark is called $name, only ${known[*]}"
done

need_commands
need_headers
need_mpi default
need_torch "$torch_version"

build="$root/build/benchmarks"
cd "$root"
say "Building the benchmarks in $build"
cmake -S "$root" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DBLUEFOG_BUILD_TESTS=OFF \
  -DBLUEFOG_BUILD_EXAMPLES=OFF -DBLUEFOG_BUILD_BENCHMARKS=ON -DCMAKE_EXPORT_COMPILE_COMMANDS=ON \
  -DBLUEFOG_TORCH_PYTHON="$torch_python" >&2
cmake --build "$build" >&2

export OMP_NUM_THREADS=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
oversubscribe=()
if mpirun --version 2>/dev/null | grep -q "Open MPI"; then
  oversubscribe=(--oversubscribe --bind-to none)
fi

# run NAME [RANKS...]: alone, or under mpirun with each number of ranks.
run() {
  local name="$1" program="$build/benchmarks/benchmark_$1" ranks
  shift
  [ ${#chosen[@]} -eq 0 ] || [[ " ${chosen[*]} " == *" $name "* ]] || return 0
  if [ $# -eq 0 ]; then
    say "$name"
    "$program"
  fi
  for ranks in "$@"; do
    say "$name, $ranks ranks"
    mpirun "${oversubscribe[@]}" -np "$ranks" "$program" | tee "$build/$name.$ranks"
  done
}

rm -f "$build"/training_step.[24]
run averaging_kernels
run topology_cost
run engine_dispatch
run neighbor_allreduce 2
run allreduce_vs_averaging 2 4 8
run gradient_bucket_allreduce 2 4
run optimizer_cost 2 4 8
run training_step 2 4
for ranks in 2 4; do
  [ -f "$build/training_step.$ranks" ] || continue
  if ! "$torch_python" -c 'import torch' 2>/dev/null; then
    say "DistributedDataParallel: left out, $torch_python cannot import torch"
    break
  fi
  say "DistributedDataParallel, $ranks ranks"
  "$torch_python" "$root/benchmarks/ddp_step.py" --ranks "$ranks" --ours "$build/training_step.$ranks"
done
if [ ${#chosen[@]} -eq 0 ] || [[ " ${chosen[*]} " == *" compile_cost "* ]]; then
  say "compile_cost"
  python3 "$root/benchmarks/compile_cost.py" --build "$build"
fi
