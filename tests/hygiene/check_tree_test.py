#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Plants one broken rule at a time in a small tree, and expects check_tree.py to name it."""

import pathlib
import subprocess
import sys
import tempfile

SPDX = "// SPDX-License-Identifier: Apache-2.0\n"
HEADER = SPDX + "#pragma once\n"
SOUND = {
    "CMakeLists.txt": "# SPDX-License-Identifier: Apache-2.0\nproject(bluefog\n  VERSION 0.1.0)\n"
    "  include/bluefog/bluefog.hpp\n  include/bluefog/version.hpp\n  include/bluefog/mpi.hpp\n  include/bluefog/mpi/check.hpp\n",
    "include/bluefog/version.hpp": HEADER + "inline constexpr int version_major = 0;\ninline constexpr int version_minor = 1;\n"
    'inline constexpr int version_patch = 0;\ninline constexpr std::string_view version = "0.1.0";\n',
    "include/bluefog/bluefog.hpp": HEADER + "#include <bluefog/mpi.hpp>\n",
    "include/bluefog/mpi.hpp": HEADER + "#include <bluefog/mpi/check.hpp>\n",
    "include/bluefog/mpi/check.hpp": HEADER + '#include <mpi.h>\nvoid f() { check(MPI_Barrier(comm), "MPI_Barrier"); }\n',
}
UNCHECKED = [(".venv-other/lib/x.py", "# TO" "DO: somebody else's\n"), ("build-mine/x.cpp", "int x;\n")]
CHECK = "include/bluefog/mpi/check.hpp"
PLANTED = [  # file, what is added to it, what is said
    (CHECK, "void g() { MPI_Barrier(comm); }\n", "MPI_Barrier is called outside check"),
    (CHECK, "#include <torch/csrc/autograd/variable.h>\n", "layer 'mpi' must not include <torch/"),
    (CHECK, "#include <torch/torch.h>\n", "too wide a door"),
    (CHECK, "#include <bluefog/mpi/gone.hpp>\n", "does not exist"),
    (CHECK, "//\n" * 300, "a header has at most 300"),
    (CHECK, "#define BLUEFOG_CHECK\n", "defines a macro"),
    (CHECK, "void h() { std::cout << 1; }\n", "prints or exits"),
    (CHECK, "// TO" "DO: later\n", "unfinished"),
    ("include/bluefog/mpi/new.hpp", HEADER, "is in no FILE_SET"),
    ("include/bluefog/mpi/new.hpp", HEADER, "does not include <bluefog/mpi/new.hpp>"),
    ("include/bluefog/core/up.hpp", HEADER + "#include <bluefog/mpi/check.hpp>\n", "layer 'core' must not include"),
    ("include/bluefog/odd/x.hpp", HEADER, "layer 'odd' is unknown"),
    ("include/bluefog/mpi/bare.hpp", "#pragma once\n", "does not start with SPDX"),
    ("CMakeLists.txt", "  include/bluefog/gone.hpp\n", "listed, but does not exist"),
]
VERSION = "include/bluefog/version.hpp"
VERSIONS = [  # what version.hpp says instead, the options of check_tree.py, what is said
    (None, ["--version", "0.2.0"], "says 0.1.0, the project is 0.2.0"),
    (("version_minor = 1", "version_minor = 3"), [], "says 0.3.0, the project is 0.1.0"),
    (("version_patch = 0", "version_patch = 7"), ["--version", "0.1.0"], "says 0.1.7, the project is 0.1.0"),
    (('version = "0.1.0"', 'version = "0.4.0"'), [], "says 0.4.0, the project is 0.1.0"),
]


def findings(extra, options=(), replaced=None):
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        for name, text in list(SOUND.items()) + extra:
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text((path.read_text() if path.exists() else "") + text)
        if replaced:
            path = root / VERSION
            path.write_text(path.read_text().replace(*replaced))
        script = pathlib.Path(__file__).with_name("check_tree.py")
        done = subprocess.run([sys.executable, str(script), folder, *options], stdout=subprocess.PIPE, text=True)
        return done.returncode, done.stdout


def main():
    failed = 0
    code, text = findings(UNCHECKED)
    if code != 0:
        print("a sound tree is refused:", text)
        failed += 1
    for name, added, said in PLANTED:
        code, text = findings([(name, added)])
        if code == 0 or said not in text:
            print(f"not found: {said}\n{text}")
            failed += 1
    for replaced, options, said in VERSIONS:
        code, text = findings([], options, replaced)
        if code == 0 or f"{VERSION}:1: {said}" not in text:
            print(f"not found: {said}\n{text}")
            failed += 1
    print(f"{len(PLANTED) + len(VERSIONS) + 1} trees, {failed} misjudged")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
