#include "text/grammar/markup.h"

#include <algorithm>
#include <optional>

#include "core/checked_cast.h"
#include "text/grammar/mask_cache.h"

namespace tandem::grammar {
namespace {

// Longer headers are none of those that the model may write.
constexpr std::size_t kMaxHeaderBytes = 64;

void append(std::vector<std::int32_t>& ids, std::span<const std::int32_t> more) {
  ids.insert(ids.end(), more.begin(), more.end());
}

class MarkupConstraint final : public TokenConstraint {
 public:
  MarkupConstraint(std::shared_ptr<const MarkupGraph> graph, bool thinking)
      : graph_(std::move(graph)) {
    if (!thinking) {
      enter(0);
    }
  }

  [[nodiscard]] bool is_active() const override { return node_ >= 0; }

  void fill_mask(std::span<std::uint32_t> bits) override {
    if (!is_active()) {
      std::fill(bits.begin(), bits.end(), ~0U);
      return;
    }
    std::fill(bits.begin(), bits.end(), 0U);
    if (text_) {
      text_->fill_mask(bits);
    } else if (node().counts) {
      set_bits(bits, graph_->count_ids(calls_).subspan(count_at_, 1));
    } else {
      for (const auto& [id, target] : node().edges) {
        if (is_open(id)) {
          set_bits(bits, {&id, 1});
        }
      }
    }
  }

  [[nodiscard]] bool accept(std::int32_t id) override {
    if (!is_active()) {
      accept_thought(id);
      return true;
    }
    if (text_) {
      if (!text_->accept(id)) {
        return false;
      }
      if (id == graph_->markers().close) {
        enter(node().after);
      }
      return true;
    }
    if (node().counts) {
      return accept_count(id);
    }
    for (const auto& [edge_id, target] : node().edges) {
      if (edge_id == id && is_open(id)) {
        enter(target);
        return true;
      }
    }
    return false;
  }

  [[nodiscard]] bool is_complete() const override { return is_active() && node().ends; }

  [[nodiscard]] std::unique_ptr<TokenConstraint> clone() const override {
    return std::unique_ptr<TokenConstraint>(new MarkupConstraint(*this));
  }

 private:
  MarkupConstraint(const MarkupConstraint& other)
      : graph_(other.graph_),
        node_(other.node_),
        text_(other.text_ ? other.text_->clone() : nullptr),
        calls_(other.calls_),
        count_at_(other.count_at_),
        header_(other.header_) {}

  [[nodiscard]] const MarkupNode& node() const { return graph_->node(node_); }
  // Whether an edge of the node may be taken: a number bounds the calls.
  [[nodiscard]] bool is_open(std::int32_t id) const {
    return !node().repeats || id != graph_->markers().open || calls_ < MarkupGraph::kMaxCalls;
  }

  void enter(std::int32_t target) {
    node_ = target;
    text_ = node().text ? node().text->clone() : nullptr;
    count_at_ = 0;
  }

  bool accept_count(std::int32_t id) {
    const auto ids = graph_->count_ids(calls_);
    if (ids[count_at_] != id) {
      return false;
    }
    if (++count_at_ == ids.size()) {
      ++calls_;
      enter(node().after);
    }
    return true;
  }

  // Tokens of the think channel, and the markup that may end it.
  void accept_thought(std::int32_t id) {
    const KimiMarkers& markers = graph_->markers();
    if (id == markers.open || id == markers.close) {
      header_.emplace(1, id == markers.open ? '+' : '-');
    } else if (id != markers.sep) {
      if (header_) {
        *header_ += graph_->trie().bytes_of(id);
        if (header_->size() > kMaxHeaderBytes) {
          header_.reset();
        }
      }
    } else if (header_) {
      const std::string header = std::move(*header_);
      header_.reset();
      const std::int32_t target = header == "-think"      ? graph_->behind_think
                                  : header == "+response" ? graph_->in_response
                                  : header == "+tools"    ? graph_->in_tools
                                                          : -1;
      if (target >= 0) {
        enter(target);
      }
    }
  }

  std::shared_ptr<const MarkupGraph> graph_;
  std::int32_t node_ = -1;  // -1: thinking
  std::unique_ptr<TokenConstraint> text_;
  std::int32_t calls_ = 0;    // whose number was written
  std::size_t count_at_ = 0;  // tokens of the number that is being written
  std::optional<std::string> header_;
};

}  // namespace

MarkupGraph::MarkupGraph(const Tokenizer& tokenizer, std::shared_ptr<const TokenTrie> trie)
    : tokenizer_(&tokenizer),
      trie_(std::move(trie)),
      markers_(markers_of(tokenizer)),
      nodes_(1),
      stop_ids_(tokenizer.stop_ids().begin(), tokenizer.stop_ids().end()) {
  for (std::int32_t i = 1; i <= kMaxCalls; ++i) {
    counts_.push_back(tokenizer.encode(std::to_string(i)));
  }
}

std::int32_t MarkupGraph::add_node() {
  nodes_.emplace_back();
  return checked_cast<std::int32_t>(isize(nodes_) - 1);
}

void MarkupGraph::add_path(std::int32_t from, std::span<const std::int32_t> ids, std::int32_t to) {
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const auto& edges = nodes_[usize(from)].edges;
    const auto known = std::find_if(edges.begin(), edges.end(),
                                    [&](const auto& edge) { return edge.first == ids[i]; });
    const bool is_last = i + 1 == ids.size();
    if (known == edges.end()) {
      const std::int32_t next = is_last ? to : add_node();
      nodes_[usize(from)].edges.emplace_back(ids[i], next);
      from = next;
    } else {
      TDM_CHECK(!is_last || known->second == to, ids[i]);
      from = known->second;
    }
  }
}

void MarkupGraph::set_text(std::int32_t node, std::shared_ptr<const TokenConstraint> text,
                           std::int32_t after) {
  nodes_[usize(node)].text = std::move(text);
  nodes_[usize(node)].after = after;
}

void MarkupGraph::set_count(std::int32_t node, std::int32_t after) {
  nodes_[usize(node)].counts = true;
  nodes_[usize(node)].after = after;
}

void MarkupGraph::add_end(std::int32_t from) {
  const std::int32_t closed_message = add_node();
  const std::int32_t end = add_node();
  nodes_[usize(end)].ends = true;
  add_path(from, close("message"), closed_message);
  for (const std::int32_t id : stop_ids_) {
    add_path(closed_message, {&id, 1}, end);
  }
}

std::vector<std::int32_t> MarkupGraph::open(std::string_view tag) const {
  std::vector<std::int32_t> ids{markers_.open};
  append(ids, tokenizer_->encode(tag));
  return ids;
}

std::vector<std::int32_t> MarkupGraph::closed(std::string_view tag) const {
  std::vector<std::int32_t> ids = tokenizer_->encode(tag);
  ids.push_back(markers_.sep);
  return ids;
}

std::vector<std::int32_t> MarkupGraph::close(std::string_view tag) const {
  std::vector<std::int32_t> ids{markers_.close};
  append(ids, closed(tag));
  return ids;
}

std::vector<std::int32_t> MarkupGraph::attribute_begin(std::string_view key) const {
  std::vector<std::int32_t> ids = tokenizer_->encode(fmt::format(" {}", key));
  append(ids, tokenizer_->encode("=\""));
  return ids;
}

std::vector<std::int32_t> MarkupGraph::attribute_end() const {
  return tokenizer_->encode("\"");
}

std::vector<std::int32_t> MarkupGraph::attribute(std::string_view key,
                                                 std::string_view value) const {
  std::vector<std::int32_t> ids = attribute_begin(key);
  append(ids, tokenizer_->encode(escape_attribute(value)));
  append(ids, attribute_end());
  return ids;
}

std::unique_ptr<TokenConstraint> make_markup_constraint(std::shared_ptr<const MarkupGraph> graph,
                                                        bool thinking) {
  return std::make_unique<MarkupConstraint>(std::move(graph), thinking);
}

}  // namespace tandem::grammar
