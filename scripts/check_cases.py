#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Lists how many tests carry the id of each field case (F01 .. F30), and fails where a case has none.

Counted are test definitions in tests/: TEST, TEST_F, TEST_P, RC_GTEST_PROP names, and names given to ctest; not tests/cuda, which only a
machine with a GPU runs. Parts that need a GPU are listed skips of a CPU run.
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
CASES = [f"F{number:02d}" for number in range(1, 31)]
SKIPS = {
    "F19": "collectives in a different order on different ranks of several GPUs: needs 2 GPUs (the CPU engine names the differing call instead)",
    "F26": "part no_sync: no host synchronisation in a captured step needs a GPU",
    "F29": "part arch: a GPU of another architecture is needed",
    "F30": "parts time and sync: grouped GEMM time over loads and host synchronisation are measured on a GPU",
}
ALL_ON_GPU = {"F19"}  # no CPU part at all
TEST_NAME = re.compile(r"\b(?:TEST|TEST_F|TEST_P|TYPED_TEST|RC_GTEST_PROP|RC_GTEST_FIXTURE_PROP)\s*\(\s*\w+\s*,\s*(\w+)")
CTEST_NAME = re.compile(r"(?:add_test\(NAME\s+|waybill_add_house_test\()([\w.]+)")


def names_in(path):
    text = path.read_text(encoding="utf-8")
    return CTEST_NAME.findall(text) if path.name == "CMakeLists.txt" else TEST_NAME.findall(text)


def main():
    counts = {case: 0 for case in CASES}
    for path in sorted((ROOT / "tests").rglob("*")):
        if "cuda" in path.relative_to(ROOT).parts:
            continue
        if path.suffix not in {".cc", ".cpp", ".cu"} and path.name != "CMakeLists.txt":
            continue
        for name in names_in(path):
            for case in set(re.findall(r"F\d\d(?=_|$)", name)):
                if case in counts:
                    counts[case] += 1
    missing = [case for case in CASES if counts[case] == 0 and case not in ALL_ON_GPU]
    for case in CASES:
        note = f"   skip: {SKIPS[case]}" if case in SKIPS else ""
        print(f"{case}  {counts[case]:3d} tests{note}")
    print(f"cases: {len(CASES) - len(missing)} of {len(CASES)} covered or listed skips" + (f", without a test: {', '.join(missing)}" if missing else ""))
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
