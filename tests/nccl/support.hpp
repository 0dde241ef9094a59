// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bluefog/nccl.hpp>

#include "support/catch.hpp"
#include "support/environment.hpp"
#include "support/nccl_ranks.hpp"
#include "support/ranks.hpp"
