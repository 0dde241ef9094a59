#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Checks the NCCL backend, and CUDA tensors, on a machine with one NVIDIA GPU, in one go.
#
#   tests/gpu.sh [--dry-run] [--build DIR] [--digits DIR] [--logs DIR] [--limit SECONDS]
#   tests/gpu.sh --pack FILE
#
#   --dry-run     list the checks, and which of them this machine would skip, and why; run nothing
#   --build DIR   where to build (default: a new temporary directory, removed at the end)
#   --digits DIR  where MNIST's files are (default: .data/mnist, where examples/quickstart.sh puts them)
#   --logs DIR    where to leave everything that the compiler and the programs said (default: nowhere)
#   --limit SECONDS  when to end what runs, and to skip the rest (default: 540)
#   --pack FILE   write what such a machine has to be given, this checkout's files and the digits, into a
#                 .tar.gz, and run nothing; gets the digits first, if need be
#
# Needs CUDA's toolkit (12.8 or later) with NVRTC, NCCL (2.18 or later), CMake 3.25 or later, a C++20
# compiler and a GPU; for what concerns tensors a CUDA build of libtorch (Torch_DIR, .venv or
# python3's); neither MPI, Catch2 nor a network. What is lacking is skipped, with the reason.
#
# Digits: git ignores .data, so where the checkout comes from git there are none; --pack brings 5,000 of
# them (4 MB) along.
#
# NCCL is taken from the wheel that libtorch's own wheel brings, if it does, since one process loads
# one NCCL (NCCL_ROOT names another). Two processes share the GPU, which NCCL accepts if each says that
# it is on a host of its own (NCCL_HOSTID): right for correctness, useless for speed, so no
# communication is timed. Prints a table, then the same as JSON, and ends with a verdict; the exit
# status is 0 if nothing failed and a check ran on the GPU and passed.

set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../examples/support/dependencies.sh"  # root, at_least, cmake_version, has_header

dry_run=false
build=""
logs=""
limit=540
digits="$root/.data/mnist"
pack=""
while [ $# -gt 0 ]; do
  case "$1" in
    --dry-run) dry_run=true ;;
    --build) build="${2:?--build needs a directory}" && shift ;;
    --digits) digits="${2:?--digits needs a directory}" && shift ;;
    --logs) logs="${2:?--logs needs a directory}" && shift ;;
    --limit) limit="${2:?--limit needs seconds}" && shift ;;
    --pack) pack="${2:?--pack needs a file}" && shift ;;
    --help | -h)
      sed -n '/^# Checks/,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
      exit 0
      ;;
    *) echo "unknown option $1; see --help" >&2 && exit 2 ;;
  esac
  shift
done

if [ -n "$pack" ]; then
  set -e
  need_digits
  git -C "$root" ls-files -z |
    tar -C "$root" --null --transform 's,^,bluefog/,' -czf "$(realpath "$pack")" .data/mnist -T -
  say "$pack: unpack it there, and run bluefog/tests/gpu.sh"
  exit 0
fi

# has_file NAME PLACE...: whether one of the places has the file.
has_file() {
  local name="$1" place
  shift
  for place in "$@"; do [ ! -e "$place/$name" ] || return 0; done
  return 1
}

gpu="$(timeout 30 nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -1)" || gpu=""
[ -n "$gpu" ] || no_gpu="no NVIDIA GPU (nvidia-smi finds none)"

torch="${Torch_DIR:-}"
torch="${torch%/share/cmake/Torch}"
for each in "$root"/.venv/lib/python3*/site-packages/torch "$(timeout 30 python3 -c 'import importlib.util, os
spec = importlib.util.find_spec("torch")
print(os.path.dirname(spec.origin) if spec and spec.origin else "")' 2>/dev/null)"; do
  [ -n "$torch" ] || [ ! -e "$each/lib/libtorch_cuda.so" ] || torch="$each"
done
[ -e "$torch/lib/libtorch_cuda.so" ] || no_torch="no CUDA build of libtorch (Torch_DIR names its folder)"
nccl="${NCCL_ROOT:-${NCCL_HOME:-}}"
if [ -z "$nccl${no_torch:-}" ] && [ -e "$torch/../nvidia/nccl/include/nccl.h" ]; then
  nccl="$(cd "$torch/../nvidia/nccl" && pwd -P)"
fi
[ -e "$digits/train-images-idx3-ubyte" ] ||
  no_digits="no digits in $digits (--digits names their folder; --help says how to get them and take them along)"

# Where headers of the toolkit may be: of the one that CMake would take, and libtorch's wheels.
nvcc="$(readlink -f "$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)")"
toolkits=()
for each in "${CUDAToolkit_ROOT:-}" "${CUDA_PATH:-}" "${nvcc%/bin/nvcc}" /usr/local/cuda; do
  [ ! -d "$each" ] || toolkits+=("$each/include" "$each"/targets/*/include)
done
lacking=""
if ! command -v cmake >/dev/null; then
  lacking="no cmake"
elif cmake="$(cmake_version)" && ! at_least 3.25 "$cmake"; then
  lacking="CMake $cmake, needs 3.25 or later"
elif ! command -v "${CXX:-c++}" >/dev/null && ! command -v g++ >/dev/null; then
  lacking="no C++ compiler"
elif [ ! -x "$nvcc" ] && ! has_file cuda_runtime_api.h "${toolkits[@]}" /usr/include; then
  lacking="no CUDA toolkit (neither nvcc nor cuda_runtime_api.h; CUDAToolkit_ROOT names its folder)"
elif ! has_file nvrtc.h "${toolkits[@]}" /usr/include "$torch"/../nvidia/{cuda_nvrtc,cu1[3-9]}/include; then
  lacking="no NVRTC (nvrtc.h) in the CUDA toolkit"
elif ! has_file nccl.h "$nccl" "$nccl/include" "${toolkits[@]}" && ! has_header nccl.h; then
  lacking="no NCCL (nccl.h; NCCL_ROOT names its folder)"
fi
with_tensors="${lacking:-${no_torch:-}}"

# NAME | what makes this machine skip it | what it does
checks=(
  "build|$lacking|the program of the first checks compiles and links, without MPI and libtorch"
  "build_tensors|$with_tensors|the program of the checks with tensors compiles and links"
  "kernels|${lacking:-${no_gpu:-}}|the averaging kernel on 25, 100 and 400 M float32 reaches 0.9 of a copy's speed"
  "unscale|${with_tensors:-${no_gpu:-}}|gradients are unscaled and checked on the GPU"
  "average|${with_tensors:-${no_gpu:-}}|the averaging kernel gives what libtorch's mul_ and add_ give, and is 1.5 times as fast with one more array, 1.8 times with three"
  "schedule|${with_tensors:-${no_gpu:-}}|how much of the communication is hidden behind compute, where it can be, with copies within the GPU instead of NCCL, is 90 % or more"
  "operations|${lacking:-${no_gpu:-}}|every operation with 2 processes on the one GPU, on device and on staged host memory, is bit-equal to the thread backend"
  "tensors|${with_tensors:-${no_gpu:-}}|every operation on CUDA tensors with 2 processes, of every arrangement, from other streams, and by way of the host, is bit-equal to the thread backend"
  "optimizers|${with_tensors:-${no_gpu:-}}|a few steps of every optimizer with 2 processes and CUDA parameters are those on the CPU"
  "digits|${with_tensors:-${no_gpu:-${no_digits:-}}}|2 processes, each of which sees half of the ten digits, learn all of them with mixed precision"
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
[ -n "$logs" ] || logs="$work/logs"
mkdir -p "$logs" || exit 2
log="$work/lines"
: >"$log"

# The same for all processes: no device but the GPU, no network but the host itself.
export BLUEFOG_ALLOW_SHARED_DEVICE=1 BLUEFOG_TIMEOUT="${BLUEFOG_TIMEOUT:-30}" BLUEFOG_TEST_PROGRESS=1
export NCCL_SOCKET_IFNAME=lo NCCL_NET=Socket NCCL_IB_DISABLE=1 NCCL_MAX_CTAS=2 NCCL_PROTO=Simple
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}" OMP_NUM_THREADS=2
unset LOCAL_RANK CUDA_LAUNCH_BLOCKING

left() { echo $((limit > SECONDS ? limit - SECONDS : 1)); }
# within SECONDS COMMAND...: no longer than that, nor than there is time left.
within() {
  local most="$1" rest
  shift
  rest="$(left)"
  timeout -k 10 "$((most < rest ? most : rest))" "$@"
}
out_of_time() { [ "$1" -eq 124 ] || [ "$1" -eq 137 ]; }
# ended NAME STATUS SECONDS: the line for a check whose program said nothing of why it ended so.
ended() {
  if ! out_of_time "$2"; then
    echo "fail $1: ended with status $2"
  elif [ "$(left)" -le 1 ]; then
    echo "skip $1: cut by the limit of $limit s"
  else
    echo "fail $1: did not end in $3 s, or was killed"
  fi
}

# explain NAME STATUS SECONDS FILE...: what is left to say of a check whose program ended so, and said what
# is in the files.
explain() {
  [ "$2" -ne 0 ] || return 0
  if out_of_time "$2" || ! grep -q '^fail ' "${@:4}"; then ended "$1" "$2" "$3" >>"$log"; fi
  tail -n 15 "${@:4}" >&2
}

describe_machine() {
  uname -srm
  nvidia-smi --query-gpu=name,driver_version,memory.total,compute_mode --format=csv,noheader
  cmake --version | head -1
  c++ --version | head -1
  nvcc --version | tail -2
  ip -br address
  df -h /dev/shm
  free -g
  echo "locked memory: $(ulimit -l)"
  echo "libtorch: ${torch:-none}; NCCL: ${nccl:-CMake looks}; LD_LIBRARY_PATH: ${LD_LIBRARY_PATH:-}"
}
within 60 bash -c "$(declare -f describe_machine); torch='$torch' nccl='$nccl' describe_machine" >"$logs/machine" 2>&1
cat "$logs/machine" >&2

build_limit=240
build_begin=0
build_left() { echo $((build_begin + build_limit > SECONDS ? build_begin + build_limit - SECONDS : 1)); }
configure() {
  local generator=() toolkit=() each
  # What a toolkit without NVRTC lacks is among libtorch's wheels.
  for each in "$torch"/../nvidia/cu1[3-9]; do
    [ ! -e "${nvcc%/bin/nvcc}/include/nvrtc.h" ] && [ -e "$each/include/nvrtc.h" ] &&
      toolkit=("-DCUDA_nvrtc_LIBRARY=$(compgen -G "$each/lib/libnvrtc.so.*" | head -1)"
        "-DCMAKE_CXX_FLAGS=-idirafter $each/include")
  done
  if command -v ninja >/dev/null; then generator=(-G Ninja); fi
  within "$(build_left)" cmake -S "$root/tests/gpu/program" -B "$build" "${generator[@]}" -DCMAKE_BUILD_TYPE=Release \
    -DBLUEFOG_GPU_TENSORS="$1" -DTorch_DIR="$torch" "${toolkit[@]}" ${nccl:+"-DNCCL_ROOT=$nccl"} >>"$logs/build" 2>&1
}

# Both programs at once: the machine may have cores for both.
compiled=false
build_status=0
compile() {
  if $compiled; then return; fi
  compiled=true
  local keep_going=(-k) tensors=OFF
  if command -v ninja >/dev/null; then keep_going=(-k 0); fi
  [ -n "$with_tensors" ] || tensors=ON
  : >"$logs/build"
  build_begin=$SECONDS
  rm -f "$build/bluefog_gpu" "$build/bluefog_gpu_tensors"  # what an earlier build made proves nothing
  if configure "$tensors" || { [ "$tensors" = ON ] && rm -rf "$build/CMakeCache.txt" && configure OFF; }; then
    within "$(build_left)" cmake --build "$build" --parallel 2 -- "${keep_going[@]}" >>"$logs/build" 2>&1 ||
      build_status=$?
  else
    build_status=$?
  fi
  [ "$build_status" -eq 0 ] || echo "Error: the build ended with status $build_status" >>"$logs/build"
  echo "figure build: $((SECONDS - build_begin)) s" >>"$log"
}

check_program() {
  compile
  if [ -x "$build/$2" ]; then
    echo "pass $1" >>"$log"
    within 60 ldd "$build/$2" >"$logs/$2-libraries" 2>&1
    grep 'not found' "$logs/$2-libraries" >&2
  elif out_of_time "$build_status"; then
    ended "$1" "$build_status" "$build_limit" >>"$log"
  else
    grep -E -A3 'error|Error|undefined reference|cannot find' "$logs/build" | head -40 >&2
    echo "fail $1: see above" >>"$log"
  fi
}
check_build() { check_program build bluefog_gpu; }
check_build_tensors() { check_program build_tensors bluefog_gpu_tensors; }

# merged ENDED_WELL FILE...: what two ranks said as one: what both passed, and once what either failed, with
# what each says. What one rank alone has passed is no result, and wrong if both ended well.
merged() {
  awk -v ended_well="$1" '
    /^figure / { print }
    /^pass / && !said[FILENAME, $0]++ { if (!passes[$0]++) order[++count] = $0 }
    /^fail / {
      name = $0
      sub(/: rank [0-9]+: .*/, "", name)
      if (!failures[name]) order[++count] = name
      failures[name] = failures[name] (failures[name] ? "; " : "") substr($0, length(name) + 3)
    }
    END {
      for (i = 1; i <= count; ++i) {
        each = order[i]
        name = each
        sub(/^pass/, "fail", name)
        if (each in failures) print each ": " failures[each]
        else if (passes[each] == 2) { if (!(name in failures)) print each }
        else if (ended_well && !(name in failures)) print name ": one rank alone has come to it"
      }
    }' "${@:2}"
}

# in_pair NAME PROGRAM CHECK [ARGUMENT...]: two processes on the one GPU, and one group of processes: what
# ends one for lack of time ends both at once.
in_pair() {
  local failed=0 name="$1" program="$2" check="$3" said="$logs/$1" most=200
  shift 3
  within "$most" bash -c 'processes=() status=0
    for rank in 0 1; do
      NCCL_HOSTID="h$rank" "$1" "$2" "$3" "$rank" 2 "${@:5}" >"$4-$rank" 2>&1 &
      processes+=($!)
    done
    for each in "${processes[@]}"; do wait "$each" || status=$?; done
    exit "$status"' in_pair "$build/$program" "$check" "$work/meeting_$name" "$said" "$@" || failed=$?
  merged "$((failed == 0))" "$said-0" "$said-1" | sed "s/^fail $check: rank /fail $name: rank /" >>"$log"
  explain "$name" "$failed" "$most" "$said-0" "$said-1"
}
check_operations() { in_pair operations bluefog_gpu operations; }
check_tensors() { in_pair tensors bluefog_gpu_tensors operations; }
check_optimizers() { in_pair optimizers bluefog_gpu_tensors optimizers; }
check_digits() { in_pair digits bluefog_gpu_tensors digits "$digits"; }

# alone PROGRAM CHECK: one process.
alone() {
  local status=0 said="$logs/$1-$2" most=120
  within "$most" "$build/$1" "$2" >"$said" 2>&1 || status=$?
  grep -E '^(pass|fail|figure) ' "$said" >>"$log"
  explain "$2" "$status" "$most" "$said"
}
check_kernels() { alone bluefog_gpu kernels; }
check_unscale() { alone bluefog_gpu_tensors unscale; }
check_average() { alone bluefog_gpu_tensors average; }
check_schedule() { alone bluefog_gpu_tensors schedule; }

count() { grep -c "^$1 " "$log"; }
for each in "${checks[@]}"; do
  IFS='|' read -r name skip _ <<<"$each"
  case "$name" in
    build | build_tensors) needs="" ;;
    operations | kernels) needs=build ;;
    *) needs=build_tensors ;;
  esac
  if [ -n "$skip" ]; then
    echo "skip $name: $skip" >>"$log"
  elif [ -n "$needs" ] && ! grep -qx "pass $needs" "$log"; then
    echo "skip $name: the program was not built" >>"$log"
  elif [ "$(left)" -lt 15 ]; then
    echo "skip $name: no time is left of $limit s" >>"$log"
  else
    echo "-- $name, after $SECONDS s" >&2
    "check_$name"
    echo "   so far: $(count pass) passed, $(count fail) failed" >&2
  fi
done

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
elif ! grep '^pass ' "$log" | grep -qvxE 'pass build(_tensors)?'; then
  echo "NOTHING CHECKED: no check has passed on the GPU, $(count skip) skipped"
  exit 1
fi
echo "PASSED: $(count pass) checks, $(count skip) skipped"
