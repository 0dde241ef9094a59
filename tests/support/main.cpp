// SPDX-License-Identifier: Apache-2.0
// main() of the tests of one process, compiled once: Catch2 2 builds its runner where it is asked
// for.
#define CATCH_CONFIG_RUNNER
#include "support/catch.hpp"

int main(int argc, char** argv) {
  return Catch::Session().run(argc, argv);
}
