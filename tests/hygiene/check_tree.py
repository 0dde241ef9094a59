#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the rules of this repository that no compiler checks.

usage: check_tree.py ROOT [--version VERSION]

Prints one line per broken rule and returns non-zero if there is any. Needs nothing but Python 3.7.
"""

import argparse
import pathlib
import re
import sys

# The layers of include/bluefog, and which of them each may include besides itself.
TORCH_FREE = ["core", "topology", "backend", "communicator", "collective", "neighbor", "window"]
ABOVE = {
    "version": [],
    "core": ["version"],
    "topology": ["core"],
    "backend": ["core", "topology"],
    "thread": ["core", "topology", "backend", "communicator"],
    "mpi": ["core", "topology", "backend"],
    "nccl": ["core", "topology", "backend", "communicator", "collective"],
    "communicator": ["core", "topology", "backend"],
    "collective": ["core", "topology", "backend", "communicator"],
    "neighbor": ["core", "topology", "backend", "communicator", "collective"],
    "window": ["core", "topology", "backend", "communicator", "collective", "neighbor"],
    "tensor": TORCH_FREE,
    "optim": TORCH_FREE + ["tensor"],
    "amp": TORCH_FREE + ["tensor", "optim"],
    "nn": TORCH_FREE + ["tensor", "optim", "amp"],
    "observe": TORCH_FREE,
    "fwd": ["version", "core", "topology", "backend"],
    "bluefog": None,  # everything
}

# Which layers may include which foreign headers.
FOREIGN = [
    (re.compile(r"^mpi\.h$"), {"mpi"}),
    (re.compile(r"^nccl\.h$"), {"nccl"}),
    (re.compile(r"^cuda"), {"nccl"}),
    (re.compile(r"^(torch|ATen|c10)/"), {"tensor", "optim", "amp", "nn"}),
]

# Compile for ten seconds and more; nothing that users include may bring them in.
TOO_WIDE = {"torch/torch.h", "torch/types.h", "torch/optim.h", "torch/all.h", "torch/nn.h", "torch/data.h"}

# Native calls that need not pass through check(...), each with its reason.
EXCUSES = {
    "MPI_Abort": "does not return",
    "MPI_Error_class": "part of reporting a failure",
    "MPI_Error_string": "part of reporting a failure",
    "MPI_Finalized": "cannot fail, and is asked in destructors",
    "MPI_Initialized": "cannot fail, and is asked in destructors",
    "MPI_Wtime": "returns a time",
    "MPI_Comm_free": "in a destructor, which does not throw",
    "MPI_Type_free": "in a destructor, which does not throw",
    "MPI_Op_free": "in a destructor, which does not throw",
    "MPI_Group_free": "in a destructor, which does not throw",
    "MPI_Info_free": "in a destructor, which does not throw",
    "MPI_Request_free": "in a destructor, which does not throw",
    "MPI_Cancel": "in a destructor, which does not throw",
    "MPI_Finalize": "at process exit, where nobody could catch",
    "cudaGetErrorName": "part of reporting a failure",
    "cudaGetErrorString": "part of reporting a failure",
    "cudaGetLastError": "forgets a failure that has been reported",
    "ncclGetErrorString": "part of reporting a failure",
    "ncclGetLastError": "part of reporting a failure",
    "cudaStreamDestroy": "in a destructor, which does not throw",
    "cudaEventDestroy": "in a destructor, which does not throw",
    "cudaFree": "in a destructor, which does not throw",
    "cudaFreeHost": "in a destructor, which does not throw",
    "ncclCommAbort": "part of dealing with a failure",
}

# The same for single places, where the code is looked at in another way.
EXCUSED_PLACES = {
    ("mpi/mailbox.hpp", "MPI_Iprobe"): "in a destructor; a failure counts as found",
    ("mpi/strays.hpp", "MPI_Iprobe"): "one in a destructor; a failure counts as found",
    ("mpi/request_errors.hpp", "MPI_Test"): "noexcept; a failed request counts as gone",
    ("mpi/operation.hpp", "MPI_Test"): "remembers the code, and throws when nothing is in flight any more",
    ("mpi/operation.hpp", "MPI_Get_count"): "part of noting a failure",
    ("mpi/operation.hpp", "MPI_Request_get_status"): "a request that failed is over as well",
    ("nccl/exchange.hpp", "ncclGroupEnd"): "one closes a group while an exception is on its way",
    ("nccl/handle.hpp", "cudaEventQuery"): "not ready is no failure; the rest is checked",
    ("nccl/handle.hpp", "cudaSetDevice"): "one in a destructor, which does not throw",
    ("nccl/handle.hpp", "cudaGetDriverEntryPointByVersion"): "without the driver's word a context counts as there",
    ("nccl/library.hpp", "cudaGetDeviceCount"): "without a driver there are none",
    ("nccl/connection.hpp", "cudaStreamQuery"): "after an abort only whether it still works counts",
    ("nccl/connection.hpp", "cudaSetDevice"): "part of dealing with a failure",
}

MAX_LINES = 300
SPDX = "SPDX-License-Identifier: Apache-2.0"
SOURCES = {".hpp", ".cpp", ".py", ".sh", ".cmake"}
NAMED_SOURCES = {"CMakeLists.txt", "run"}
SKIPPED = re.compile(r"\.git|\.data|\.venv.*|build.*")  # what git does not keep


class Report:
    def __init__(self, root):
        self.root = root
        self.count = 0

    def __call__(self, path, line, text):
        self.count += 1
        print(f"{path.relative_to(self.root)}:{line}: {text}")


def without_comments_and_strings(text):
    """Blanks them out; keeps every line break, so that line numbers stay right."""
    pattern = re.compile(r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"', re.S)

    def blank(match):
        return '""' + re.sub(r"[^\n]", "", match.group(0)) if match.group(0)[0] in 'R"' else re.sub(
            r"[^\n]", " ", match.group(0))

    return pattern.sub(blank, text)


def layer_of(relative):
    """The layer of a header named as in an include: its folder, or its own name beside the folders."""
    first = relative.split("/")[1]
    return first[:-4] if first.endswith(".hpp") else first


def included(text):
    for number, line in enumerate(text.splitlines(), 1):
        match = re.match(r'\s*#\s*include\s*([<"])([^>"]+)[>"]', line)
        if match:
            yield number, match.group(1), match.group(2)


def check_includes(report, path, name, text):
    layer = layer_of(name)
    allowed = ABOVE.get(layer, ())
    if layer not in ABOVE:
        report(path, 1, f"layer '{layer}' is unknown to {pathlib.Path(__file__).name}")
        return
    for number, bracket, header in included(text):
        if header in TOO_WIDE:
            report(path, number, f"includes <{header}>, which is too wide a door")
        for pattern, layers in FOREIGN:
            if pattern.match(header) and layer not in layers:
                report(path, number, f"layer '{layer}' must not include <{header}>")
        if bracket == '"':
            report(path, number, f'includes "{header}" in quotes; write <bluefog/...>')
        if header.startswith("bluefog/"):
            if not (report.root / "include" / header).exists():
                report(path, number, f"includes <{header}>, which does not exist")
            other = layer_of(header)
            if allowed is not None and other != layer and other not in allowed:
                report(path, number, f"layer '{layer}' must not include <{header}> of layer '{other}'")


def check_native_calls(report, path, name, text):
    place = name.split("/", 1)[1]
    code = without_comments_and_strings(text)
    for match in re.finditer(r"\b(MPI_[A-Z][a-z]\w*|P?MPIX_\w+|nccl[A-Z]\w*|cuda[A-Z]\w*)\s*\(", code):
        called = match.group(1)
        if called in EXCUSES or (place, called) in EXCUSED_PLACES:
            continue
        if called in ("MPI_Comm", "MPI_Request", "MPI_Datatype", "MPI_Op"):  # types
            continue
        if re.search(r"\bcheck\s*\(\s*(?:::)?$", code[: match.start()]):
            continue
        line = code.count("\n", 0, match.start()) + 1
        report(path, line, f"{called} is called outside check(...)")


def check_style(report, path, text):
    lines = text.splitlines()
    if len(lines) > MAX_LINES:
        report(path, MAX_LINES + 1, f"{len(lines)} lines; a header has at most {MAX_LINES}")
    if "#pragma once" not in lines[:3]:
        report(path, 1, "#pragma once is not right below the licence line")
    code = without_comments_and_strings(text)
    for number, line in enumerate(code.splitlines(), 1):
        if re.match(r"\s*#\s*define\b", line):
            report(path, number, "defines a macro")
        if re.search(r"\busing\s+namespace\b", line) and "std::literals" not in line and "_literals" not in line:
            report(path, number, "using namespace in a header")
        if re.match(r"\s*namespace\s*\{", line):
            report(path, number, "unnamed namespace in a header")
        if re.search(r"\bstd::(cout|cerr|clog)\b|\b(printf|puts)\s*\(|\bstd::exit\b|[^:\w]exit\s*\(", line):
            if not path.match("include/bluefog/core/logger.hpp"):
                report(path, number, "prints or exits; only the log prints")


def reached(include, path):
    """The names of all headers of this library that including `path` brings in."""
    names, todo = set(), [path]
    while todo:
        for _, _, header in included(todo.pop().read_text()):
            if header.startswith("bluefog/") and header not in names and (include / header).exists():
                names.add(header)
                todo.append(include / header)
    return names


def check_umbrellas(report, include):
    """Each folder's umbrella includes all of the folder, and bluefog.hpp every umbrella."""
    top = include / "bluefog" / "bluefog.hpp"
    folders = sorted(p for p in (include / "bluefog").iterdir() if p.is_dir() and any(p.glob("*.hpp")))
    texts = {top: top.read_text() if top.exists() else ""}
    if not top.exists():
        report(top, 1, "is missing")
    for folder in folders:
        umbrella = folder.with_suffix(".hpp")
        if not umbrella.exists():
            report(umbrella, 1, f"is missing: the umbrella of {folder.name}/")
            continue
        names = reached(include, umbrella)
        for header in sorted(folder.rglob("*.hpp")):
            name = header.relative_to(include).as_posix()
            if name not in names:
                report(umbrella, 1, f"does not include <{name}>")
        if top.exists() and f"<bluefog/{folder.name}.hpp>" not in texts[top]:
            report(top, 1, f"does not include <bluefog/{folder.name}.hpp>")


def check_lists(report, root, headers):
    """CMakeLists.txt lists every header, and none that is gone."""
    cmake = root / "CMakeLists.txt"
    listed = re.findall(r"^\s*(include/bluefog/\S+\.hpp)\s*$", cmake.read_text(), re.M)
    actual = {h.relative_to(root).as_posix() for h in headers}
    for name in sorted(actual - set(listed)):
        report(cmake, 1, f"{name} is in no FILE_SET")
    for name in sorted(set(listed) - actual):
        report(cmake, 1, f"{name} is listed, but does not exist")
    for name in sorted({n for n in listed if listed.count(n) > 1}):
        report(cmake, 1, f"{name} is listed twice")


def check_version(report, root, version):
    path = root / "include" / "bluefog" / "version.hpp"
    text = path.read_text()
    parts = [re.search(rf"version_{p} = (\d+);", text) for p in ("major", "minor", "patch")]
    numbers = ".".join(p.group(1) if p else "?" for p in parts)
    spelled = re.search(r'version = "([^"]*)"', text)
    project = re.search(r"project\(bluefog\s+VERSION ([\d.]+)", (root / "CMakeLists.txt").read_text())
    wanted = version or (project.group(1) if project else "?")
    for said in dict.fromkeys([numbers, spelled.group(1) if spelled else "?"]):
        if said != wanted:
            report(path, 1, f"says {said}, the project is {wanted}")


def tracked(root):
    for path in sorted(root.rglob("*")):
        parts = path.relative_to(root).parts
        if any(SKIPPED.fullmatch(p) for p in parts) or not path.is_file():
            continue
        yield path


def check_every_file(report, root):
    unfinished = re.compile("TO" "DO|FIX" "ME|X" "XX:")
    for path in tracked(root):
        if path.suffix not in SOURCES | {".md", ".json"} and path.name not in NAMED_SOURCES:
            continue
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        if path.suffix in SOURCES or path.name in NAMED_SOURCES:
            if SPDX not in "\n".join(lines[:2]) or (path.suffix in (".hpp", ".cpp") and SPDX not in lines[0]):
                report(path, 1, f"does not start with {SPDX}")
        for number, line in enumerate(lines, 1):
            if unfinished.search(line):
                report(path, number, "unfinished: " + line.strip())
            if line != line.rstrip() and path.suffix != ".md":
                report(path, number, "blank at the end of the line")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=pathlib.Path)
    parser.add_argument("--version", help="what version.hpp has to say; by default what CMakeLists.txt says")
    arguments = parser.parse_args()
    root = arguments.root.resolve()
    include = root / "include"
    report = Report(root)

    headers = sorted(include.rglob("*.hpp"))
    for path in headers:
        text = path.read_text(encoding="utf-8")
        name = path.relative_to(include).as_posix()
        check_includes(report, path, name, text)
        check_native_calls(report, path, name, text)
        check_style(report, path, text)
    check_umbrellas(report, include)
    check_lists(report, root, headers)
    check_version(report, root, arguments.version)
    check_every_file(report, root)

    print(f"{len(headers)} headers, {report.count} broken rules")
    return 1 if report.count else 0


if __name__ == "__main__":
    sys.exit(main())
