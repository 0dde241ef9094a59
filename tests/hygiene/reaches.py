#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints the public headers that include a given header of another library, at once or by way of others.

    reaches.py INCLUDE_DIRECTORY HEADER        e.g. reaches.py include torch/nn/module.h
"""

import functools
import pathlib
import re
import sys

root, wanted = pathlib.Path(sys.argv[1]), sys.argv[2]


@functools.lru_cache(maxsize=None)
def reaches(name):
    included = re.findall(r"^#include <([^>]+)>", (root / name).read_text(), re.MULTILINE)
    return wanted in included or any(reaches(each) for each in included if each.startswith("bluefog/"))


for path in sorted((root / "bluefog").rglob("*.hpp")):
    name = path.relative_to(root).as_posix()
    if reaches(name):
        print(name)
