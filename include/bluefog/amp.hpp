// SPDX-License-Identifier: Apache-2.0
#pragma once

// Umbrella: training in mixed precision.
#include <bluefog/amp/autocast_guard.hpp>
#include <bluefog/amp/clip_grad_norm.hpp>
#include <bluefog/amp/grad_scaler.hpp>
#include <bluefog/amp/grad_scaler_state.hpp>
#include <bluefog/amp/initialize.hpp>
#include <bluefog/amp/mixed_precision.hpp>
#include <bluefog/amp/scale_loss.hpp>
#include <bluefog/amp/unscale.hpp>
