#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that what the documents name exists: files, macros, commands, configuration keys of `--set`, and links between documents.

In every tracked *.md: `path/with.suffix` and [text](target) must exist; WB_* and wb_* names must occur in a source file; `waybill VERB`
must be a registered verb; `scripts/x` must exist; and nothing may be non-ASCII. docs/environment.md must hold every variable that sources read, and
the messages of docs/howto/troubleshooting.md must be in the sources; docs/headers.md must list every public header.
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOPS = ("include", "src", "tools", "tests", "scripts", "cmake", "configs", "bench", "docs", "bindings", ".ci")
GENERATED = re.compile(r"^(build|runs|\.venv)/|[*<>{}$]|^RUN/|\.\.\.")
PATH = re.compile(r"^[\w.\-/]+/[\w.\-/]*$|^[\w\-]+\.(md|txt|toml|json|sh|py|h|cc|cmake)$")


def documents():
    yield from sorted(ROOT.glob("*.md"))
    yield from sorted((ROOT / "docs").rglob("*.md"))
    yield from sorted((ROOT / "examples").glob("*.md"))


def source_text():
    parts = []
    for top in TOPS[:-1] + ("CMakeLists.txt", "CMakePresets.json"):
        base = ROOT / top
        for path in [base] if base.is_file() else base.rglob("*"):
            if path.is_file() and path.suffix in {".h", ".cc", ".c", ".cu", ".cuh", ".txt", ".cmake", ".py", ".sh", ".json", ".in"}:
                parts.append(path.read_text(encoding="utf-8", errors="replace"))
    return "\n".join(parts)


def known_verbs(source):
    return set(re.findall(r'add_subcommand\("(\w+)"', source))


def exists(name, base):
    return any((folder / name).exists() for folder in (ROOT, base, ROOT / "include", ROOT / "src"))


def faults_of(path, source, verbs):
    where = path.relative_to(ROOT).as_posix()
    in_block = False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        in_block ^= line.startswith("```")
        if not line.isascii():
            yield f"{where}:{number}: not ASCII"
        for target in [] if in_block else re.findall(r"\]\(([^)#\s]+)", line):
            if "://" not in target and not (path.parent / target).exists():
                yield f"{where}:{number}: link to {target}, which does not exist"
        for code in re.findall(r"`([^`]+)`", line):
            first = code.split()[0] if code.split() else ""
            name = first.split(":")[0]
            if PATH.match(name) and not GENERATED.search(name) and name.split("/")[0] in TOPS + ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
                if not exists(name, path.parent):
                    yield f"{where}:{number}: file {name} does not exist"
            for symbol in re.findall(r"\b(?:WB_[A-Z0-9_]+|WAYBILL_[A-Z0-9_]+|wb_[a-z0-9_]+)\b", code):
                if symbol not in source:
                    yield f"{where}:{number}: {symbol} is in no source file"
            if first == "waybill" and len(code.split()) > 1 and re.match(r"^[a-z]+$", code.split()[1]) and code.split()[1] not in verbs:
                yield f"{where}:{number}: `waybill {code.split()[1]}` is not a command"
        for script in re.findall(r"\bscripts/[\w.\-]+", line):
            if not (ROOT / script).exists():
                yield f"{where}:{number}: {script} does not exist"
        match = re.match(r"^\s*(?:\$ )?(?:\S*/)?waybill ([a-z]+)", line)
        if match and match.group(1) not in verbs and path.name != "CHANGELOG.md" and line.startswith(("waybill", "build/", "    waybill", "$ ")):
            yield f"{where}:{number}: `waybill {match.group(1)}` is not a command"


def snippet_faults():
    """The README shows the tested program to the letter."""
    program = (ROOT / "tests/tools/readme_snippet.cc").read_text(encoding="utf-8")
    body = program.split("// [readme]\n", 1)[1].split("// [/readme]", 1)[0].strip("\n")
    if f"```cpp\n{body}\n```" not in (ROOT / "README.md").read_text(encoding="utf-8"):
        yield "README.md: its C++ snippet differs from tests/tools/readme_snippet.cc"


def environment_faults():
    """Variables of the environment that C++, Python or a script reads, and docs/environment.md lacks."""
    reads = re.compile(r'(?:getenv\(|environ\.get\(|environ\[|number_of\(\{)"([A-Z][A-Z0-9_]+)"|\$\{((?:WAYBILL|WB)_[A-Z0-9_]+)')
    page = (ROOT / "docs/environment.md").read_text(encoding="utf-8")
    known = set(re.findall(r"\b[A-Z][A-Z0-9_]+\b", page)) | {"CUDA_VISIBLE_DEVICES", "PYTHONPATH", "XLA_FLAGS"}  # CUDA's, Python's and XLA's own
    for top in ("src", "tools", "bindings", "bench", "tests", "scripts", "cmake"):
        for path in sorted((ROOT / top).rglob("*")):
            if path.suffix in {".h", ".cc", ".c", ".cu", ".py", ".sh"}:
                for match in reads.finditer(path.read_text(encoding="utf-8", errors="replace")):
                    name = match[1] or match[2]
                    if name not in known:
                        known.add(name)
                        yield f"{path.relative_to(ROOT).as_posix()}: reads {name}, which docs/environment.md does not name"


def header_faults():
    page = (ROOT / "docs/headers.md").read_text(encoding="utf-8")
    for header in sorted((ROOT / "include/waybill").glob("*.h")):
        if f"`{header.name}`" not in page:
            yield f"docs/headers.md: lacks {header.name}"


def example_faults():
    """The whole scripts of the how-to pages are files in examples, with a licence line before them."""
    for page in sorted((ROOT / "docs/howto").glob("*.md")):
        for title, text in re.findall(r"^```python title=(\S+)\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S):
            path = ROOT / "examples" / title
            if not path.exists() or path.read_text(encoding="utf-8") != f"# SPDX-License-Identifier: Apache-2.0\n{text}":
                yield f"examples/{title}: differs from the script in docs/howto/{page.name}"


def setting_faults():
    """`router.x` and `moe.x` of the page for those who come from elsewhere must be fields of Python's configs."""
    fields = set(re.findall(r"^    (\w+): ", (ROOT / "bindings/python/waybill/config.py").read_text(encoding="utf-8"), re.M))
    page = (ROOT / "docs/howto/coming-from.md").read_text(encoding="utf-8")
    for name in sorted(set(re.findall(r"\b(?:router|moe)\.(\w+)", page)) - fields):
        yield f"docs/howto/coming-from.md: {name} is no field of RouterConfig or MoeConfig"


def message_faults(source):
    """Messages of the troubleshooting page, the first cell of its tables, that no source holds; `...` stands for values. Literals of C++ and Python that
    continue on the next line are joined."""
    joined = re.sub(r'"\s*\n\s*f?"', "", source)
    for number, line in enumerate((ROOT / "docs/howto/troubleshooting.md").read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("| `"):
            for part in (part.strip() for code in re.findall(r"`([^`]+)`", line.split(" | ")[0]) for part in code.split("...")):
                if part not in joined:
                    yield f"docs/howto/troubleshooting.md:{number}: no source says '{part}'"


def main():
    source = source_text()
    verbs = known_verbs(source)
    faults, count = [*snippet_faults(), *environment_faults(), *header_faults(), *setting_faults(), *example_faults(), *message_faults(source)], 0
    for path in documents():
        count += 1
        faults += faults_of(path, source, verbs)
    for fault in faults:
        print(fault)
    print(f"docs: {count} documents, {len(faults)} faults")
    return 1 if faults or count == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
