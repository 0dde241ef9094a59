#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Checks the NCCL backend on a machine with one NVIDIA GPU, in one go.
#
#   tests/gpu.sh [--dry-run] [--build DIR]
#
#   --dry-run    list the checks, and which of them this machine would skip, and why; run nothing
#   --build DIR  where to build (default: a new temporary directory, removed at the end)
#
# Needs CUDA's toolkit (12.8 or later), NCCL (2.18 or later), CMake, a C++20 compiler and a GPU; neither
# MPI, libtorch, Catch2 nor a network. Two processes share the GPU, which NCCL accepts if each says
# that it is on a host of its own (NCCL_HOSTID): right for correctness, useless for speed, so no
# communication is timed. Prints a table, then the same as JSON, and ends with a verdict; the exit
# status is 0 if nothing failed and something ran.

set -uo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

dry_run=false
build=""
while [ $# -gt 0 ]; do
  case "$1" in
    --dry-run) dry_run=true ;;
    --build) build="${2:?--build needs a directory}" && shift ;;
    --help | -h)
      sed -n '/^# Checks/,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
      exit 0
      ;;
    *) echo "unknown option $1; see --help" >&2 && exit 2 ;;
  esac
  shift
done

lacking=""
command -v cmake >/dev/null || lacking="no cmake"
{ command -v c++ || command -v g++; } >/dev/null || lacking="no C++ compiler"
gpu="$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -1)" || gpu=""
[ -n "$gpu" ] || no_gpu="no NVIDIA GPU (nvidia-smi finds none)"

# NAME | what makes this machine skip it | what it does
checks=(
  "build|$lacking|the program of these checks compiles and links, without MPI and libtorch"
  "operations|${lacking:-${no_gpu:-}}|every operation with 2 processes on the one GPU, on device and on staged host memory, is bit-equal to the thread backend"
  "kernels|${lacking:-${no_gpu:-}}|the averaging kernel on 25, 100 and 400 M float32 reaches 0.9 of a copy's speed"
  "schedule|the optimizers do not run on CUDA tensors yet|communication on its own stream is hidden behind compute"
  "training|the optimizers do not run on CUDA tensors yet|digits with mixed precision on the GPU"
)

if $dry_run; then
  for each in "${checks[@]}"; do
    IFS='|' read -r name skip what <<<"$each"
    printf '%-11s %s%s\n' "$name" "$what" "${skip:+ [skipped here: $skip]}"
  done
  exit 0
fi

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
[ -n "$build" ] || build="$work/build"
log="$work/lines"
: >"$log"

check_build() {
  local generator=()
  command -v ninja >/dev/null && generator=(-G Ninja)
  if timeout 200 cmake -S "$root/tests/gpu/program" -B "$build" "${generator[@]}" -DCMAKE_BUILD_TYPE=Release >"$work/out" 2>&1 &&
    timeout 240 cmake --build "$build" >>"$work/out" 2>&1; then
    echo "pass build" >>"$log"
  else
    tail -40 "$work/out" >&2
    echo "fail build: see above" >>"$log"
  fi
}

check_operations() {
  local rank pids=() failed=0
  for rank in 0 1; do
    BLUEFOG_ALLOW_SHARED_DEVICE=1 BLUEFOG_TIMEOUT=60 NCCL_HOSTID="h$rank" NCCL_SOCKET_IFNAME=lo NCCL_NET=Socket \
      NCCL_IB_DISABLE=1 NCCL_MAX_CTAS=2 NCCL_PROTO=Simple \
      timeout 240 "$build/bluefog_gpu" operations "$work/meeting" "$rank" 2 >"$work/rank$rank" 2>&1 &
    pids+=($!)
  done
  for rank in 0 1; do wait "${pids[$rank]}" || failed=$?; done
  grep -E '^(pass|fail) ' "$work/rank0" >>"$log"
  grep -E '^fail ' "$work/rank1" >>"$log"
  if [ "$failed" -ne 0 ] && ! grep -q '^fail ' "$work/rank0" "$work/rank1"; then
    tail -20 "$work/rank0" "$work/rank1" >&2
    echo "fail operations: a process ended with status $failed" >>"$log"
  fi
}

check_kernels() {
  timeout 120 "$build/bluefog_gpu" kernels >"$work/out" 2>&1 || local status=$?
  grep -E '^(pass|fail|figure) ' "$work/out" >>"$log"
  if [ "${status:-0}" -ne 0 ] && ! grep -q '^fail ' "$work/out"; then
    tail -20 "$work/out" >&2
    echo "fail kernels: the program ended with status $status" >>"$log"
  fi
}

for each in "${checks[@]}"; do
  IFS='|' read -r name skip _ <<<"$each"
  if [ -n "$skip" ]; then
    echo "skip $name: $skip" >>"$log"
  elif [ "$name" != build ] && ! grep -qx 'pass build' "$log"; then
    echo "skip $name: the program was not built" >>"$log"
  else
    echo "-- $name" >&2
    "check_$name"
  fi
done

count() { grep -c "^$1 " "$log"; }
echo "On ${gpu:-no GPU}, $(date -u +%F):"
sed -E 's/^(pass|fail|skip|figure) /\1\t/' "$log"
echo
awk -v gpu="$gpu" 'BEGIN { printf "{\"gpu\": \"%s\", \"checks\": [", gpu }
  { kind = $1; sub(/^[a-z]+ /, ""); gsub(/\\/, "\\\\"); gsub(/"/, "\\\""); gsub(/\t/, " ")
    printf "%s{\"result\": \"%s\", \"text\": \"%s\"}", (NR > 1 ? ", " : ""), kind, $0 }
  END { print "]}" }' "$log"
echo
if [ "$(count fail)" -gt 0 ]; then
  echo "FAILED: $(count fail) of $(($(count fail) + $(count pass))) checks, $(count skip) skipped"
  exit 1
elif [ -z "$gpu" ]; then
  echo "NOTHING CHECKED ON A GPU: $(count pass) passed, $(count skip) skipped"
  exit 1
fi
echo "PASSED: $(count pass) checks, $(count skip) skipped"
