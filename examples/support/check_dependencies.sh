#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# What install_packages of dependencies.sh does for whom: root and who has sudo get the packages, others the line
# that installs them. Stubs take the place of id, sudo and apt-get.

set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

failures=0
# expect CASE STATUS TEXT: of a user whose commands are those in $work/bin.
expect() {
  local status=0
  PATH="$work/bin" "$BASH" -c 'source "$0/dependencies.sh"; install_packages "a tool" one two' "$here" \
    >"$work/said" 2>&1 </dev/null || status=$?
  [ "$status" -eq "$2" ] && grep -qF "$3" "$work/said" && return
  echo "$1: exit status $status, not $2, or no word of: $3" && cat "$work/said"
  failures=$((failures + 1))
}
user() {
  rm -rf "$work/bin" && mkdir "$work/bin"
  for each in basename dirname env; do ln -s "$(command -v "$each")" "$work/bin"; done
  stub id "echo $1"
}
stub() { printf '#!%s\n%s\n' "$BASH" "$2" >"$work/bin/$1" && chmod +x "$work/bin/$1"; }

user 1000
expect "neither root nor sudo" 1 "needs a tool; as root run: apt-get install -y one two"
stub sudo 'exit 1'  # would ask for a password, and nobody is there
expect "sudo with a password" 1 "needs a tool; as root run: apt-get install -y one two"
stub sudo '[ "$1" != -n ] || shift; echo "sudo $*" >&2; "$@"'
stub apt-get 'echo "$*" >&2'
expect "sudo" 0 "install -y -qq --no-install-recommends one two"
expect "sudo" 0 "sudo env DEBIAN_FRONTEND=noninteractive apt-get install"
user 0
expect "no apt-get" 1 "this machine has no apt-get, install what corresponds to Debian's: one two"
stub apt-get 'echo "$*" >&2'
expect "root" 0 "install -y -qq --no-install-recommends one two"
stub apt-get '[ "$1" != install ]'
expect "apt-get fails" 1 "needs a tool; apt-get install one two failed"
exit "$failures"
