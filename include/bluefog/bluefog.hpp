// SPDX-License-Identifier: Apache-2.0
#pragma once

// Umbrella: everything that this build enabled. Linking bluefog::bluefog brings MPI, NCCL and
// libtorch and says that they are there; with them a translation unit takes some seconds to
// compile. Whoever needs less includes less: the umbrellas below each stand for one folder, and
// each header in it for itself. All above the first #ifdef know nothing of MPI, NCCL or libtorch
// and compile in about three seconds.

#include <bluefog/backend.hpp>
#include <bluefog/collective.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/core.hpp>
#include <bluefog/fwd.hpp>
#include <bluefog/neighbor.hpp>
#include <bluefog/thread.hpp>
#include <bluefog/topology.hpp>
#include <bluefog/version.hpp>

#ifdef BLUEFOG_HAS_MPI
#include <bluefog/mpi.hpp>
#endif

#ifdef BLUEFOG_HAS_NCCL
#include <bluefog/nccl.hpp>
#endif

#ifdef BLUEFOG_HAS_TORCH
#include <bluefog/amp.hpp>
#include <bluefog/nn.hpp>
#include <bluefog/optim.hpp>
#include <bluefog/tensor.hpp>
#endif
