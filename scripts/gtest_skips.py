#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How many tests a GoogleTest log skipped and why: ", 3 skipped: needs 2 GPUs"; nothing when none were.

  scripts/gtest_skips.py LOG
"""

import re
import sys


def skips(log: str) -> str:
    names = set(re.findall(r"^\[  SKIPPED \] (\S+\.\S+)", log, re.M))
    if not names:
        return ""
    reasons: list[str] = []
    for reason in re.findall(r": Skipped\n(.+)", log):
        reason = re.sub(r'["\\\x00-\x1f]', "", reason).strip()  # it becomes part of a JSON string
        if reason not in reasons:
            reasons.append(reason)
    return f", {len(names)} skipped: {'; '.join(reasons) or 'no reason given'}"


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8", errors="replace") as file:
        print(skips(file.read()), end="")
