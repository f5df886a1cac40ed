#include "server/api/service.h"

#include <chrono>
#include <random>

#include <fmt/format.h>

namespace tandem::server {

Service::Service(EngineLoop& engine_loop, const Tokenizer& text_tokenizer, ModelLoader model_loader,
                 ServiceOptions service_options, ModelLimits model_limits)
    : loop(engine_loop),
      tokenizer(text_tokenizer),
      loader(std::move(model_loader)),
      options(std::move(service_options)),
      limits(model_limits),
      chat_template(make_chat_template(text_tokenizer)),
      start_time(unix_time()),
      grammars(tokenizer, worker, metrics) {}

std::int64_t unix_time() {
  return std::chrono::duration_cast<std::chrono::seconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

std::uint64_t random_seed() {
  std::random_device random;
  return (static_cast<std::uint64_t>(random()) << 32) | random();
}

std::string random_id() {
  return fmt::format("{:016x}{:08x}", random_seed(), random_seed() >> 32);
}

void check_model_name(const Service& service, const FieldReader& fields) {
  const std::string name = fields.string("model");
  const std::string& served = service.options.served_name;
  const std::string last = served.substr(served.rfind('/') + 1);
  if (!service.options.any_model_name && !name.empty() && name != served && name != last &&
      name != "default") {
    fields.problem().set({404, "model_not_found",
                          fmt::format("there is no model \"{}\" here, only \"{}\"", name, served),
                          "model"});
  }
}

}  // namespace tandem::server
