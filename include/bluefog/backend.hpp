// SPDX-License-Identifier: Apache-2.0
#pragma once

// Umbrella: the concepts that a transport meets, requests, and the communication engine.
#include <bluefog/backend/agreed_calls.hpp>
#include <bluefog/backend/backoff.hpp>
#include <bluefog/backend/check.hpp>
#include <bluefog/backend/compute.hpp>
#include <bluefog/backend/concepts.hpp>
#include <bluefog/backend/context.hpp>
#include <bluefog/backend/engine.hpp>
#include <bluefog/backend/failure.hpp>
#include <bluefog/backend/gather.hpp>
#include <bluefog/backend/in_order.hpp>
#include <bluefog/backend/job.hpp>
#include <bluefog/backend/label.hpp>
#include <bluefog/backend/lane.hpp>
#include <bluefog/backend/layout.hpp>
#include <bluefog/backend/leftovers.hpp>
#include <bluefog/backend/message.hpp>
#include <bluefog/backend/names.hpp>
#include <bluefog/backend/options.hpp>
#include <bluefog/backend/request.hpp>
#include <bluefog/backend/stall.hpp>
#include <bluefog/backend/state.hpp>
#include <bluefog/backend/statistics.hpp>
#include <bluefog/backend/supervisor.hpp>
#include <bluefog/backend/task.hpp>
