#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Checks the NCCL backend, and CUDA tensors, on a machine with one NVIDIA GPU, in one go.
#
#   tests/gpu.sh [--dry-run] [--build DIR] [--digits DIR]
#
#   --dry-run     list the checks, and which of them this machine would skip, and why; run nothing
#   --build DIR   where to build (default: a new temporary directory, removed at the end)
#   --digits DIR  where MNIST's files are (default: .data/mnist, where examples/quickstart.sh puts them)
#
# Needs CUDA's toolkit (12.8 or later), NCCL (2.18 or later), CMake, a C++20 compiler and a GPU; for what
# concerns tensors a CUDA build of libtorch (Torch_DIR, .venv or python3's); neither MPI, Catch2 nor a
# network. Two processes share the GPU, which NCCL accepts if each says
# that it is on a host of its own (NCCL_HOSTID): right for correctness, useless for speed, so no
# communication is timed. Prints a table, then the same as JSON, and ends with a verdict; the exit
# status is 0 if nothing failed and something ran.

set -uo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

dry_run=false
build=""
digits="$root/.data/mnist"
while [ $# -gt 0 ]; do
  case "$1" in
    --dry-run) dry_run=true ;;
    --build) build="${2:?--build needs a directory}" && shift ;;
    --digits) digits="${2:?--digits needs a directory}" && shift ;;
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

torch="${Torch_DIR:-}"
for each in "$root"/.venv/lib/python3*/site-packages/torch "$(python3 -c 'import importlib.util, os
spec = importlib.util.find_spec("torch")
print(os.path.dirname(spec.origin) if spec and spec.origin else "")' 2>/dev/null)"; do
  [ -n "$torch" ] || [ ! -e "$each/lib/libtorch_cuda.so" ] || torch="$each"
done
[ -e "$torch/lib/libtorch_cuda.so" ] || no_torch="no CUDA build of libtorch (Torch_DIR names its folder)"
[ -e "$digits/train-images-idx3-ubyte" ] || no_digits="no digits in $digits (--digits names their folder)"
with_tensors="${lacking:-${no_torch:-}}"

# NAME | what makes this machine skip it | what it does
checks=(
  "build|$lacking|the program of the first checks compiles and links, without MPI and libtorch"
  "build_tensors|$with_tensors|the program of the checks with tensors compiles and links"
  "operations|${lacking:-${no_gpu:-}}|every operation with 2 processes on the one GPU, on device and on staged host memory, is bit-equal to the thread backend"
  "kernels|${lacking:-${no_gpu:-}}|the averaging kernel on 25, 100 and 400 M float32 reaches 0.9 of a copy's speed"
  "unscale|${with_tensors:-${no_gpu:-}}|gradients are unscaled and checked on the GPU"
  "tensors|${with_tensors:-${no_gpu:-}}|every operation on CUDA tensors with 2 processes, of every arrangement, from other streams, and by way of the host, is bit-equal to the thread backend"
  "optimizers|${with_tensors:-${no_gpu:-}}|a few steps of every optimizer with 2 processes and CUDA parameters are those on the CPU"
  "digits|${with_tensors:-${no_gpu:-${no_digits:-}}}|2 processes, each of which sees half of the ten digits, learn all of them with mixed precision"
  "schedule|${with_tensors:-${no_gpu:-}}|how much of the communication is hidden behind compute, with copies within the GPU instead of NCCL (figures, no verdict)"
)

if $dry_run; then
  for each in "${checks[@]}"; do
    IFS='|' read -r name skip what <<<"$each"
    printf '%-13s %s%s\n' "$name" "$what" "${skip:+ [skipped here: $skip]}"
  done
  exit 0
fi

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
[ -n "$build" ] || build="$work/build"
log="$work/lines"
: >"$log"

# Both programs at once: the machine may have cores for both.
compile() {
  [ ! -e "$work/out" ] || return 0
  local generator=() keep_going=(-k) tensors=OFF
  if command -v ninja >/dev/null; then
    generator=(-G Ninja)
    keep_going=(-k 0)
  fi
  [ -n "$with_tensors" ] || tensors=ON
  timeout 100 cmake -S "$root/tests/gpu/program" -B "$build" "${generator[@]}" -DCMAKE_BUILD_TYPE=Release \
    -DBLUEFOG_GPU_TENSORS="$tensors" -DTorch_DIR="$torch" >"$work/out" 2>&1 &&
    timeout 300 cmake --build "$build" --parallel 2 -- "${keep_going[@]}" >>"$work/out" 2>&1
}

check_program() {
  compile
  if [ -x "$build/$2" ]; then
    echo "pass $1" >>"$log"
  else
    grep -E -A3 'error|Error' "$work/out" | head -40 >&2
    echo "fail $1: see above" >>"$log"
  fi
}
check_build() { check_program build bluefog_gpu; }
check_build_tensors() { check_program build_tensors bluefog_gpu_tensors; }

# in_pair PROGRAM CHECK [ARGUMENT...]: two processes on the one GPU.
in_pair() {
  local rank pids=() failed=0 program="$1" name="$2"
  shift 2
  for rank in 0 1; do
    BLUEFOG_ALLOW_SHARED_DEVICE=1 BLUEFOG_TIMEOUT=60 NCCL_HOSTID="h$rank" NCCL_SOCKET_IFNAME=lo NCCL_NET=Socket \
      NCCL_IB_DISABLE=1 NCCL_MAX_CTAS=2 NCCL_PROTO=Simple OMP_NUM_THREADS=2 \
      timeout 240 "$build/$program" "$name" "$work/meeting_$program$name" "$rank" 2 "$@" >"$work/rank$rank" 2>&1 &
    pids+=($!)
  done
  for rank in 0 1; do wait "${pids[$rank]}" || failed=$?; done
  grep -E '^(pass|fail|figure) ' "$work/rank0" >>"$log"
  grep -E '^fail ' "$work/rank1" >>"$log"
  if [ "$failed" -ne 0 ] && ! grep -q '^fail ' "$work/rank0" "$work/rank1"; then
    tail -20 "$work/rank0" "$work/rank1" >&2
    echo "fail $name: a process ended with status $failed" >>"$log"
  fi
}
check_operations() { in_pair bluefog_gpu operations; }
check_tensors() { in_pair bluefog_gpu_tensors operations; }
check_optimizers() { in_pair bluefog_gpu_tensors optimizers; }
check_digits() { in_pair bluefog_gpu_tensors digits "$digits"; }

# alone PROGRAM CHECK: one process.
alone() {
  local status=0
  timeout 120 "$build/$1" "$2" >"$work/said" 2>&1 || status=$?
  grep -E '^(pass|fail|figure) ' "$work/said" >>"$log"
  if [ "$status" -ne 0 ] && ! grep -q '^fail ' "$work/said"; then
    tail -20 "$work/said" >&2
    echo "fail $2: the program ended with status $status" >>"$log"
  fi
}
check_kernels() { alone bluefog_gpu kernels; }
check_unscale() { alone bluefog_gpu_tensors unscale; }
check_schedule() { alone bluefog_gpu_tensors schedule; }

for each in "${checks[@]}"; do
  IFS='|' read -r name skip _ <<<"$each"
  if [ -n "$skip" ]; then
    echo "skip $name: $skip" >>"$log"
  elif [[ "$name" =~ ^(operations|kernels)$ ]] && ! grep -qx 'pass build' "$log"; then
    echo "skip $name: the program was not built" >>"$log"
  elif [[ "$name" =~ ^(unscale|tensors|optimizers|digits|schedule)$ ]] && ! grep -qx 'pass build_tensors' "$log"; then
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
