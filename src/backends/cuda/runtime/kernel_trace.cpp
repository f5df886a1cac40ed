#include "backends/cuda/runtime/kernel_trace.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>

#include <cupti.h>
#include <cxxabi.h>
#include <dlfcn.h>

#include "core/error.h"

namespace tandem::cuda {
namespace {

constexpr std::uint32_t kMajor = CUPTI_API_VERSION / 10000;

/// The places of a CUDA toolkit, after those of the dynamic linker.
std::vector<std::string> library_paths() {
  const std::string file = fmt::format("libcupti.so.{}", kMajor);
  std::vector<std::string> roots;
  for (const char* variable : {"CUDA_HOME", "CUDA_PATH"}) {
    if (const char* root = std::getenv(variable); root != nullptr && *root != '\0') {
      roots.emplace_back(root);
    }
  }
  roots.emplace_back("/usr/local/cuda");
  roots.push_back(fmt::format("/usr/local/cuda-{}", kMajor));
  std::vector<std::string> paths{file, "libcupti.so"};
  for (const std::string& root : roots) {
    for (const char* folder : {"extras/CUPTI/lib64", "lib64", "lib", "targets/x86_64-linux/lib"}) {
      paths.push_back(fmt::format("{}/{}/{}", root, folder, file));
    }
  }
  return paths;
}

/// The functions of CUPTI that a trace needs.
struct Cupti {
  decltype(&cuptiGetVersion) get_version = nullptr;
  decltype(&cuptiGetResultString) get_result_string = nullptr;
  decltype(&cuptiGetCallbackName) get_callback_name = nullptr;
  decltype(&cuptiActivityRegisterCallbacks) register_callbacks = nullptr;
  decltype(&cuptiActivityEnable) enable = nullptr;
  decltype(&cuptiActivityDisable) disable = nullptr;
  decltype(&cuptiActivityFlushAll) flush_all = nullptr;
  decltype(&cuptiActivityGetNextRecord) get_next_record = nullptr;

  void check(CUptiResult result, const char* what) const {
    if (result != CUPTI_SUCCESS) {
      const char* text = nullptr;
      get_result_string(result, &text);
      throw_error("CUPTI: {}: {}", what, text != nullptr ? text : "an unknown error");
    }
  }
};

Cupti load_cupti() {
  const std::vector<std::string> paths = library_paths();
  void* library = nullptr;
  for (const std::string& path : paths) {
    library = library == nullptr ? dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL) : library;
  }
  if (library == nullptr) {
    throw_error(
        "a trace needs CUPTI, a part of the CUDA toolkit, which is not here; set CUDA_HOME or "
        "LD_LIBRARY_PATH. Tried: {}",
        fmt::join(paths, ", "));
  }
  Cupti cupti;
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    if (function == nullptr) {
      throw_error("CUPTI: the library here has no {}", name);
    }
  };
  find(cupti.get_version, "cuptiGetVersion");
  find(cupti.get_result_string, "cuptiGetResultString");
  find(cupti.get_callback_name, "cuptiGetCallbackName");
  find(cupti.register_callbacks, "cuptiActivityRegisterCallbacks");
  find(cupti.enable, "cuptiActivityEnable");
  find(cupti.disable, "cuptiActivityDisable");
  find(cupti.flush_all, "cuptiActivityFlushAll");
  find(cupti.get_next_record, "cuptiActivityGetNextRecord");
  std::uint32_t version = 0;
  cupti.check(cupti.get_version(&version), "asking for its version");
  if (version / 10000 != kMajor) {
    throw_error("CUPTI: the library here is version {}, expected {}.x", version, kMajor);
  }
  return cupti;
}

/// CUPTI gives its buffers to plain functions, so there is one recorder in the process.
class Recorder {
 public:
  Recorder() : cupti_(load_cupti()) {
    cupti_.check(cupti_.register_callbacks(request_buffer, complete_buffer),
                 "registering the buffers");
  }

  std::vector<TraceEvent> trace(const std::function<void()>& ops,
                                const std::function<void()>& wait) {
    for (const CUpti_ActivityKind kind : kDeviceKinds) {
      cupti_.check(cupti_.enable(kind), "starting a trace");
    }
    cupti_.check(cupti_.enable(kCalls), "starting a trace");
    take();  // what was left in the buffers is not of `ops`
    std::vector<TraceEvent> events;
    try {
      ops();
      cupti_.check(cupti_.disable(kCalls), "ending a trace of calls");
      wait();
      events = take();
    } catch (...) {
      static_cast<void>(cupti_.disable(kCalls));
      stop();
      throw;
    }
    stop();
    std::ranges::stable_sort(events, {}, &TraceEvent::start_ns);
    return events;
  }

  void read(const std::uint8_t* buffer, std::size_t bytes) {
    CUpti_Activity* record = nullptr;
    const std::lock_guard lock(mutex_);
    while (cupti_.get_next_record(const_cast<std::uint8_t*>(buffer), bytes, &record) ==
           CUPTI_SUCCESS) {
      add(*record);
    }
  }

 private:
  static constexpr std::array kDeviceKinds{CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL,
                                           CUPTI_ACTIVITY_KIND_MEMCPY, CUPTI_ACTIVITY_KIND_MEMSET};
  static constexpr CUpti_ActivityKind kCalls = CUPTI_ACTIVITY_KIND_RUNTIME;

  static void CUPTIAPI request_buffer(std::uint8_t** buffer, std::size_t* bytes,
                                      std::size_t* max_records);
  static void CUPTIAPI complete_buffer(CUcontext context, std::uint32_t stream,
                                       std::uint8_t* buffer, std::size_t bytes,
                                       std::size_t valid_bytes);

  std::vector<TraceEvent> take() {
    cupti_.check(cupti_.flush_all(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED), "collecting a trace");
    const std::lock_guard lock(mutex_);
    return std::exchange(events_, {});
  }
  void stop() {
    for (const CUpti_ActivityKind kind : kDeviceKinds) {
      static_cast<void>(cupti_.disable(kind));  // a kind that stays on costs time, nothing else
    }
  }

  void add(const CUpti_Activity& record) {
    using Kind = TraceEvent::Kind;
    const auto append = [&](Kind kind, std::string name, const auto& activity,
                            std::uint64_t bytes) {
      events_.push_back({kind, std::move(name), static_cast<std::int64_t>(activity.start),
                         static_cast<std::int64_t>(activity.end),
                         static_cast<std::int64_t>(bytes)});
    };
    switch (record.kind) {
      case CUPTI_ACTIVITY_KIND_KERNEL:
      case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL: {
        const auto& kernel = reinterpret_cast<const CUpti_ActivityKernel10&>(record);
        append(Kind::kKernel, short_kernel_name(kernel.name), kernel, 0);
        break;
      }
      case CUPTI_ACTIVITY_KIND_MEMCPY: {
        const auto& copy = reinterpret_cast<const CUpti_ActivityMemcpy6&>(record);
        append(Kind::kCopy, copy_name(copy.copyKind), copy, copy.bytes);
        break;
      }
      case CUPTI_ACTIVITY_KIND_MEMSET: {
        const auto& fill = reinterpret_cast<const CUpti_ActivityMemset4&>(record);
        append(Kind::kFill, "fill", fill, fill.bytes);
        break;
      }
      case CUPTI_ACTIVITY_KIND_RUNTIME: {
        const auto& call = reinterpret_cast<const CUpti_ActivityAPI&>(record);
        const char* name = nullptr;
        cupti_.get_callback_name(CUPTI_CB_DOMAIN_RUNTIME_API, call.cbid, &name);
        append(Kind::kCall, call_name(name), call, 0);
        break;
      }
      default:
        break;
    }
  }

  static std::string copy_name(std::uint8_t kind) {
    switch (kind) {
      case CUPTI_ACTIVITY_MEMCPY_KIND_HTOD:
        return "copy to the device";
      case CUPTI_ACTIVITY_MEMCPY_KIND_DTOH:
        return "copy to the host";
      default:
        return "copy";
    }
  }
  /// "cudaGraphLaunch" of "cudaGraphLaunch_v10000".
  static std::string call_name(const char* name) {
    const std::string full = name != nullptr ? name : "unknown call";
    return full.substr(0, full.find("_v"));
  }

  Cupti cupti_;
  std::mutex mutex_;  // CUPTI may give back a buffer in a thread of its own
  std::vector<TraceEvent> events_;
};

/// Never destroyed: CUPTI may give back a buffer while the process ends.
Recorder& recorder() {
  static Recorder& instance = *new Recorder;
  return instance;
}

constexpr std::size_t kBufferBytes = std::size_t{8} << 20;

void CUPTIAPI Recorder::request_buffer(std::uint8_t** buffer, std::size_t* bytes,
                                       std::size_t* max_records) {
  *buffer = static_cast<std::uint8_t*>(std::aligned_alloc(8, kBufferBytes));
  *bytes = *buffer != nullptr ? kBufferBytes : 0;
  *max_records = 0;  // as many as fit
}

void CUPTIAPI Recorder::complete_buffer(CUcontext /*context*/, std::uint32_t /*stream*/,
                                        std::uint8_t* buffer, std::size_t /*bytes*/,
                                        std::size_t valid_bytes) {
  if (valid_bytes > 0) {
    recorder().read(buffer, valid_bytes);
  }
  std::free(buffer);
}

void erase_all(std::string& text, std::string_view part) {
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at)) {
    text.erase(at, part.size());
  }
}

}  // namespace

std::vector<TraceEvent> trace_activity(const std::function<void()>& ops,
                                       const std::function<void()>& wait) {
  return recorder().trace(ops, wait);
}

std::string short_kernel_name(const char* symbol) {
  if (symbol == nullptr) {
    return "unknown kernel";
  }
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> demangled(
      abi::__cxa_demangle(symbol, nullptr, nullptr, &status), &std::free);
  std::string name = demangled != nullptr ? demangled.get() : symbol;
  for (const std::string_view part :
       {"(anonymous namespace)::", "tandem::cuda::", "tandem::", "void "}) {
    erase_all(name, part);
  }
  // The parameters are the last parentheses that stand outside template arguments.
  int angles = 0;
  for (std::size_t at = 0; at < name.size(); ++at) {
    angles += name[at] == '<' ? 1 : name[at] == '>' ? -1 : 0;
    if (name[at] == '(' && angles == 0) {
      name.resize(at);
    }
  }
  return name;
}

}  // namespace tandem::cuda
