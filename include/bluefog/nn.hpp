// SPDX-License-Identifier: Apache-2.0
#pragma once

// Umbrella: data and module helpers for training on several ranks.

#include <bluefog/nn/distributed_sampler.hpp>
