#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that code in documents is code that compiles.

usage: check_documents.py ROOT

Every ```cpp block of a tracked Markdown file has to follow a line `<!-- cut from FILE -->`, and to stand in
that file, indented alike or not. Links to files of the repository have to lead somewhere. Prints a line per
fault; the exit status tells whether there was one."""

import pathlib
import re
import subprocess
import sys
import textwrap


def normal(text):
    return textwrap.dedent(text).strip("\n")


def stands_in(block, source):
    """Whether the lines of `block` follow one another in `source`, at any common indentation."""
    wanted = normal(block).splitlines()
    lines = source.splitlines()
    for first in range(len(lines) - len(wanted) + 1):
        if normal("\n".join(lines[first : first + len(wanted)])).splitlines() == wanted:
            return True
    return False


def faults(root, document):
    text = (root / document).read_text()
    for match in re.finditer(r"^(?:<!-- cut from (\S+) -->\n)?```cpp\n(.*?)^```$", text, re.S | re.M):
        line = text[: match.start()].count("\n") + 1
        name, block = match.groups()
        if name is None:
            yield f"{document}:{line}: a block of C++ that is not cut from a file"
        elif not (root / name).is_file():
            yield f"{document}:{line}: there is no file {name}"
        elif not stands_in(block, (root / name).read_text()):
            yield f"{document}:{line}: this block does not stand in {name}"
    for match in re.finditer(r"\]\((?!https?:|#)([^)#\s]+)(?:#[^)\s]*)?\)", text):
        line = text[: match.start()].count("\n") + 1
        if not ((root / document).parent / match.group(1)).exists():
            yield f"{document}:{line}: there is no file {match.group(1)}"


def main():
    root = pathlib.Path(sys.argv[1])
    listed = subprocess.run(["git", "-C", str(root), "ls-files", "*.md"], capture_output=True, text=True)
    documents = listed.stdout.split() or [str(each.relative_to(root)) for each in root.glob("*.md")]
    found = [fault for document in documents for fault in faults(root, document)]
    print("\n".join(found) or f"{len(documents)} documents, no fault")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
