"""Your own dataset: a table of samples, each with its device, its label, and whether it is for testing.

python examples/my_data.py my_data.csv
folb compare my_data.csv --algorithms folb,fedavg --rounds 20 --set local.lr=0.1
"""

import csv
import random
import sys
from collections.abc import Iterator


def samples(devices: int = 12, each: int = 40) -> Iterator[list[object]]:
    """Replace this with a loop over your samples: the device's name, numbers, the label's name, train or test."""
    draw = random.Random(0)
    for k in range(devices):
        shift = draw.gauss(0, 1)  # devices differ
        for n in range(each):
            heat, load = draw.gauss(shift, 1), draw.gauss(0, 1)
            yield [
                f"phone-{k:02}",
                heat,
                load,
                "broken" if heat + load > shift else "sound",
                "test" if n % 10 == 0 else "train",
            ]


if __name__ == "__main__":
    with open(sys.argv[1] if len(sys.argv) > 1 else "my_data.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["device", "heat", "load", "label", "split"])
        table.writerows(samples())
