// SPDX-License-Identifier: Apache-2.0
#pragma once

// Umbrella: how ranks share a data set.

#include <bluefog/nn/distributed_sampler.hpp>
