#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints the public headers that include each of some headers, at once or by way of others.

    reaches.py INCLUDE_DIRECTORY HEADER...        e.g. reaches.py include torch/nn/module.h bluefog/communicator.hpp
"""

import pathlib
import sys

from check_tree import included


def reaching(includes, wanted):
    found, latest = set(), {wanted}
    while latest:
        latest = {name for name in includes.keys() - found if not includes[name].isdisjoint(latest)}
        found |= latest
    return found


def main():
    include = pathlib.Path(sys.argv[1])
    includes = {path.relative_to(include).as_posix(): {header for _, _, header in included(path.read_text())}
                for path in (include / "bluefog").rglob("*.hpp")}
    found = set.intersection(*(reaching(includes, wanted) for wanted in sys.argv[2:]))
    print("\n".join(sorted(found)))


if __name__ == "__main__":
    main()
