#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Size budget: source files at most 450 lines of 160 columns, public headers 250, functions 60. scripts/size_reasons.txt holds the exceptions, a line
each: "<file>[:<function>] <reason>". Functions are found by their closing brace in the first column, which clang-format guarantees.
"""
import pathlib
import re
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
REASONS = ROOT / "scripts" / "size_reasons.txt"
MAX_FILE, MAX_HEADER, MAX_FUNCTION, MAX_COLUMNS = 450, 250, 60, 160
SUFFIXES = {".h", ".cc", ".c", ".cu", ".cuh", ".py"}
NO_FUNCTION = r"namespace|struct|class|enum|union|extern|#|//|/\*|\*|template|using|typedef|static const|const |constexpr "
START = re.compile(rf"^(?!{NO_FUNCTION})[\w:<>,&*~\[\] ]+?([\w~:]+)\(.*")


def files():
    listed = subprocess.run(["git", "-C", ROOT, "ls-files"], capture_output=True, text=True)
    if listed.returncode == 0:
        return [ROOT / name for name in listed.stdout.splitlines() if pathlib.PurePath(name).suffix in SUFFIXES and (ROOT / name).is_file()]
    return [path for top in ("include", "src", "tools", "tests", "scripts", "bindings", "bench") for path in (ROOT / top).rglob("*") if path.suffix in SUFFIXES]


def long_functions(lines):
    """(name, lines) of functions over the budget; lambdas count with the function they are in."""
    start = name = None
    for index, line in enumerate(lines):
        match = START.match(line)
        if match and not line.rstrip().endswith(";"):
            start, name = index, match.group(1)
        elif line.startswith("}") and not line.startswith("};") and start is not None:
            if index - start + 1 > MAX_FUNCTION:
                yield name, index - start + 1
            start = None


def main():
    reasons = {}
    if REASONS.is_file():
        for line in REASONS.read_text(encoding="utf-8").splitlines():
            if line.strip() and not line.startswith("#"):
                key, _, reason = line.partition(" ")
                reasons[key] = reason.strip()
    sizes, faults, used = [], [], set()
    for path in sorted(files()):
        name = path.relative_to(ROOT).as_posix()
        lines = path.read_text(encoding="utf-8").splitlines()
        sizes.append(len(lines))
        limit = MAX_HEADER if name.startswith("include/") else MAX_FILE
        offenders = [(name, f"{len(lines)} lines, {limit} allowed")] if len(lines) > limit else []
        offenders += [(f"{name}:{number}", f"{len(line)} columns, {MAX_COLUMNS} allowed") for number, line in enumerate(lines, 1) if len(line) > MAX_COLUMNS]
        if path.suffix in {".cc", ".c"} and not name.startswith("tests/"):
            offenders += [(f"{name}:{function}", f"function of {count} lines, {MAX_FUNCTION} allowed") for function, count in long_functions(lines)]
        for key, text in offenders:
            if reasons.get(key):
                used.add(key)
            else:
                faults.append(f"{key}: {text}")
    faults += [f"scripts/size_reasons.txt: {key} is within the budget or gone; remove its line" for key in sorted(set(reasons) - used)]
    for fault in faults:
        print(fault)
    sizes.sort()
    p90 = sizes[int(0.9 * (len(sizes) - 1))]
    print(f"size: {len(sizes)} files, median {statistics.median(sizes):.0f} lines, p90 {p90}, {len(used)} exceptions, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
