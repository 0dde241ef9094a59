// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <istream>
#include <sstream>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include <bluefog/core/error.hpp>
#include <bluefog/topology/adjacency.hpp>
#include <bluefog/topology/adjacency_data.hpp>
#include <bluefog/topology/edge_view.hpp>

namespace bluefog::topology {

namespace detail {

/// \return the words of `line`, up to a '#'.
inline std::vector<std::string> words_of(std::string line) {
  line.erase(std::min(line.find('#'), line.size()));
  std::istringstream text(line);
  std::vector<std::string> words;
  for (std::string word; text >> word;) words.push_back(word);
  return words;
}

/// \return whether all of `word` is a number, which is stored in `value`.
template <class Number>
bool parse_number(std::string_view word, Number& value) {
  const char* const last = word.data() + word.size();
  const auto [end, failure] = std::from_chars(word.data(), last, value);
  return failure == std::errc{} && end == last;
}

}  // namespace detail

/// Reads a graph from text: the number of ranks on the first line, then an edge per line,
/// `source destination weight`.
///
/// Empty lines, and what follows a `#`, do not count. A line whose two ranks are equal gives a self
/// weight. The weight may be left out where `options.weights` does not use it.
///
/// \param name  what to call the text in messages.
/// \throws usage_error naming the line if it is malformed, or the edge if `adjacency` refuses it.
[[nodiscard]] inline adjacency read_adjacency(std::istream& text, std::string_view name,
                                              adjacency_options options = {}) {
  int size = 0;
  int number = 0;
  std::vector<directed_edge> edges;
  for (std::string line; std::getline(text, line);) {
    ++number;
    const auto words = detail::words_of(line);
    if (words.empty()) continue;
    if (size == 0) {
      expects(words.size() == 1 && detail::parse_number(words[0], size) && size >= 1,
              "read_adjacency: ", name, ":", number,
              ": the first line must be the number of ranks, got \"", line, "\"");
      continue;
    }
    directed_edge edge;
    const bool weighted = words.size() == 3;
    expects((weighted || (words.size() == 2 && options.weights != weighting::given)) &&
                detail::parse_number(words[0], edge.source) &&
                detail::parse_number(words[1], edge.destination) &&
                (!weighted || detail::parse_number(words[2], edge.weight)),
            "read_adjacency: ", name, ":", number,
            ": a line must be \"source destination weight\", got \"", line, "\"");
    edges.push_back(edge);
  }
  expects(size != 0, "read_adjacency: ", name, ": must hold the number of ranks, got nothing");
  try {
    return adjacency(size, edges, options);
  } catch (const usage_error& refused) {
    throw usage_error(concat("read_adjacency: ", name, ": ", refused.what()));
  }
}

/// Reads a graph from a text file of the form above.
/// \throws usage_error also if the file cannot be read.
[[nodiscard]] inline adjacency read_adjacency(const std::filesystem::path& file,
                                              adjacency_options options = {}) {
  std::ifstream text(file);
  expects(text.is_open(), "read_adjacency: file must be readable, got ", file.string());
  return read_adjacency(text, file.string(), options);
}

}  // namespace bluefog::topology
