// SPDX-License-Identifier: Apache-2.0
#pragma once

// Umbrella: optimizers that communicate.
#include <bluefog/optim/adapt_then_combine.hpp>
#include <bluefog/optim/adapt_with_combine.hpp>
#include <bluefog/optim/decentlam.hpp>
#include <bluefog/optim/exact_diffusion.hpp>
#include <bluefog/optim/extra.hpp>
#include <bluefog/optim/gradient_allreduce.hpp>
#include <bluefog/optim/gradient_tracking.hpp>
#include <bluefog/optim/options.hpp>
#include <bluefog/optim/parameters.hpp>
#include <bluefog/optim/quasi_global_momentum.hpp>
#include <bluefog/optim/state.hpp>
