// SPDX-License-Identifier: Apache-2.0
#pragma once

// Umbrella: ranks with a CUDA device each.
#include <bluefog/nccl/backend.hpp>
#include <bluefog/nccl/meet_over.hpp>
