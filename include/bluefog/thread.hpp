// SPDX-License-Identifier: Apache-2.0
#pragma once

// Umbrella: ranks as threads of one process.
#include <bluefog/thread/backend.hpp>
#include <bluefog/thread/run.hpp>
