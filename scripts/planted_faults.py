#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Plants the faults of tests/faults, one at a time, in a copy of the sources and confirms that tests fail for each.

  scripts/planted_faults.py            every fault: build, run, table (many minutes)
  scripts/planted_faults.py --only 05  one fault: those whose file name or description holds the text ("05", "stale", "stale weight")
  scripts/planted_faults.py --check    in seconds, for CI: every fault still applies, its tests exist, docs/testing.md lists them

Runs add up: the copy and its build are kept, and results.json there holds what each fault's last run showed, so that ten runs of one fault make
the table of one run of ten. A result is dropped when the sources, the tests or the fault have changed since.

A fault is a TOML file: file, old (text that occurs there exactly once), new, include (a standard header that `new` needs, optional),
programs (test programs that are built and run), caught_by (tests that must fail with the fault and pass without it). The copy, its build and
results are in build/faults (--build DIR); the sources themselves are never changed.
"""
import argparse
import filecmp
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
import xml.etree.ElementTree

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = ("bindings", "cmake", "configs", "include", "src", "tests", "tools", "bench")
TIMEOUT_S = 600  # a fault may hang a program; that is caught too
BEGIN, END = "<!-- planted faults -->", "<!-- /planted faults -->"
TEST_NAME = re.compile(r"\b(?:TEST|TEST_F|RC_GTEST_PROP)\s*\(\s*(\w+)\s*,\s*(\w+)")


class FaultError(Exception):
    """One line for the user."""


def load_faults(only=""):
    faults = []
    for path in sorted((ROOT / "tests/faults").glob("*.toml")):
        fault = tomllib.loads(path.read_text(encoding="utf-8"))
        missing = {"fault", "file", "old", "new", "programs", "caught_by"} - set(fault)
        if missing:
            raise FaultError(f"{path.name}: without {', '.join(sorted(missing))}")
        fault["name"] = path.stem
        if only in path.stem or only in fault["fault"]:
            faults.append(fault)
    return faults


def planted(fault, root):
    """The text of the file with the fault in it."""
    path = root / fault["file"]
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    count = text.count(fault["old"])
    if count != 1:
        raise FaultError(f"{fault['name']}: its text occurs {count} times in {fault['file']}, 1 is needed; adapt tests/faults/{fault['name']}.toml")
    text = text.replace(fault["old"], fault["new"])
    if "include" in fault:
        text = text.replace("#include", f"#include <{fault['include']}>\n#include", 1)
    return text


def table(faults):
    lines = ["| fault | planted in | caught by |", "|---|---|---|"]
    for fault in faults:
        lines.append(f"| {fault['fault']} | `{fault['file']}` | {', '.join(f'`{name}`' for name in fault['caught_by'])} |")
    return "\n".join(lines)


def check(write):
    """Lines about what no longer holds."""
    faults = load_faults()
    tests = set()
    for path in (ROOT / "tests").rglob("*.cc"):
        tests |= {f"{suite}.{name}" for suite, name in TEST_NAME.findall(path.read_text(encoding="utf-8"))}
    for fault in faults:
        try:
            planted(fault, ROOT)
        except FaultError as error:
            yield str(error)
        for name in fault["caught_by"]:
            if name not in tests:
                yield f"{fault['name']}: no test is called {name}"
        if not fault["caught_by"]:
            yield f"{fault['name']}: caught_by is empty"
    for folder in re.findall(r"add_subdirectory\((\w+)", (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")):
        if folder not in FOLDERS:
            yield f"the copy would not configure: CMakeLists.txt adds {folder}, FOLDERS does not name it"
    document = ROOT / "docs/testing.md"
    text = document.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        yield f"docs/testing.md: the marks {BEGIN} and {END} are missing"
        return
    before, rest = text.split(BEGIN, 1)
    wanted = f"{before}{BEGIN}\n{table(faults)}\n{END}{rest.split(END, 1)[1]}"
    if write:
        document.write_text(wanted, encoding="utf-8")
    elif wanted != text:
        yield "docs/testing.md: its table of planted faults differs from tests/faults (scripts/planted_faults.py --check --write)"


def copied_files(source):
    return sorted(path for name in FOLDERS for path in (source / name).rglob("*") if path.is_file())


def copy_sources(target):
    """The working tree as it is, uncommitted changes included. A file that is there already stays, with its time: ninja compares times only."""
    paths = [path for name in FOLDERS for path in (ROOT / name).rglob("*") if path.is_file()]
    paths += [ROOT / name for name in ("CMakeLists.txt", "LICENSE", "README.md")]
    wanted = set()
    for path in paths:
        copy = target / path.relative_to(ROOT)
        wanted.add(copy)
        if not copy.is_file() or not filecmp.cmp(path, copy, shallow=False):
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
    for copy in copied_files(target):
        if copy not in wanted:
            copy.unlink()


def run(command, **options):
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, **options)


def build(folder, programs, jobs):
    result = run(["cmake", "--build", folder, "-j", jobs, "--target", *programs])
    if result.returncode != 0:
        raise FaultError("does not build:\n" + "\n".join(result.stdout.splitlines()[-15:]))


def configure(source, folder):
    result = run(["cmake", "-S", source, "-B", folder, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DWAYBILL_CUDA=OFF", "-DWAYBILL_DEV=ON",
                  "-DWAYBILL_BUILD_TESTS=ON", "-DWAYBILL_BUILD_BENCH=OFF", "-DWAYBILL_BUILD_TOOLS=OFF"])  # fmt: skip
    if result.returncode != 0:
        raise FaultError(f"configuring failed: {result.stderr.strip().splitlines()[-1:]}")


def outcome_of(folder, program, names):
    """(failing tests of one program, tests that ran); of all its tests where names is empty. A program that ends early is a failing name with a
    reason in brackets."""
    binary = next((path for path in folder.rglob(program) if path.is_file() and os.access(path, os.X_OK)), None)
    if binary is None:
        raise FaultError(f"{program} was not built")
    report = folder / "planted_faults.xml"
    report.unlink(missing_ok=True)
    command = [binary, f"--gtest_output=xml:{report}", "--gtest_brief=1", f"--gtest_filter={':'.join(names) or '*'}"]
    try:
        result = run(command, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return [f"{program} (no end within {TIMEOUT_S} s)"], []
    if not report.is_file():
        return [f"{program} (ended with {result.returncode})"], []
    root = xml.etree.ElementTree.parse(report).getroot()
    cases = [(f"{case.get('classname')}.{case.get('name')}", case.find("failure") is not None) for case in root.iter("testcase")]
    return [name for name, failed in cases if failed], [name for name, _ in cases]


def examine(fault, source, folder, jobs, every_test):
    """(failing tests, what is wrong with that) of one fault; the copy is as it was afterwards."""
    path = source / fault["file"]
    original = path.read_text(encoding="utf-8")
    path.write_text(planted(fault, source), encoding="utf-8")
    try:
        build(folder, fault["programs"], jobs)
        failing = [name for program in fault["programs"] for name in outcome_of(folder, program, [] if every_test else fault["caught_by"])[0]]
        if any(" (" in name for name in failing):  # an ended program does not say which test it was: those of the list by themselves
            failing += [name for name in fault["caught_by"] if any(outcome_of(folder, program, [name])[0] for program in fault["programs"])]
    finally:
        path.write_text(original, encoding="utf-8")
    passing = [name for name in fault["caught_by"] if name not in failing]
    return failing, f"not caught by {', '.join(passing)}" if passing else ""


def clean_faults(faults, folder, jobs):
    """What is wrong without a fault: tests of caught_by that fail, or that are in none of the programs, would prove nothing."""
    programs = sorted({program for fault in faults for program in fault["programs"]})
    names = sorted({name for fault in faults for name in fault["caught_by"]})
    build(folder, programs, jobs)
    outcomes = [outcome_of(folder, program, names) for program in programs]
    ran = {name for _, cases in outcomes for name in cases}
    return [f"{name} fails" for failing, _ in outcomes for name in failing] + [f"{name} is not in {', '.join(programs)}" for name in names if name not in ran]


def digest(source):
    """Of every file of the copy: faults are sources too, they lie in tests/faults."""
    total = hashlib.sha256()
    for path in copied_files(source):
        total.update(f"{path.relative_to(source)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def load_results(path, state):
    """By fault, in the order of the files; those of other sources are left out."""
    saved = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return {fault["fault"]: saved[fault["fault"]] for fault in load_faults() if saved.get(fault["fault"], {}).get("sources") == state}


def record(path, fault, result):
    results = load_results(path, result["sources"])
    results[fault["fault"]] = result
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def full_run(options):
    faults = load_faults(options.only)
    if not faults:
        raise FaultError(f"no fault is called {options.only}")
    folder = pathlib.Path(options.build).absolute()
    source = folder / "source"
    build_folder = source / "build/faults"  # where a compiler cache knows the objects of the tree's own builds
    copy_sources(source)
    configure(source, build_folder)
    broken = clean_faults(faults, build_folder, options.jobs)
    if broken:
        raise FaultError(f"without a fault: {'; '.join(broken)}")
    print("without a fault: every test of the list passes", flush=True)
    missed, state = 0, digest(source)
    for fault in faults:
        failing, wrong = examine(fault, source, build_folder, options.jobs, options.every_test)
        missed += 1 if wrong else 0
        print(f"{fault['name']}: {wrong or 'caught'}, {len(failing)} test(s) fail", flush=True)
        record(folder / "results.json", fault, {"sources": state, "wrong": wrong, "failing": failing})
    results = load_results(folder / "results.json", state)
    rows = [f"| {name} | {', '.join(one['failing'] + [one['wrong']] * bool(one['wrong']))} |" for name, one in results.items()]
    print("\n".join(["| fault | failing tests |", "|---|---|", *rows]))
    print(f"planted faults: {len(faults) - missed} of {len(faults)} caught; {len(results)} of {len(load_faults())} have a result for these sources")
    return 1 if missed else 0


def main():
    parser = argparse.ArgumentParser(description="Plants known faults and confirms that tests find them.")
    parser.add_argument("--check", action="store_true", help="only whether the faults still apply and are documented")
    parser.add_argument("--write", action="store_true", help="with --check: bring the table of docs/testing.md up to date")
    parser.add_argument("--only", default="", help="faults whose file name or description holds this")
    parser.add_argument("--every-test", action="store_true", help="run all tests of the programs, not only those of caught_by")
    parser.add_argument("--build", default=str(ROOT / "build/faults"), help="folder of the copy and its build")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    try:
        if not options.check:
            return full_run(options)
        wrong = list(check(options.write))
    except FaultError as error:
        wrong = [str(error)]
    for line in wrong:
        print(line)
    if options.check:
        print(f"planted faults: {len(load_faults())} in tests/faults, {len(wrong)} to mend")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
