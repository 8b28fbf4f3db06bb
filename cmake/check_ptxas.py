#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compiler launcher for nvcc: runs the command, keeps ptxas' resource report beside the object, fails on spills and C7508/C7510.

Only sm_90a counts: other code objects make no speed claim. A kernel whose source carries `// ptxas: may spill <substring of its name>: <reason>` is
exempt (cold paths only).
"""
import os
import pathlib
import re
import subprocess
import sys


def main() -> int:
    command = sys.argv[1:]
    run = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    source = next((a for a in command if a.endswith(".cu")), None)
    output = command[command.index("-o") + 1] if "-o" in command else None
    report, other = [], []
    for line in run.stderr.splitlines():
        (report if re.match(r"\s*(ptxas info|\d+ bytes stack frame|Function properties)", line) or "bytes stack frame" in line else other).append(line)
    if other:
        print("\n".join(other), file=sys.stderr)
    if run.returncode != 0 or source is None or output is None or not output.endswith(".o"):
        return run.returncode
    pathlib.Path(output + ".ptxas").write_text("\n".join(report) + "\n")
    exempt = re.findall(r"// ptxas: may spill (\S+):", pathlib.Path(source).read_text(encoding="utf-8"))
    name, arch, faults = "?", "sm_90a", []
    for line in report:
        found = re.search(r"(?:Compiling entry function|Function properties for) '?(\S+?)'?(?: |$)", line)
        if found:
            name = found.group(1)
            target = re.search(r"for '(sm_\w+)'", line)
            arch = target.group(1) if target else arch
        spill = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line)
        if spill and arch == "sm_90a" and spill.group(1) + spill.group(2) != "00" and not any(e in name for e in exempt):
            faults.append(f"{name}: {spill.group(0)}")
    faults += [line for line in other if "C7508" in line or "C7510" in line]
    if faults:
        print(f"check_ptxas: {source}\n  " + "\n  ".join(faults), file=sys.stderr)
        if os.environ.get("WAYBILL_ALLOW_SPILLS") != "1":  # for experiments only
            pathlib.Path(output).unlink(missing_ok=True)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
