#include "server/api/native.h"

#include <cmath>
#include <utility>

#include <fmt/format.h>

#include "core/checked_cast.h"
#include "server/api/form_json.h"
#include "server/api/generation.h"

namespace tandem::server {
namespace {

constexpr std::size_t kMaxItems = 8192;

struct NativeItem {
  PromptPlan plan;
  std::int64_t logprob_start = -1;
};

struct NativeRequest {
  std::vector<NativeItem> items;
  bool is_batch = false;
  bool stream = false;
  bool returns_text = false;  // third element of a log-probability's entry
  bool returns_prompt_ids = false;
};

std::string base64_of(const std::vector<std::int32_t>& values) {
  constexpr std::string_view kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string bytes;
  for (const std::int32_t value : values) {  // little-endian
    const auto bits = static_cast<std::uint32_t>(value);
    for (int shift = 0; shift < 32; shift += 8) {
      bytes += static_cast<char>((bits >> shift) & 0xFFU);
    }
  }
  std::string text;
  for (std::size_t at = 0; at < bytes.size(); at += 3) {
    std::uint32_t group = 0;
    for (std::size_t i = 0; i < 3; ++i) {
      group =
          (group << 8) | (at + i < bytes.size() ? static_cast<unsigned char>(bytes[at + i]) : 0U);
    }
    for (std::size_t i = 0; i < 4; ++i) {
      text += at + i <= bytes.size() ? kDigits[(group >> (18 - 6 * i)) & 63U] : '=';
    }
  }
  return text;
}

class NativeForm final : public ResponseForm {
 public:
  NativeForm(const NativeRequest& request, bool streams_differences)
      : is_list_(request.is_batch),
        returns_text_(request.returns_text),
        returns_prompt_ids_(request.returns_prompt_ids),
        streams_differences_(streams_differences) {
    for (const NativeItem& item : request.items) {
      logprob_starts_.push_back(item.logprob_start);
      is_list_ = is_list_ || item.plan.sampling.n > 1;
    }
  }

  [[nodiscard]] std::string whole(const GenerationState& state) override;
  void advance(const GenerationState& state, const Sample& sample, const Delta& delta,
               const Send& send) override;

 private:
  [[nodiscard]] OrderedJson entry_of(const Tokenizer& tokenizer, std::int32_t id,
                                     OrderedJson logprob) const;
  [[nodiscard]] OrderedJson list_of(const Tokenizer& tokenizer,
                                    const std::vector<TokenLogprob>& top) const;
  [[nodiscard]] OrderedJson finish_of(const Sample& sample) const;
  [[nodiscard]] OrderedJson meta_of(const GenerationState& state, const Sample& sample,
                                    std::size_t first_token) const;
  void add_prompt_logprobs(OrderedJson& meta, const GenerationState& state,
                           const Sample& sample) const;
  [[nodiscard]] OrderedJson object_of(const GenerationState& state, const Sample& sample) const;

  bool is_list_;
  bool returns_text_;
  bool returns_prompt_ids_;
  bool streams_differences_;
  std::vector<std::int64_t> logprob_starts_;
  std::vector<std::size_t> tokens_sent_;
};

OrderedJson NativeForm::entry_of(const Tokenizer& tokenizer, std::int32_t id,
                                 OrderedJson logprob) const {
  OrderedJson entry = OrderedJson::array();
  entry.push_back(std::move(logprob));
  entry.push_back(id);
  entry.push_back(returns_text_ ? OrderedJson(token_text(tokenizer, id)) : OrderedJson(nullptr));
  return entry;
}

OrderedJson NativeForm::list_of(const Tokenizer& tokenizer,
                                const std::vector<TokenLogprob>& top) const {
  OrderedJson list = OrderedJson::array();
  for (const TokenLogprob& other : top) {
    list.push_back(entry_of(tokenizer, other.token, json_logprob(other.logprob)));
  }
  return list;
}

OrderedJson NativeForm::finish_of(const Sample& sample) const {
  if (!sample.is_finished) {
    return nullptr;
  }
  if (sample.finish_reason == "stop") {
    return {{"type", "stop"}, {"matched", matched_stop(sample)}};
  }
  if (sample.finish_reason == "length") {
    return {{"type", "length"}, {"length", sample.tokens.size()}};
  }
  return {
      {"type", "abort"}, {"message", "aborted"}, {"status_code", nullptr}, {"err_type", nullptr}};
}

void NativeForm::add_prompt_logprobs(OrderedJson& meta, const GenerationState& state,
                                     const Sample& sample) const {
  const std::int64_t start = logprob_starts_[sample.prompt];
  if (start < 0) {
    return;
  }
  const Tokenizer& tokenizer = state.service.tokenizer;
  const std::vector<std::int32_t>& ids = state.prompt_of(sample).ids;
  const RequestOutput& output = sample.output;
  OrderedJson logprobs = OrderedJson::array();
  OrderedJson tops = OrderedJson::array();
  for (std::size_t i = 0; i < output.prompt_logprobs.size(); ++i) {
    const float logprob = output.prompt_logprobs[i];
    logprobs.push_back(entry_of(
        tokenizer, ids[usize(start) + i],
        std::isfinite(logprob) ? OrderedJson(json_logprob(logprob)) : OrderedJson(nullptr)));
    const bool has_top = i < output.prompt_top_logprobs.size() && std::isfinite(logprob);
    tops.push_back(has_top ? list_of(tokenizer, output.prompt_top_logprobs[i])
                           : OrderedJson(nullptr));
  }
  meta["input_token_logprobs"] = std::move(logprobs);
  if (state.prompt_of(sample).sampling.request.num_top_logprobs > 0) {
    meta["input_top_logprobs"] = std::move(tops);
  }
}

OrderedJson NativeForm::meta_of(const GenerationState& state, const Sample& sample,
                                std::size_t first_token) const {
  const PromptPlan& plan = state.prompt_of(sample);
  const RequestOutput& output = sample.output;
  OrderedJson meta{{"id", plan.rid},
                   {"finish_reason", finish_of(sample)},
                   {"prompt_tokens", plan.ids.size()},
                   {"completion_tokens", sample.tokens.size()},
                   {"cached_tokens", output.cached_tokens},
                   {"reasoning_tokens", sample.text.num_reasoning_tokens()},
                   {"weight_version", weight_version_of(state, sample)},
                   {"num_retractions", output.num_preemptions},
                   {"e2e_latency", output.timing.total_s}};
  if (output.weight_spans.size() > 1) {
    OrderedJson spans = OrderedJson::array();
    for (const WeightSpan& span : output.weight_spans) {
      spans.push_back({{"first_token", span.first_token},
                       {"weight_version", state.service.loop.weight_label(span.version)}});
    }
    meta["weight_version_spans"] = std::move(spans);
  }
  if (!plan.sampling.request.want_logprobs) {
    return meta;
  }
  const Tokenizer& tokenizer = state.service.tokenizer;
  add_prompt_logprobs(meta, state, sample);
  OrderedJson logprobs = OrderedJson::array();
  OrderedJson tops = OrderedJson::array();
  for (std::size_t i = first_token; i < sample.tokens.size(); ++i) {
    const TokenEntry& token = sample.tokens[i];
    logprobs.push_back(entry_of(tokenizer, token.id, json_logprob(token.logprob)));
    tops.push_back(list_of(tokenizer, token.top));
  }
  meta["output_token_logprobs"] = std::move(logprobs);
  if (plan.sampling.request.num_top_logprobs > 0) {
    meta["output_top_logprobs"] = std::move(tops);
  }
  return meta;
}

OrderedJson NativeForm::object_of(const GenerationState& state, const Sample& sample) const {
  OrderedJson ids = OrderedJson::array();
  for (const TokenEntry& token : sample.tokens) {
    ids.push_back(token.id);
  }
  OrderedJson object{{"text", sample.total.content}, {"output_ids", std::move(ids)}};
  if (returns_prompt_ids_) {
    object["prompt_token_ids"] = state.prompt_of(sample).ids;
  }
  object["meta_info"] = meta_of(state, sample, 0);
  if (state.prompt_of(sample).sampling.request.want_routed_experts && sample.is_finished) {
    object["meta_info"]["routed_experts"] = base64_of(sample.output.routed_experts);
  }
  return object;
}

std::string NativeForm::whole(const GenerationState& state) {
  if (!is_list_) {
    return to_line(object_of(state, state.samples.front()));
  }
  OrderedJson list = OrderedJson::array();
  for (const Sample& sample : state.samples) {
    list.push_back(object_of(state, sample));
  }
  return to_line(list);
}

void NativeForm::advance(const GenerationState& state, const Sample& sample, const Delta& delta,
                         const Send& send) {
  OrderedJson object;
  if (streams_differences_) {
    tokens_sent_.resize(state.samples.size());
    std::size_t& sent = tokens_sent_[usize(sample.index)];
    object = {{"text", delta.content}, {"output_ids", delta.ids}};
    object["meta_info"] = meta_of(state, sample, sent);
    sent = sample.tokens.size();
  } else {
    object = object_of(state, sample);
  }
  if (is_list_) {
    object["index"] = sample.index;
  }
  send(to_line(object));
}

/// The value of a field that is one for all items, or a list with one for each.
const Json* item_value(const FieldReader& fields, std::string_view key, std::size_t item,
                       std::size_t num_items, bool is_batch) {
  const Json* value = fields.find(key);
  if (value == nullptr || !is_batch || !value->is_array()) {
    return value;
  }
  if (value->size() != num_items) {
    fields.reject(key, fmt::format("{} has {} entries: expected {}, one a prompt", key,
                                   value->size(), num_items));
    return nullptr;
  }
  const Json& entry = (*value)[item];
  return entry.is_null() ? nullptr : &entry;
}

/// Prompts of "text" or "input_ids".
std::vector<std::vector<std::int32_t>> read_prompts(const Service& service,
                                                    const FieldReader& fields,
                                                    NativeRequest& request) {
  std::vector<std::vector<std::int32_t>> prompts;
  const Json* ids = fields.find("input_ids");
  if (fields.has("text") == (ids != nullptr)) {
    fields.reject("text", "expected exactly one of text and input_ids");
    return prompts;
  }
  if (ids == nullptr) {
    request.is_batch = fields.find("text")->is_array();
    for (const std::string& text : fields.strings("text")) {
      prompts.push_back(service.tokenizer.encode(text));
    }
  } else if (ids->is_array() && !ids->empty() && ids->front().is_array()) {
    request.is_batch = true;
    for (std::size_t i = 0; i < ids->size(); ++i) {
      prompts.push_back(read_token_ids((*ids)[i], fmt::format("input_ids[{}]", i),
                                       service.limits.vocab_size, fields.problem()));
    }
  } else {
    prompts.push_back(fields.token_ids("input_ids", service.limits.vocab_size));
  }
  if (prompts.size() > kMaxItems) {
    fields.reject("text", fmt::format("expected at most {} prompts", kMaxItems));
  }
  const bool has_empty =
      prompts.empty() || std::ranges::any_of(prompts, [](const auto& p) { return p.empty(); });
  if (has_empty) {
    const std::string_view key = ids == nullptr ? "text" : "input_ids";
    fields.reject(key, fmt::format("{}: the prompt is empty", key));
  }
  return prompts;
}

NativeItem read_item(const Service& service, const FieldReader& fields,
                     std::vector<std::int32_t> ids, std::size_t index, std::size_t num_items,
                     bool is_batch) {
  NativeItem item;
  // This item's fields as an object of its own: the readers know objects only.
  Json own = Json::object();
  for (const std::string_view key :
       {"return_logprob", "logprob_start_len", "top_logprobs_num", "rid", "priority", "extra_key",
        "cache_salt", "return_routed_experts"}) {
    if (const Json* value = item_value(fields, key, index, num_items, is_batch)) {
      own[std::string(key)] = *value;
    }
  }
  const FieldReader reader(own, fields.problem());
  const Json* params = item_value(fields, "sampling_params", index, num_items, is_batch);
  const Json none = Json::object();
  if (params != nullptr && !params->is_object()) {
    fields.reject("sampling_params", "sampling_params: expected an object");
    params = nullptr;
  }
  item.plan.sampling = read_sampling(
      FieldReader(params == nullptr ? none : *params, fields.problem(), "sampling_params."),
      Endpoint::kGenerate, service.limits);
  Request& request = item.plan.sampling.request;
  request.want_logprobs = reader.boolean("return_logprob", false);
  request.num_top_logprobs = reader.integer("top_logprobs_num", 0, {0, 20});
  item.logprob_start = reader.integer("logprob_start_len", -1, {-1, isize(ids)});
  if (!request.want_logprobs) {
    item.logprob_start = -1;
    request.num_top_logprobs = 0;
  }
  request.prompt_logprobs_from = item.logprob_start < isize(ids) ? item.logprob_start : -1;
  request.want_routed_experts = reader.boolean("return_routed_experts", false);
  request.priority = static_cast<std::int32_t>(reader.integer("priority", 0, {-1000000, 1000000}));
  request.cache_salt = reader.string(reader.has("cache_salt") ? "cache_salt" : "extra_key");
  item.plan.rid = reader.string("rid");
  if (item.plan.rid.empty()) {
    item.plan.rid = random_id();
  }
  item.plan.max_new_tokens =
      fit_to_context(item.plan.sampling, isize(ids), service.limits,
                     fields.has("text") ? "text" : "input_ids", fields.problem());
  item.plan.ids = std::move(ids);
  return item;
}

NativeRequest read_native(const Service& service, const FieldReader& fields) {
  NativeRequest request;
  request.stream = fields.boolean("stream", false);
  request.returns_text = fields.boolean("return_text_in_logprobs", false);
  request.returns_prompt_ids = fields.boolean("return_prompt_token_ids", false);
  for (const std::string_view key : {"return_hidden_states", "token_ids_logprob", "image_data",
                                     "input_embeds", "lora_path", "session_params"}) {
    const Json* value = fields.find(key);
    if (value != nullptr && !is_nothing(*value)) {
      fields.reject(key, fmt::format("{} is not supported", key));
    }
  }
  auto prompts = read_prompts(service, fields, request);
  for (std::size_t i = 0; i < prompts.size() && !fields.problem(); ++i) {
    request.items.push_back(
        read_item(service, fields, std::move(prompts[i]), i, prompts.size(), request.is_batch));
  }
  return request;
}

}  // namespace

void handle_generate(Service& service, const std::shared_ptr<Exchange>& exchange) {
  Problem problem;
  const Json body = parse_body(exchange->request(), false, problem);
  NativeRequest request;
  if (!problem) {
    request = read_native(service, FieldReader(body, problem));
  }
  if (problem) {
    exchange->respond(error_response(problem.error()));
    return;
  }
  auto form = std::make_unique<NativeForm>(request, service.options.incremental_events);
  GenerationPlan plan{{}, request.stream};
  for (NativeItem& item : request.items) {
    plan.prompts.push_back(std::move(item.plan));
  }
  std::make_shared<Generation>(service, exchange, std::move(form), std::move(plan), random_id())
      ->start();
}

}  // namespace tandem::server
