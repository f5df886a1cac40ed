#include "text/response_constraint.h"

#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "text/grammar/markup.h"
#include "text/grammar/tool_schema.h"

namespace tandem {
namespace {

using grammar::MarkupGraph;
using Ids = std::vector<std::int32_t>;

std::vector<std::int32_t> joined(std::initializer_list<Ids> parts) {
  Ids whole;
  for (const Ids& part : parts) {
    whole.insert(whole.end(), part.begin(), part.end());
  }
  return whole;
}

// <|open|> response <|sep|> behind the think channel, straight into a text without it.
std::int32_t add_response(MarkupGraph& graph, bool thinking) {
  if (!thinking) {
    return 0;
  }
  const std::int32_t response = graph.add_node();
  graph.add_path(0, joined({graph.open("response"), {graph.sep()}}), response);
  graph.in_response = response;
  return response;
}

// The markup of calls, written by the schemas of their tools.
class ToolCallBuilder {
 public:
  ToolCallBuilder(MarkupGraph& graph, grammar::ToolTexts& texts) : graph_(graph), texts_(texts) {}

  // From behind `tools`' header to the end of the message.
  Status add(std::int32_t from, std::span<const ToolGrammar> tools, bool parallel) {
    const std::int32_t call = graph_.add_node();
    const std::int32_t behind_call = graph_.add_node();
    const std::int32_t behind_tools = graph_.add_node();
    graph_.add_path(from, graph_.open("call"), call);
    if (parallel) {
      graph_.add_path(behind_call, graph_.open("call"), call);
      graph_.set_repeats(behind_call);
    }
    graph_.add_path(behind_call, graph_.close("tools"), behind_tools);
    graph_.add_end(behind_tools);
    std::set<std::string> names;
    for (const ToolGrammar& tool : tools) {
      if (tool.name.empty() || !names.insert(tool.name).second) {
        return fail("tool \"{}\": expected a name that no other tool has", tool.name);
      }
      if (Status status = add_tool(call, tool, behind_call); !status) {
        return fail("tool \"{}\": {}", tool.name, status.message());
      }
    }
    return Ok{};
  }

 private:
  Status add_tool(std::int32_t call, const ToolGrammar& tool, std::int32_t behind_call) {
    auto properties = texts_.properties_of(tool.parameters_json);
    if (!properties) {
      return properties.failure();
    }
    const std::int32_t count = graph_.add_node();
    const std::int32_t counted = graph_.add_node();
    graph_.add_path(call,
                    joined({graph_.attribute("tool", tool.name), graph_.attribute_begin("index")}),
                    count);
    graph_.set_count(count, counted);
    // Behind i arguments; the last is behind all of them.
    std::vector<std::int32_t> places;
    for (std::size_t i = 0; i <= properties->size(); ++i) {
      places.push_back(graph_.add_node());
    }
    graph_.add_path(counted, joined({graph_.attribute_end(), {graph_.sep()}}), places[0]);
    std::vector<std::int32_t> types;  // where each property's type is written
    for (std::size_t i = 0; i < properties->size(); ++i) {
      types.push_back(graph_.add_node());
      add_values(types[i], (*properties)[i], places[i + 1]);
    }
    for (std::size_t i = 0; i < places.size(); ++i) {
      std::size_t next = i;
      bool may_close = true;
      for (; next < properties->size() && may_close; ++next) {
        const grammar::ToolProperty& property = (*properties)[next];
        graph_.add_path(places[i],
                        joined({graph_.open("argument"), graph_.attribute("key", property.name)}),
                        types[next]);
        may_close = !property.required;
      }
      if (may_close) {
        graph_.add_path(places[i], graph_.close("call"), behind_call);
      }
    }
    return Ok{};
  }

  void add_values(std::int32_t from, const grammar::ToolProperty& property, std::int32_t to) {
    for (const grammar::ToolValue& value : property.values) {
      const std::int32_t text = graph_.add_node();
      const std::int32_t closing = graph_.add_node();
      graph_.add_path(from, joined({graph_.attribute("type", value.type), {graph_.sep()}}), text);
      graph_.set_text(text, value.text, closing);
      graph_.add_path(closing, graph_.closed("argument"), to);
    }
  }

  MarkupGraph& graph_;
  grammar::ToolTexts& texts_;
};

}  // namespace

std::unique_ptr<TokenConstraint> make_answer_constraint(const Grammar& grammar,
                                                        std::shared_ptr<const TokenTrie> trie,
                                                        const Tokenizer& tokenizer, bool thinking) {
  if (!has_markers(tokenizer)) {
    return grammar.make_constraint(std::move(trie),
                                   {tokenizer.stop_ids().begin(), tokenizer.stop_ids().end()});
  }
  auto graph = std::make_shared<MarkupGraph>(tokenizer, trie);
  const std::int32_t response = add_response(*graph, thinking);
  const std::int32_t closing = graph->add_node();
  const std::int32_t behind = graph->add_node();
  graph->set_text(response, grammar.make_constraint(std::move(trie), {graph->markers().close}),
                  closing);
  graph->add_path(closing, graph->closed("response"), behind);
  graph->add_end(behind);
  return grammar::make_markup_constraint(std::move(graph), thinking);
}

Expected<std::unique_ptr<TokenConstraint>> make_tool_call_constraint(
    std::span<const ToolGrammar> tools, bool parallel, std::shared_ptr<const TokenTrie> trie,
    const Tokenizer& tokenizer, bool thinking, const GrammarLimits& limits) {
  if (!has_markers(tokenizer)) {
    return fail("this model has no tool format");
  }
  if (tools.empty()) {
    return fail("expected at least one tool");
  }
  auto graph = std::make_shared<MarkupGraph>(tokenizer, trie);
  grammar::ToolTexts texts(std::move(trie), graph->markers().close, limits);
  const std::int32_t response = add_response(*graph, thinking);
  const std::int32_t closing = graph->add_node();
  const std::int32_t behind = graph->add_node();
  const std::int32_t in_tools = graph->add_node();
  graph->set_text(response, texts.any_text(), closing);
  graph->add_path(closing, graph->closed("response"), behind);
  graph->add_path(behind, joined({graph->open("tools"), {graph->sep()}}), in_tools);
  graph->in_tools = in_tools;
  if (const Status status = ToolCallBuilder(*graph, texts).add(in_tools, tools, parallel);
      !status) {
    return status.failure();
  }
  return grammar::make_markup_constraint(std::move(graph), thinking);
}

}  // namespace tandem
