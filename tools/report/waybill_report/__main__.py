# SPDX-License-Identifier: Apache-2.0
"""python -m waybill_report RUN_FOLDER [--output FILE]"""

import argparse
import os
import pathlib
import sys
import tempfile

from waybill_report.run import RunError, load_run


def write_atomically(path, text):
    """All of the file or none of it. Only a file is replaced: never a folder, a device or a pipe. A link stays, its target is written."""
    path = pathlib.Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        raise RunError(f"{path} is {'a folder' if path.is_dir() else 'not a regular file'}: it is not replaced")
    if not path.parent.is_dir():
        raise RunError(f"cannot write {path}: {path.parent} is not a folder")
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(part, 0o644)
        os.replace(part, path)
    except OSError:
        os.unlink(part)
        raise


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="waybill_report", description="Writes one self-contained HTML page about a run of waybill train.")
    parser.add_argument("run", help="run folder (config.toml, metrics.jsonl)")
    parser.add_argument("--output", help="file to write (default: RUN/report.html)")
    options = parser.parse_args(arguments)
    try:
        run = load_run(options.run)
        try:
            from waybill_report.page import render
        except ImportError as error:
            raise RunError(f"the package {error.name} is missing; run scripts/setup.sh demo") from None
        output = pathlib.Path(options.output) if options.output else run.folder / "report.html"
        write_atomically(output, render(run))
    except (RunError, OSError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    print(f"report: {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
