# SPDX-License-Identifier: Apache-2.0
# Sourced: options of the sanitizers, one place. A report ends the process with an error in each of them.
export ASAN_OPTIONS=abort_on_error=0:halt_on_error=1:detect_leaks=1:strict_string_checks=1:allocator_may_return_null=1
export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
export TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1:history_size=4:suppressions=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/tsan_suppressions.txt
export LSAN_OPTIONS=report_objects=1
