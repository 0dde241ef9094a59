// SPDX-License-Identifier: Apache-2.0
#pragma once

// Umbrella: ranks as MPI processes.
#include <bluefog/mpi/backend.hpp>
