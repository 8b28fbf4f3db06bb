// SPDX-License-Identifier: Apache-2.0
// Property tests draw the same routes on every run; RC_PARAMS="seed=..." in the environment chooses others.
#include <cstdlib>

namespace {
[[maybe_unused]] const int kFixedSeed = ::setenv("RC_PARAMS", "seed=20261129", 0);
}  // namespace
