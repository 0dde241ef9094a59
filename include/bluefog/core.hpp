// SPDX-License-Identifier: Apache-2.0
#pragma once

// Umbrella: what every layer is built on: element types, buffers, errors, settings, log, kernels.
#include <bluefog/core/buffer.hpp>
#include <bluefog/core/dtype.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/core/half.hpp>
#include <bluefog/core/keep_for_ever.hpp>
#include <bluefog/core/kernels.hpp>
#include <bluefog/core/logger.hpp>
#include <bluefog/core/reduce_op.hpp>
#include <bluefog/core/scratch.hpp>
#include <bluefog/core/settings.hpp>
#include <bluefog/core/unique_handle.hpp>
#include <bluefog/core/unwinding.hpp>
