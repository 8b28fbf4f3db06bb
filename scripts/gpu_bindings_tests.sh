#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# GPU tests of the Python bindings, for scripts/gpu-check.sh: gpu_bindings_tests.sh PYTHON TEST..., TEST below bindings/tests. Several at a time where pytest-xdist is there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../bindings/tests"
python=$1
shift
jobs=()
! "$python" -c 'import xdist' 2>/dev/null || [[ $1 == *ep_* ]] || jobs=(-n 4)
export PYTHONPATH=$PWD/../python${PYTHONPATH:+:$PYTHONPATH} XLA_PYTHON_CLIENT_PREALLOCATE=${XLA_PYTHON_CLIENT_PREALLOCATE:-false}
exec timeout 300 "$python" -m pytest -q -rs -p no:cacheprovider "${jobs[@]}" "$@"
