#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How many tests the log of GoogleTest or of pytest -rs skipped and why: ", 3 skipped: needs 2 GPUs"; nothing when none were.

  scripts/gtest_skips.py LOG
"""

import re
import sys


def skips(log: str) -> str:
    by_pytest = re.findall(r"^SKIPPED \[(\d+)\] \S+: (.+)", log, re.M)
    count = len(set(re.findall(r"^\[  SKIPPED \] (\S+\.\S+)", log, re.M))) + sum(int(number) for number, _ in by_pytest)
    if count == 0:
        return ""
    reasons: list[str] = []
    for reason in re.findall(r": Skipped\n(.+)", log) + [reason for _, reason in by_pytest]:
        reason = re.sub(r'["\\\x00-\x1f]', "", reason).strip()  # it becomes part of a JSON string
        if reason not in reasons:
            reasons.append(reason)
    return f", {count} skipped: {'; '.join(reasons) or 'no reason given'}"


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8", errors="replace") as file:
        print(skips(file.read()), end="")
