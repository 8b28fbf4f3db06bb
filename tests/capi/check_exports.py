# SPDX-License-Identifier: Apache-2.0
"""check_exports.py NM LIBRARY HEADER_FOLDER: the library exports every wb_ function of the headers, and else only waybill:: names."""
import pathlib
import re
import subprocess
import sys


def exported(nm, library, demangle):
    arguments = [nm, "-D", "--defined-only", "--format=posix"] + (["-C"] if demangle else []) + [library]
    lines = subprocess.run(arguments, check=True, capture_output=True, text=True).stdout.splitlines()
    return lines


def declared(folder):
    names = set()
    for header in ("waybill.h", "waybill_quantize.h", "waybill_distributed.h", "waybill_device.h"):
        text = (pathlib.Path(folder) / header).read_text(encoding="utf-8")
        names |= set(re.findall(r"WB_API[^;]*?\b(wb_\w+)\(", text))
    return names


def main():
    nm, library, folder = sys.argv[1:]
    mangled = {line.split()[0].split("@")[0] for line in exported(nm, library, demangle=False)}
    c_names = {name for name in mangled if name.startswith("wb_")}
    foreign = [name for name in mangled - c_names if not re.match(r"_ZT[ISV]N7waybill|_Z(N|NK|St|dl|nw|Z|GV|Th)*.*7waybill", name)]
    missing, undeclared = declared(folder) - c_names, c_names - declared(folder)
    for title, names in (("not of the API", foreign), ("declared but not exported", missing), ("exported but not declared", undeclared)):
        for name in sorted(names):
            print(f"{title}: {name}")
    print(f"{len(c_names)} C functions, {len(mangled) - len(c_names)} C++ symbols")
    return 1 if foreign or missing or undeclared or not c_names else 0


if __name__ == "__main__":
    sys.exit(main())
