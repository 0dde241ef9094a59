// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// All topologies: graphs, schedules, and what one asks about them. Includes only.

#include <bluefog/topology/adjacency.hpp>
#include <bluefog/topology/adjacency_data.hpp>
#include <bluefog/topology/circulant.hpp>
#include <bluefog/topology/concepts.hpp>
#include <bluefog/topology/dot.hpp>
#include <bluefog/topology/edge_view.hpp>
#include <bluefog/topology/eigenvalues.hpp>
#include <bluefog/topology/exponential.hpp>
#include <bluefog/topology/fully_connected.hpp>
#include <bluefog/topology/indexed_view.hpp>
#include <bluefog/topology/inner_outer_exponential.hpp>
#include <bluefog/topology/inner_outer_ring.hpp>
#include <bluefog/topology/machines.hpp>
#include <bluefog/topology/mesh_grid_2d.hpp>
#include <bluefog/topology/neighborhood.hpp>
#include <bluefog/topology/neighborhood_of.hpp>
#include <bluefog/topology/one_peer.hpp>
#include <bluefog/topology/one_peer_exponential.hpp>
#include <bluefog/topology/one_peer_exponential_machines.hpp>
#include <bluefog/topology/pairing.hpp>
#include <bluefog/topology/powers.hpp>
#include <bluefog/topology/properties.hpp>
#include <bluefog/topology/rank_check.hpp>
#include <bluefog/topology/read_adjacency.hpp>
#include <bluefog/topology/repeat.hpp>
#include <bluefog/topology/ring.hpp>
#include <bluefog/topology/rounds.hpp>
#include <bluefog/topology/shared.hpp>
#include <bluefog/topology/shift.hpp>
#include <bluefog/topology/spectral_gap.hpp>
#include <bluefog/topology/star.hpp>
#include <bluefog/topology/symmetric_exponential.hpp>
#include <bluefog/topology/symmetric_spectrum.hpp>
