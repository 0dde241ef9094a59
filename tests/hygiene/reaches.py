#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints the public headers that include a given header of another library, at once or by way of others.

    reaches.py INCLUDE_DIRECTORY HEADER        e.g. reaches.py include torch/nn/module.h
"""

import pathlib
import sys

from check_tree import included


def main():
    include, wanted = pathlib.Path(sys.argv[1]), sys.argv[2]
    includes = {path.relative_to(include).as_posix(): {header for _, _, header in included(path.read_text())}
                for path in (include / "bluefog").rglob("*.hpp")}
    found, latest = set(), {wanted}
    while latest:
        latest = {name for name in includes.keys() - found if not includes[name].isdisjoint(latest)}
        found |= latest
    print("\n".join(sorted(found)))


if __name__ == "__main__":
    main()
