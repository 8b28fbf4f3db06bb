#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every source, script, build and configuration file names its licence in one of its first three lines. --fix adds the line to files that
begin with # comments. Empty files have nothing to license; data (JSON, golden losses, fuzz corpora) has no comments.
"""
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
LINE = "SPDX-License-Identifier: Apache-2.0"
HASH_SUFFIXES = {".py", ".sh", ".toml", ".cmake", ".in"}
SUFFIXES = {".h", ".cc", ".c", ".cu", ".cuh"} | HASH_SUFFIXES
HASH_NAMES = {"CMakeLists.txt", ".clang-format", ".clang-tidy"}


def files():
    listed = subprocess.run(["git", "-C", ROOT, "ls-files"], capture_output=True, text=True)
    if listed.returncode == 0:
        names = listed.stdout.splitlines()
    else:  # a release archive
        names = [path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*") if "build" not in path.relative_to(ROOT).parts[:1]]
    for name in names:
        path = ROOT / name
        wanted = path.suffix in SUFFIXES or path.name in HASH_NAMES or name == ".ci/run"
        if wanted and path.is_file() and path.stat().st_size > 0 and "corpus" not in path.parts:
            yield path


def is_missing(path):
    return not any(LINE in line for line in path.read_text(encoding="utf-8").splitlines()[:3])


def fix(path):
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    lines.insert(1 if lines[0].startswith("#!") else 0, f"# {LINE}\n")
    path.write_text("".join(lines), encoding="utf-8")


def main(arguments):
    count, missing = 0, []
    for path in files():
        count += 1
        if is_missing(path):
            if "--fix" in arguments and (path.suffix in HASH_SUFFIXES or path.name in HASH_NAMES):
                fix(path)
            else:
                missing.append(path)
    for path in missing:
        print(f"{path.relative_to(ROOT).as_posix()}: no '{LINE}' in its first three lines (scripts/check_spdx.py --fix)")
    print(f"spdx: {count} files, {len(missing)} without a licence line")
    return 1 if missing or count == 0 else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
