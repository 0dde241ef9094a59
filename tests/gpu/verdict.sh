#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The verdict of tests/gpu.sh, where neither GPU nor build is real: in the place of nvidia-smi, of CMake, and
# of what CMake builds are scripts that say what each case needs.

set -uo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/bin" "$work/build" "$work/nccl/include"
touch "$work/nccl/include/"{nccl.h,nvrtc.h,cuda_runtime_api.h}
export PATH="$work/bin:$PATH" NCCL_ROOT="$work/nccl" CUDAToolkit_ROOT="$work/nccl" Torch_DIR="$work/none"

script() { printf '#!/bin/sh\n%s\n' "$2" >"$work/bin/$1" && chmod +x "$work/bin/$1"; }
# cmake VERSION OPERATIONS: what says that it is that version, and builds a program whose operations are those.
cmake() {
  script program "[ \$1 = operations ] || exit 0
$2"
  script cmake "case \$1 in --version) echo cmake version $1 ;; --build) cp $work/bin/program \$2/bluefog_gpu ;; esac"
}

failures=0
# expect CASE STATUS LINE...: that the script ends so and says these lines, each once, and nothing like another
# verdict; the last one is the verdict.
expect() {
  local name="$1" wanted="$2" status=0 line
  shift 2
  "$here/../gpu.sh" --build "$work/build" --digits "$work/none" >"$work/said" 2>"$work/errors" || status=$?
  for line in "$@"; do
    [ "$(tr '\t' ' ' <"$work/said" | grep -cxE "$line")" -eq 1 ] || { echo "$name: not once: $line" && status=-1; }
  done
  [ "$(tail -n 1 "$work/said" | grep -cxE "${!#}")" -eq 1 ] || { echo "$name: the end is not: ${!#}" && status=-1; }
  [ "$status" -eq "$wanted" ] && return
  echo "$name: exit status $status, not $wanted" && cat "$work/said" "$work/errors"
  failures=$((failures + 1))
}

script nvidia-smi 'echo A GPU'
cmake 3.25.1 'echo "pass a $1"; echo "pass b $1"'
expect "all is well" 0 "pass build" "figure build: [0-9] s" "pass a operations" "pass b operations" \
  "skip tensors: no CUDA build.*" "PASSED: 3 checks, 7 skipped"
cmake 3.25.1 'echo "pass a"; echo "fail b, c: rank $3: it: is $3"; echo "fail d: rank $3: no"; exit $3'
expect "both ranks fail" 1 "pass a" "fail b, c: rank 0: it: is 0; rank 1: it: is 1" "FAILED: 2 of 4 checks, 7 skipped"
cmake 3.25.1 'echo "pass a"; [ "$3" != 1 ] || { echo "fail b: rank 1: why"; exit 1; }; echo "pass b"'
expect "one rank fails" 1 "pass a" "fail b: rank 1: why" "FAILED: 1 of 3 checks, 7 skipped"
cmake 3.25.1 'echo "pass a"; [ "$3" = 1 ] || exec kill -9 $$; echo "pass b"'
expect "a rank dies" 1 "fail operations: did not end in 200 s, or was killed" "FAILED: 1 of 3 checks, 7 skipped"
cmake 3.25.1 '[ "$3" = 1 ] || echo "pass a"'
expect "a rank does nothing" 1 "fail a: one rank alone has come to it" "FAILED: 1 of 2 checks, 7 skipped"
cmake 3.25.1 'exit 0'
expect "nothing is checked" 1 "pass build" "NOTHING CHECKED: no check has passed on the GPU, 7 skipped"
cmake 3.24.3 'echo "pass a"'
expect "an old CMake" 1 "skip build: CMake 3.24.3, needs 3.25 or later" "NOTHING CHECKED: .*, 10 skipped"
script cmake 'case $1 in --version) echo cmake version 3.25.1 ;; esac'
expect "an old program and a build that makes none" 1 "fail build: see above" "FAILED: 1 of 1 checks, 9 skipped"
script nvidia-smi 'exit 1'
cmake 3.25.1 'echo "pass a"'
expect "no GPU" 1 "skip operations: no NVIDIA GPU.*" "NOTHING CHECKED ON A GPU: 1 passed, 9 skipped"
exit "$failures"
