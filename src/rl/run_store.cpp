// run_store.cpp — the only file that knows SQLite.
#include "rl/run_store.h"

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <span>
#include <string_view>
#include <type_traits>
#include <utility>

#include <fcntl.h>
#include <sqlite3.h>
#include <sys/file.h>
#include <unistd.h>

#include "core/check.h"
#include "core/checked_cast.h"
#include "io/lines.h"
#include "rl/metrics.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

/// "TDMR": tells our files from other programs' databases.
constexpr std::int64_t kApplicationId = 0x54444D52;
constexpr std::int64_t kSchemaVersion = 1;
constexpr int kBusyTimeoutMs = 10'000;

constexpr const char* kSchema = R"sql(
CREATE TABLE run (
  id INTEGER PRIMARY KEY CHECK (id = 1), name TEXT NOT NULL, config TEXT NOT NULL,
  seeds TEXT NOT NULL, versions TEXT NOT NULL);
CREATE TABLE steps (step INTEGER PRIMARY KEY, metrics TEXT NOT NULL);
CREATE TABLE samples (
  step INTEGER NOT NULL REFERENCES steps(step) ON DELETE CASCADE,
  split TEXT NOT NULL, group_index INTEGER NOT NULL, sample_index INTEGER NOT NULL,
  prompt TEXT NOT NULL, response TEXT NOT NULL, label TEXT NOT NULL,
  tokens BLOB NOT NULL,     -- int32 little-endian, prompt + response
  logprobs BLOB NOT NULL,   -- float32 little-endian, response
  loss_mask BLOB NOT NULL,  -- one byte a response token
  reward REAL, status TEXT NOT NULL, grade TEXT NOT NULL, weight_version INTEGER NOT NULL,
  PRIMARY KEY (step, split, group_index, sample_index));
CREATE TABLE evals (
  step INTEGER NOT NULL REFERENCES steps(step) ON DELETE CASCADE,
  name TEXT NOT NULL, accuracy REAL NOT NULL, num_samples INTEGER NOT NULL,
  PRIMARY KEY (step, name));
)sql";

/// A connection. Throws Error with a message for people.
class Database {
 public:
  Database(const std::string& path, int flags) : path_(path) {
    const int code = sqlite3_open_v2(path.c_str(), &db_, flags, nullptr);
    if (code != SQLITE_OK) {
      const std::string message = describe(code);
      sqlite3_close(db_);
      throw Error(message);
    }
    sqlite3_extended_result_codes(db_, 1);
    sqlite3_busy_timeout(db_, kBusyTimeoutMs);
  }
  Database(const Database&) = delete;
  Database& operator=(const Database&) = delete;
  ~Database() { sqlite3_close(db_); }

  void execute(const char* sql) { check(sqlite3_exec(db_, sql, nullptr, nullptr, nullptr)); }

  void check(int code) const {
    if (code != SQLITE_OK && code != SQLITE_ROW && code != SQLITE_DONE) {
      throw Error(describe(code));
    }
  }

  [[nodiscard]] bool in_transaction() const { return sqlite3_get_autocommit(db_) == 0; }
  [[nodiscard]] sqlite3* handle() const { return db_; }
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  [[nodiscard]] std::string describe(int code) const {
    switch (code & 0xFF) {
      case SQLITE_FULL:
        return fmt::format(
            "{}: the disk is full; free space and continue with --resume, only the "
            "step in flight is lost",
            path_);
      case SQLITE_NOTADB:
        return fmt::format("{}: not a run store (not an SQLite database)", path_);
      case SQLITE_CORRUPT:
        return fmt::format("{}: the run store is damaged ({}); restore it from a copy", path_,
                           sqlite3_errmsg(db_));
      case SQLITE_BUSY:
        return fmt::format("{}: in use by another process", path_);
      case SQLITE_CANTOPEN:
        return fmt::format("{}: cannot open the run store", path_);
      default:
        return fmt::format("{}: {} (SQLite code {})", path_, sqlite3_errmsg(db_), code);
    }
  }

  std::string path_;
  sqlite3* db_ = nullptr;
};

/// A prepared statement: bind in order, step, read columns in order.
class Statement {
 public:
  Statement(const Database& db, const char* sql) : db_(db) {
    db_.check(sqlite3_prepare_v2(db.handle(), sql, -1, &statement_, nullptr));
  }
  Statement(const Statement&) = delete;
  Statement& operator=(const Statement&) = delete;
  ~Statement() { sqlite3_finalize(statement_); }

  template <typename... Values>
  Statement& bind(const Values&... values) {
    db_.check(sqlite3_reset(statement_));
    int index = 0;
    (bind_one(++index, values), ...);
    return *this;
  }

  /// False when there are no more rows.
  bool step() {
    const int code = sqlite3_step(statement_);
    db_.check(code);
    return code == SQLITE_ROW;
  }
  /// Runs a statement that returns no rows, and lets go of what was bound.
  void run() {
    while (step()) {
    }
    db_.check(sqlite3_reset(statement_));
  }

  [[nodiscard]] bool is_null(int column) const {
    return sqlite3_column_type(statement_, column) == SQLITE_NULL;
  }
  [[nodiscard]] std::int64_t integer(int column) const {
    return sqlite3_column_int64(statement_, column);
  }
  [[nodiscard]] double real(int column) const { return sqlite3_column_double(statement_, column); }
  [[nodiscard]] std::string text(int column) const {
    const auto bytes = blob<char>(column);
    return {bytes.begin(), bytes.end()};
  }
  template <typename T>
  [[nodiscard]] std::vector<T> blob(int column) const {
    const void* data = sqlite3_column_blob(statement_, column);
    const auto num_bytes = usize(sqlite3_column_bytes(statement_, column));
    std::vector<T> values(num_bytes / sizeof(T));
    if (!values.empty()) {
      std::memcpy(values.data(), data, values.size() * sizeof(T));
    }
    return values;
  }

 private:
  // SQLITE_STATIC: the bound values outlive the step that follows.
  void bind_one(int index, std::int64_t value) {
    db_.check(sqlite3_bind_int64(statement_, index, value));
  }
  void bind_one(int index, double value) {
    db_.check(sqlite3_bind_double(statement_, index, value));
  }
  void bind_one(int index, const std::optional<double>& value) {
    db_.check(value ? sqlite3_bind_double(statement_, index, *value)
                    : sqlite3_bind_null(statement_, index));
  }
  void bind_one(int index, const std::string& value) {
    db_.check(sqlite3_bind_text64(statement_, index, value.data(), value.size(), SQLITE_STATIC,
                                  SQLITE_UTF8));
  }
  template <typename T>
  void bind_one(int index, const std::vector<T>& values) {
    static_assert(std::is_trivially_copyable_v<T>);
    // An empty vector's null data() would bind NULL.
    const void* data = values.empty() ? static_cast<const void*>("") : values.data();
    db_.check(
        sqlite3_bind_blob64(statement_, index, data, values.size() * sizeof(T), SQLITE_STATIC));
  }

  const Database& db_;
  sqlite3_stmt* statement_ = nullptr;
};

/// Rolls back unless commit() was reached.
class Transaction {
 public:
  explicit Transaction(Database& db) : db_(db) { db_.execute("BEGIN IMMEDIATE"); }
  Transaction(const Transaction&) = delete;
  Transaction& operator=(const Transaction&) = delete;
  ~Transaction() {
    if (db_.in_transaction()) {  // SQLite itself has rolled back after some disk errors
      sqlite3_exec(db_.handle(), "ROLLBACK", nullptr, nullptr, nullptr);
    }
  }
  void commit() { db_.execute("COMMIT"); }

 private:
  Database& db_;
};

/// The writer's lock on a run's folder; the kernel drops it when the process dies.
class RunLock {
 public:
  explicit RunLock(const std::string& dir)
      : fd_(::open((dir + "/run.lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644)) {
    if (fd_ < 0) {
      throw_error("{}/run.lock: cannot open: {}", dir, std::strerror(errno));
    }
    if (::flock(fd_, LOCK_EX | LOCK_NB) != 0) {
      ::close(fd_);
      throw_error("{}: another process is writing this run", dir);
    }
  }
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;
  ~RunLock() { ::close(fd_); }

 private:
  int fd_;
};

std::int64_t query_integer(const Database& db, const char* sql) {
  Statement statement(db, sql);
  TDM_CHECK(statement.step());
  return statement.integer(0);
}

std::string database_path(const std::string& dir) {
  return dir + "/run.sqlite";
}

void check_is_ours(const Database& db) {
  if (query_integer(db, "PRAGMA application_id") != kApplicationId) {
    throw_error("{}: an SQLite database, but not a run store of tandem", db.path());
  }
  const std::int64_t version = query_integer(db, "PRAGMA user_version");
  if (version != kSchemaVersion) {
    throw_error("{}: run store version {}, this program reads version {}", db.path(), version,
                kSchemaVersion);
  }
}

void check_is_intact(const Database& db) {
  Statement statement(db, "PRAGMA quick_check(1)");
  if (!statement.step() || statement.text(0) != "ok") {
    throw_error("{}: the run store is damaged; restore it from a copy", db.path());
  }
}

}  // namespace

class RunStore::Impl {
 public:
  Impl(const std::string& dir, int flags, bool is_writer)
      : dir_(dir),
        lock_(is_writer ? std::make_unique<RunLock>(dir) : nullptr),
        db_(database_path(dir), flags) {
    db_.execute("PRAGMA foreign_keys = ON");
    db_.execute("PRAGMA synchronous = FULL");
  }

  void create_schema(const RunInfo& info) {
    Transaction transaction(db_);
    db_.execute(fmt::format("PRAGMA application_id = {}", kApplicationId).c_str());
    db_.execute(fmt::format("PRAGMA user_version = {}", kSchemaVersion).c_str());
    db_.execute(kSchema);
    Statement(db_, "INSERT INTO run VALUES (1, ?, ?, ?, ?)")
        .bind(info.name, info.config, info.seeds, info.versions)
        .run();
    transaction.commit();
  }

  void commit(const StepRecord& record) {
    Transaction transaction(db_);
    Statement(db_, "INSERT INTO steps VALUES (?, ?)").bind(record.step, record.metrics_json).run();
    Statement insert_sample(
        db_, "INSERT INTO samples VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)");
    for (const SampleRecord& s : record.samples) {
      TDM_CHECK(s.loss_mask.size() == s.logprobs.size(), s.loss_mask.size(), s.logprobs.size());
      TDM_CHECK(s.loss_mask.size() <= s.tokens.size(), s.loss_mask.size(), s.tokens.size());
      insert_sample
          .bind(record.step, s.split, s.group_index, s.sample_index, s.prompt, s.response, s.label,
                s.tokens, s.logprobs, s.loss_mask, s.reward, s.status, s.grade, s.weight_version)
          .run();
    }
    Statement insert_eval(db_, "INSERT INTO evals VALUES (?, ?, ?, ?)");
    for (const EvalRecord& eval : record.evals) {
      insert_eval.bind(record.step, eval.name, eval.accuracy, eval.num_samples).run();
    }
    transaction.commit();
    append_line(metrics_path(), record.metrics_json);
  }

  void truncate_after(std::int64_t step) {
    Transaction transaction(db_);
    Statement(db_, "DELETE FROM steps WHERE step > ?").bind(step).run();
    transaction.commit();
    repair_metrics();
  }

  void repair_metrics() { rewrite_lines(metrics_path(), metrics_lines()); }

  [[nodiscard]] std::vector<std::string> metrics_lines() const {
    std::vector<std::string> lines;
    Statement query(db_, "SELECT metrics FROM steps ORDER BY step");
    while (query.step()) {
      lines.push_back(query.text(0));
    }
    return lines;
  }

  [[nodiscard]] const Database& db() const { return db_; }
  [[nodiscard]] bool is_writer() const { return lock_ != nullptr; }

 private:
  [[nodiscard]] std::string metrics_path() const { return dir_ + "/metrics.jsonl"; }

  std::string dir_;
  std::unique_ptr<RunLock> lock_;
  Database db_;
};

RunStore::RunStore(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
RunStore::RunStore(RunStore&&) noexcept = default;
RunStore& RunStore::operator=(RunStore&&) noexcept = default;
RunStore::~RunStore() = default;

Expected<RunStore> RunStore::create(const std::string& dir, const RunInfo& info) {
  try {
    std::error_code error;
    fs::create_directories(dir, error);
    if (error) {
      return fail("{}: cannot create the run's folder: {}", dir, error.message());
    }
    // An empty file is a run killed before its first byte was durable: nothing to protect.
    if (fs::exists(database_path(dir)) && fs::file_size(database_path(dir)) > 0) {
      return fail("{}: already holds a run; choose another run.name or continue with --resume",
                  dir);
    }
    auto impl = std::make_unique<Impl>(dir, SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE, true);
    impl->create_schema(info);
    impl->repair_metrics();
    return RunStore(std::move(impl));
  } catch (const Error& error) {
    return Failure{error.what()};
  }
}

Expected<RunStore> RunStore::open(const std::string& dir) {
  try {
    if (!fs::exists(database_path(dir))) {
      return fail("{}: no run here (run.sqlite is missing)", dir);
    }
    auto impl = std::make_unique<Impl>(dir, SQLITE_OPEN_READWRITE, true);
    check_is_ours(impl->db());
    check_is_intact(impl->db());
    impl->repair_metrics();
    return RunStore(std::move(impl));
  } catch (const Error& error) {
    return Failure{error.what()};
  }
}

Expected<RunStore> RunStore::open_read_only(const std::string& dir) {
  try {
    if (!fs::exists(database_path(dir))) {
      return fail("{}: no run here (run.sqlite is missing)", dir);
    }
    // Not SQLITE_OPEN_READONLY: the journal of a killed run must be rolled back by whoever opens it
    // next.
    auto impl = std::make_unique<Impl>(dir, SQLITE_OPEN_READWRITE, false);
    check_is_ours(impl->db());
    return RunStore(std::move(impl));
  } catch (const Error& error) {
    return Failure{error.what()};
  }
}

RunInfo RunStore::info() const {
  Statement query(impl_->db(), "SELECT name, config, seeds, versions FROM run");
  if (!query.step()) {
    throw_error("{}: the run store has no run", impl_->db().path());
  }
  return {query.text(0), query.text(1), query.text(2), query.text(3)};
}

void RunStore::commit_step(const StepRecord& record) {
  TDM_CHECK(impl_->is_writer());
  const std::optional<std::int64_t> last = last_step();
  TDM_CHECK(!last || record.step > *last, record.step, *last);
  impl_->commit(record);
}

void RunStore::truncate_after(std::int64_t step) {
  TDM_CHECK(impl_->is_writer());
  impl_->truncate_after(step);
}

std::optional<std::int64_t> RunStore::last_step() const {
  Statement query(impl_->db(), "SELECT max(step) FROM steps");
  return query.step() && !query.is_null(0) ? std::optional(query.integer(0)) : std::nullopt;
}

std::vector<std::string> RunStore::metrics_lines() const {
  return impl_->metrics_lines();
}

std::vector<StepEval> RunStore::evals() const {
  std::vector<StepEval> out;
  Statement query(impl_->db(), "SELECT step, name, accuracy, num_samples FROM evals ORDER BY 1, 2");
  while (query.step()) {
    out.push_back({query.integer(0), {query.text(1), query.real(2), query.integer(3)}});
  }
  return out;
}

std::vector<SampleRecord> RunStore::samples(std::int64_t step, const std::string& split,
                                            std::int64_t limit) const {
  std::vector<SampleRecord> out;
  Statement query(impl_->db(),
                  "SELECT group_index, sample_index, prompt, response, label, tokens, logprobs, "
                  "loss_mask, reward, status, grade, weight_version FROM samples "
                  "WHERE step = ? AND split = ? ORDER BY group_index, sample_index LIMIT ?");
  query.bind(step, split, limit);
  while (query.step()) {
    SampleRecord s;
    s.split = split;
    s.group_index = query.integer(0);
    s.sample_index = query.integer(1);
    s.prompt = query.text(2);
    s.response = query.text(3);
    s.label = query.text(4);
    s.tokens = query.blob<std::int32_t>(5);
    s.logprobs = query.blob<float>(6);
    s.loss_mask = query.blob<std::uint8_t>(7);
    s.reward = query.is_null(8) ? std::nullopt : std::optional(query.real(8));
    s.status = query.text(9);
    s.grade = query.text(10);
    s.weight_version = query.integer(11);
    out.push_back(std::move(s));
  }
  return out;
}

std::vector<std::int64_t> RunStore::sampled_steps(const std::string& split) const {
  std::vector<std::int64_t> steps;
  Statement query(impl_->db(), "SELECT DISTINCT step FROM samples WHERE split = ? ORDER BY step");
  query.bind(split);
  while (query.step()) {
    steps.push_back(query.integer(0));
  }
  return steps;
}

}  // namespace tandem
