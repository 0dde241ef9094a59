#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Lets check_output.py judge programs that print what they promise, and ones that do not, one fault at a time."""

import pathlib
import subprocess
import sys
import tempfile

SOURCE = """// SPDX-License-Identifier: Apache-2.0
int main() {}

// Expected output with 2 ranks
//
//   training on 2 ranks
//   ...
//   epoch 1/2  loss <number>  accuracy 0.50
//   epoch 2/2  loss <number>  accuracy 0.75
//     saved as <text>.pt
"""
RIGHT = """training on 2 ranks
reads some data
epoch 1/2  loss 1.250    accuracy 0.50
epoch 2/2  loss -3.5e-05 accuracy 0.75
  saved as two words.pt
"""
FAILURE = "it prints something else than it promises"
PRINTED = [  # a part of the right output, what is printed instead, what is said; None where that is right as well
    ("", "", None),
    ("reads some data\n", "", None),
    ("reads some data\n", "one line\nand another\n", None),
    ("1.250", "nan", None),
    ("1.250", "7", None),
    ("-3.5e-05", "inf", None),
    ("two words", "", None),
    ("on 2 ranks", "on 3 ranks", FAILURE),
    ("0.75", "0.76", FAILURE),
    ("0.75", "0.755", FAILURE),
    ("0.75", "0x75", FAILURE),
    ("1.250", "lots", FAILURE),
    ("1.250", "1.2.5", FAILURE),
    ("1.250", "1.2 5", FAILURE),
    ("1.250", "", FAILURE),
    ("loss 1.250", "loss1.250", FAILURE),
    ("training on 2 ranks\n", "", FAILURE),
    ("epoch 1/2  loss 1.250    accuracy 0.50\n", "", FAILURE),
    ("  saved as two words.pt\n", "", FAILURE),
    ("training", "at first\ntraining", FAILURE),
    ("epoch 2/2", "in between\nepoch 2/2", FAILURE),
    ("words.pt\n", "words.pt\nat last\n", FAILURE),
    ("words.pt", "words.bin", FAILURE),
    ("words.pt", "words\n.pt", FAILURE),
    (RIGHT, "", FAILURE),
]
SOURCES = [  # a part of the source, what it says instead, what is said
    ("Expected output", "Output", "no comment `// Expected output` at its end"),
    (SOURCE[-4:], SOURCE[-4:] + "int after;\n", "something follows the comment"),
]
REPORT = '{"epoch": 1, "loss": 1.25, "accuracy": 0.5}\n{"epoch": 2, "loss": 0.00003, "accuracy": 0.75}\n'
PLAIN = RIGHT.replace("-3.5e-05", "3e-05")  # no loss is negative
REPORTS = [  # a part of the right report, what it says instead, what is said
    ("", "", None),
    ("1.25", "1.2504", None),  # rounded
    ("1.25", "1.26", "loss is 1.26, which is not printed"),
    ("0.00003", "-0.00003", "loss cannot be -3e-05"),
    ("0.75", "1.75", "accuracy cannot be 1.75"),
    ("1.25", '"1.25"', "loss is '1.25', no number"),
    ("1.25", "NaN", "NaN is no JSON"),
    ('"loss": 0.00003', '"cost": 0.00003', "other names"),
    (REPORT, REPORT + REPORT, "4 lines of JSON for 2 printed ones"),
    (REPORT, "", "wants an object of several numbers on each of several lines"),
]


def judged(folder, source, printed, code=0, report=None):
    """What check_output.py says of a program of `source` that prints `printed`, and writes `report`, if any."""
    file = folder / "example.cpp"
    file.write_text(source)
    program = folder / "program.py"
    program.write_text(
        "import pathlib, sys\n"
        f"print({printed!r}, end='')\n"
        f"if {report!r} is not None: pathlib.Path(sys.argv[sys.argv.index('--json') + 1]).write_text({report!r})\n"
        f"sys.exit({code})\n"
    )
    options = [] if report is None else ["--json", str(folder / "report.json")]
    check = pathlib.Path(__file__).with_name("check_output.py")
    command = [sys.executable, str(check), *options, str(file), sys.executable, str(program)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.returncode, done.stdout


def main():
    cases = [(SOURCE, RIGHT.replace(*part), 0, None, said) for *part, said in PRINTED]
    cases += [(SOURCE.replace(*part), RIGHT, 0, None, said) for *part, said in SOURCES]
    cases += [(SOURCE, PLAIN, 0, REPORT.replace(*part), said) for *part, said in REPORTS]
    cases += [(SOURCE, RIGHT, code, None, f"ended with {code}") for code in (1, 77)]
    cases += [(SOURCE, PLAIN, 1, REPORT, "ended with 1")]
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for source, printed, ends_with, report, said in cases:
            code, text = judged(pathlib.Path(folder), source, printed, ends_with, report)
            if (code == 0) != (said is None) or (said or "saved as") not in text:
                print(f"{'refused' if said is None else 'not found: ' + said}\n{text}")
                failed += 1
    print(f"{len(cases)} programs, {failed} misjudged")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
