// SPDX-License-Identifier: Apache-2.0
#pragma once

// Umbrella: how ranks share a data set, and train one module together.

#include <bluefog/nn/distributed_data_parallel.hpp>
#include <bluefog/nn/distributed_sampler.hpp>
