#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Has Graphviz draw what 010_topologies writes, and looks for every rank and every edge in the drawing.

usage: check_dot.py COMMAND [ARGUMENT...]

Adds `--dot FILE` to the command. What has to be drawn is what the example prints as "sends to". Ends with 77,
and a reason, where Graphviz is not installed.
"""

import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree

SVG = "{http://www.w3.org/2000/svg}"


def printed(text):
    """The ranks and the edges in the table that the example prints."""
    rows = re.findall(r"^ *(\d+) \| +[\d.]+ \| ([\d -]+)\|", text, re.MULTILINE)
    edges = [f"{rank}->{receiver}" for rank, sends in rows for receiver in re.findall(r"\d+", sends)]
    return [rank for rank, _ in rows], sorted(edges)


def drawn(svg):
    """The titles of nodes and of edges, and each node's first line of text."""
    titles = {"node": [], "edge": []}
    labels = []
    for group in xml.etree.ElementTree.fromstring(svg).iter(SVG + "g"):
        kind = group.get("class")
        if kind in titles:
            titles[kind].append(group.findtext(SVG + "title"))
        if kind == "node":
            labels.append(group.findtext(SVG + "text"))
    return titles["node"], sorted(titles["edge"]), labels


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    dot = shutil.which("dot")
    if dot is None:
        print("skipped: Graphviz is not installed, there is no `dot`")
        sys.exit(77)
    with tempfile.TemporaryDirectory() as folder:
        file = str(pathlib.Path(folder) / "topology.dot")
        text = subprocess.run([*sys.argv[1:], "--dot", file], check=True, stdout=subprocess.PIPE, text=True).stdout
        svg = subprocess.run([dot, "-Tsvg", file], check=True, stdout=subprocess.PIPE).stdout
    ranks, edges = printed(text)
    nodes, arrows, labels = drawn(svg)
    if len(ranks) < 2 or sorted(nodes) != sorted(ranks) or labels != nodes:
        sys.exit(f"ranks {ranks} are drawn as {nodes}, labelled {labels}")
    if not edges or arrows != edges:
        sys.exit(f"edges {edges} are drawn as {arrows}")
    print(f"{len(nodes)} ranks and {len(arrows)} edges drawn")


if __name__ == "__main__":
    main()
