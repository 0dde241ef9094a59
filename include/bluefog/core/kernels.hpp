// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Everything that is computed on arrays in host memory: umbrella of kernels/.

#include <bluefog/core/kernels/all_finite.hpp>
#include <bluefog/core/kernels/convert.hpp>
#include <bluefog/core/kernels/mix.hpp>
#include <bluefog/core/kernels/reduce.hpp>
