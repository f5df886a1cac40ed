// markup.h — K3's markup as a graph of tokens: paths of single tokens, and texts under grammars.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "text/grammar/token_trie.h"
#include "text/kimi_markers.h"
#include "text/token_constraint.h"
#include "text/tokenizer.h"

namespace tandem::grammar {

struct MarkupNode {
  std::vector<std::pair<std::int32_t, std::int32_t>> edges;  // token id, node
  std::shared_ptr<const TokenConstraint> text;  // a text stands here; it ends with <|close|>
  std::int32_t after = -1;                      // with text or counts: the node behind
  bool counts = false;                          // the number of the call stands here
  bool repeats = false;                         // <|open|> here begins one more call
  bool ends = false;                            // nothing follows
};

/// Built once, then shared by the constraints that walk it. Node 0 is behind the think channel, or
/// the start when there is none.
class MarkupGraph {
 public:
  /// The highest number of a call; there are no further ones.
  static constexpr std::int32_t kMaxCalls = 128;

  /// The tokenizer is used while the graph is built, and not after that.
  MarkupGraph(const Tokenizer& tokenizer, std::shared_ptr<const TokenTrie> trie);

  std::int32_t add_node();
  /// A way from one node to another; ways from one node share what they have in common. `ids` is
  /// not empty.
  void add_path(std::int32_t from, std::span<const std::int32_t> ids, std::int32_t to);
  void set_text(std::int32_t node, std::shared_ptr<const TokenConstraint> text, std::int32_t after);
  void set_repeats(std::int32_t node) { nodes_[static_cast<std::size_t>(node)].repeats = true; }
  void set_count(std::int32_t node, std::int32_t after);
  /// <|close|> message <|sep|> and the end.
  void add_end(std::int32_t from);

  // What elements are written with; text is encoded as the renderer does, each part on its own.
  [[nodiscard]] std::vector<std::int32_t> open(std::string_view tag) const;  // <|open|> TAG
  [[nodiscard]] std::vector<std::int32_t> close(
      std::string_view tag) const;  // <|close|> TAG <|sep|>
  /// TAG <|sep|>: close() behind the <|close|> that ended a text.
  [[nodiscard]] std::vector<std::int32_t> closed(std::string_view tag) const;
  /// ` KEY="VALUE"`
  [[nodiscard]] std::vector<std::int32_t> attribute(std::string_view key,
                                                    std::string_view value) const;
  [[nodiscard]] std::vector<std::int32_t> attribute_begin(std::string_view key) const;  // ` KEY="`
  [[nodiscard]] std::vector<std::int32_t> attribute_end() const;                        // `"`
  [[nodiscard]] std::int32_t sep() const { return markers_.sep; }

  [[nodiscard]] const MarkupNode& node(std::int32_t idx) const {
    return nodes_[static_cast<std::size_t>(idx)];
  }
  [[nodiscard]] const KimiMarkers& markers() const { return markers_; }
  [[nodiscard]] const TokenTrie& trie() const { return *trie_; }
  [[nodiscard]] std::span<const std::int32_t> count_ids(std::int32_t call) const {
    return counts_[static_cast<std::size_t>(call)];
  }

  // Nodes that headers which the model writes while it still thinks lead to; -1: nowhere.
  std::int32_t behind_think = 0;
  std::int32_t in_response = -1;
  std::int32_t in_tools = -1;

 private:
  const Tokenizer* tokenizer_;
  std::shared_ptr<const TokenTrie> trie_;
  KimiMarkers markers_;
  std::vector<MarkupNode> nodes_;
  std::vector<std::vector<std::int32_t>> counts_;  // ids of "1", "2", ...
  std::vector<std::int32_t> stop_ids_;
};

/// Walks a graph; before that, with `thinking`, waits for the header that ends the think channel.
[[nodiscard]] std::unique_ptr<TokenConstraint> make_markup_constraint(
    std::shared_ptr<const MarkupGraph> graph, bool thinking);

}  // namespace tandem::grammar
