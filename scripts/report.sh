#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Writes the self-contained HTML report of a run folder.
#   scripts/report.sh RUN_FOLDER [--output FILE]
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$root/.venv/bin/python
[ -x "$python" ] || python=python3
PYTHONPATH="$root/tools/report${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -m waybill_report "$@"
