// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <set>
#include <string>

#include <mpi.h>

#include <bluefog/mpi/machine_warnings.hpp>
#include <bluefog/mpi/native.hpp>

#include "support/catch.hpp"

using bluefog::channel;
using bluefog::dtype;
using bluefog::message_tag;
using bluefog::reduce_op;
using bluefog::mpi::tag_space;

TEST_CASE("tags fit below the highest that MPI takes and differ within the span", "[mpi][tags]") {
  const tag_space tags(32767);  // the least that MPI promises
  std::set<int> seen;
  for (std::uint64_t number = 5'000'000'000; number < 5'000'000'000 + 16384; ++number)
    for (const channel lane : {channel::group, channel::pair}) {
      const int tag = tags.tag({lane, number, 0});
      CHECK((tag >= 0 && tag <= 32767));
      seen.insert(tag);
    }
  CHECK(seen.size() == 32768);
  const tag_space most(0x7FFFFFFF);
  CHECK(most.tag({channel::pair, ~std::uint64_t{0}, 0}) >= 0);
}

TEST_CASE("a tag is stale if its operation is over, also where the numbers wrap", "[mpi][tags]") {
  const tag_space tags(32767);
  for (const std::uint64_t oldest : {100U, 16384U, 16390U, 1'000'003U}) {
    const auto of = [&](std::uint64_t number) { return tags.tag({channel::group, number, 0}); };
    CHECK_FALSE(tags.is_stale(of(oldest), oldest));
    CHECK_FALSE(tags.is_stale(of(oldest + 1), oldest));
    CHECK_FALSE(tags.is_stale(of(oldest + 5000), oldest));
    CHECK(tags.is_stale(of(oldest - 1), oldest));
    CHECK(tags.is_stale(of(oldest - 100), oldest));
    CHECK_FALSE(tags.is_stale(tags.tag({channel::pair, oldest - 1, 0}), oldest));
  }
}

TEST_CASE("MPI reduces what it defines as this library does, the rest is left to the kernels",
          "[mpi][native]") {
  using bluefog::mpi::native;
  CHECK(native(reduce_op::sum, dtype::float64) == MPI_SUM);
  CHECK(native(reduce_op::product, dtype::int32) == MPI_PROD);
  CHECK(native(reduce_op::min, dtype::int64) == MPI_MIN);
  CHECK(native(reduce_op::sum, dtype::boolean) == MPI_LOR);
  CHECK(native(reduce_op::product, dtype::boolean) == MPI_LAND);
  for (const auto op : {reduce_op::sum, reduce_op::min, reduce_op::max, reduce_op::product}) {
    CHECK(native(op, dtype::float16) == MPI_OP_NULL);
    CHECK(native(op, dtype::bfloat16) == MPI_OP_NULL);
  }
  CHECK(native(reduce_op::max, dtype::float32) == MPI_OP_NULL);  // of NaN MPI says nothing
  CHECK(native(reduce_op::average, dtype::float32) == MPI_OP_NULL);
}

TEST_CASE("too little shared memory is spoken of with its size and the remedy", "[mpi][library]") {
  using bluefog::mpi::shared_memory_warning;
  CHECK_FALSE(shared_memory_warning(std::uint64_t{64} << 20));
  CHECK(shared_memory_warning(std::uint64_t{1} << 20) ==
        "mpi_backend: /dev/shm has 1 MiB free; MPI's shared memory may end in a bus error (a "
        "container's --shm-size enlarges it)");
}

TEST_CASE("the setting that keeps Open MPI from copying at once is named after its version",
          "[mpi][library]") {
  const auto variable_of = [](const char* library) {
    const auto setting = bluefog::mpi::copy_setting_of(library);
    return setting ? std::string(setting->variable) + "=" + setting->value : "";
  };
  CHECK(variable_of("Open MPI v4.1.4, package: Debian OpenMPI") ==
        "OMPI_MCA_btl_vader_single_copy_mechanism=none");
  CHECK(variable_of("Open MPI v5.0.11, package: Open MPI") == "OMPI_MCA_smsc=^cma");
  CHECK(variable_of("Open MPI v10.0.0") == "OMPI_MCA_smsc=^cma");
  CHECK(variable_of("MPICH Version: 4.0.2").empty());
}
