// prefix_snapshot_test.cpp — a prefix cache that went through a file serves the bits it served
// before, and what is not exactly such a file is refused as a whole.
#include "engine/cache/prefix_snapshot.h"

#include <gmock/gmock.h>

#include "snapshot_rig.h"

namespace tandem::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// Conversations and branches, with and without salts, that leave several checkpoints on a path.
std::vector<Request> requests_with_shared_prefixes() {
  const std::vector<std::int32_t> shared = random_tokens(21, 3);
  std::vector<Request> requests;
  for (std::uint64_t i = 0; i < 4; ++i) {
    requests.push_back(cacheable_request(longer(shared, 12 + 5 * std::int64_t(i), i), 9, i));
  }
  for (const char* text : {"a", "b"}) {
    requests.push_back(requests[0]);
    requests.back().cache_salt = text;
  }
  requests.push_back(cacheable_request(random_tokens(40, 8), 3, 7));
  return requests;
}

std::vector<std::int64_t> run_all(Rig& rig, Engine& engine, const std::vector<Request>& requests) {
  std::vector<std::int64_t> cached_tokens;
  for (const Request& request : requests) {
    const RequestOutput output = run_one(engine, request);
    EXPECT_TRUE(same_output(output, expected_output(rig, request)));
    cached_tokens.push_back(output.cached_tokens);
  }
  return cached_tokens;
}

EngineOptions roomy_options() {
  EngineOptions options = cached_options();
  options.num_checkpoint_slots = 40;
  return options;
}

/// The smallest cache worth the name: two blocks, the second with a checkpoint.
std::vector<std::byte> small_snapshot(Rig& rig) {
  const auto engine = rig.engine(cached_options());
  Request request = cacheable_request(random_tokens(17, 1), 1, 1);
  request.cache_salt = "s";
  run_one(*engine, request);
  return saved(*engine);
}

void expect_empty(const Engine& engine) {
  engine.check_integrity();
  ASSERT_EQ(engine.stats().num_cached_pages, 0);
  ASSERT_EQ(engine.stats().num_checkpoints, 0);
  ASSERT_EQ(engine.stats().num_free_pages, engine.memory_plan().num_pages);
}

TEST(PrefixSnapshot, AnotherEngineResumesWhereTheFirstWould) {
  Rig rig;
  const std::vector<Request> requests = requests_with_shared_prefixes();
  const auto first = rig.engine(roomy_options());
  run_all(rig, *first, requests);
  const std::vector<std::byte> bytes = saved(*first);
  const EngineStats before = first->stats();
  ASSERT_GT(before.num_checkpoints, 10);

  const auto second = rig.engine(roomy_options());
  const auto loaded = load(*second, bytes);
  ASSERT_TRUE(loaded.ok()) << loaded.message();
  EXPECT_EQ(loaded->loaded, loaded->found);
  EXPECT_EQ(loaded->loaded.checkpoints, before.num_checkpoints);
  EXPECT_EQ(second->stats().num_cached_pages, before.num_cached_pages);
  EXPECT_EQ(second->stats().num_checkpoints, before.num_checkpoints);
  expect_idle_and_empty(*second);
  EXPECT_EQ(saved(*second), bytes) << "the same tree, in the same order of use";

  const std::vector<std::int64_t> warm = run_all(rig, *second, requests);
  EXPECT_EQ(warm, run_all(rig, *first, requests));
  EXPECT_THAT(warm, ::testing::Each(::testing::Gt(20)));
  EXPECT_EQ(saved(*second), saved(*first)) << "they also go on alike";
  expect_idle_and_empty(*second);
}

TEST(PrefixSnapshot, AnEmptyCacheIsSavedToo) {
  Rig rig;
  const auto engine = rig.engine(cached_options());
  const auto loaded = load(*rig.engine(cached_options()), saved(*engine));
  ASSERT_TRUE(loaded.ok()) << loaded.message();
  EXPECT_EQ(loaded->found, SnapshotCounts());
  EngineOptions off = cached_options();
  off.prefix_cache = false;
  const auto without = rig.engine(off);
  EXPECT_TRUE(load(*without, saved(*without)).ok());
}

TEST(PrefixSnapshot, MayBeSavedWhileRequestsRun) {
  Rig rig;
  const auto engine = rig.engine(roomy_options());
  std::vector<RequestId> ids;
  const std::vector<Request> requests = requests_with_shared_prefixes();
  for (const Request& request : requests) {
    ids.push_back(engine->submit(request).value_or_throw());
  }
  while (engine->has_work()) {
    engine->step();
    const std::vector<std::byte> bytes = saved(*engine);
    engine->check_integrity();
    const auto other = rig.engine(roomy_options());
    const auto loaded = load(*other, bytes);
    ASSERT_TRUE(loaded.ok()) << loaded.message();
    EXPECT_EQ(loaded->loaded.checkpoints, engine->stats().num_checkpoints);
    other->check_integrity();
  }
  for (std::size_t i = 0; i < ids.size(); ++i) {
    EXPECT_TRUE(same_output(engine->take_output(ids[i]).value_or_throw(),
                            expected_output(rig, requests[i])));
  }
}

TEST(PrefixSnapshot, WhatWasUsedLastComesIntoSmallerPools) {
  Rig rig;
  const auto first = rig.engine(roomy_options());
  std::vector<Request> requests;
  for (std::uint64_t i = 0; i < 6; ++i) {
    requests.push_back(cacheable_request(random_tokens(17, 50 + i), 1, i));  // 2 blocks each
  }
  run_all(rig, *first, requests);
  run_one(*first, requests[1]);  // the order of use is 1, 5, 4, 3, 2, 0
  const std::vector<std::byte> bytes = saved(*first);
  for (std::int64_t slots = 1; slots <= 7; ++slots) {
    EngineOptions options = cached_options();
    options.num_checkpoint_slots = slots;
    const auto engine = rig.engine(options);
    const auto loaded = load(*engine, bytes);
    ASSERT_TRUE(loaded.ok()) << loaded.message();
    EXPECT_EQ(loaded->found, (SnapshotCounts{12, 6}));
    const std::int64_t most = std::min<std::int64_t>(slots, 6);
    EXPECT_EQ(loaded->loaded, (SnapshotCounts{2 * most, most}));
    expect_idle_and_empty(*engine);
    const std::vector<std::size_t> by_use{1, 5, 4, 3, 2, 0};
    for (std::size_t i = 0; i < usize(most); ++i) {
      EXPECT_EQ(run_one(*engine, requests[by_use[i]]).cached_tokens, 16) << slots << " " << i;
    }
  }
  EngineOptions options = cached_options();
  options.max_seq_len = 20;
  options.num_pages = 15;  // three of the six and a half
  options.num_checkpoint_slots = 6;
  const auto engine = rig.engine(options);
  EXPECT_EQ(load(*engine, bytes).value_or_throw().loaded, (SnapshotCounts{6, 3}));
  expect_idle_and_empty(*engine);
  run_all(rig, *engine, requests);  // evicts what it has to
  expect_idle_and_empty(*engine);
}

TEST(PrefixSnapshot, AShorterPathThatFitsComesInsteadOfALongerOne) {
  Rig rig;
  const auto first = rig.engine(roomy_options());
  const std::vector<std::int32_t> prompt = random_tokens(81, 4);
  for (const std::size_t size : {std::size_t{25}, prompt.size()}) {
    run_one(*first, cacheable_request(
                        {prompt.begin(), prompt.begin() + static_cast<std::ptrdiff_t>(size)}, 1));
  }
  EngineOptions options = cached_options();
  options.max_seq_len = 40;
  options.num_pages = 12;
  const auto engine = rig.engine(options);
  const auto loaded = load(*engine, saved(*first));
  ASSERT_TRUE(loaded.ok()) << loaded.message();
  EXPECT_EQ(loaded->found, (SnapshotCounts{10, 2}));
  EXPECT_EQ(loaded->loaded, (SnapshotCounts{3, 1}));
  const Request request = cacheable_request({prompt.begin(), prompt.begin() + 30}, 2);
  const RequestOutput output = run_one(*engine, request);
  EXPECT_EQ(output.cached_tokens, 24);
  EXPECT_TRUE(same_output(output, expected_output(rig, request)));
}

TEST(PrefixSnapshot, AnyFlippedByteIsFound) {
  Rig rig;
  const std::vector<std::byte> good = small_snapshot(rig);
  const auto engine = rig.engine(cached_options());
  for (std::size_t i = 0; i < good.size(); ++i) {
    for (const int flip : {0x01, 0x80, 0xFF}) {
      std::vector<std::byte> bad = good;
      bad[i] ^= static_cast<std::byte>(flip);
      const auto loaded = load(*engine, bad);
      ASSERT_FALSE(loaded.ok()) << "byte " << i << " of " << good.size();
      ASSERT_FALSE(loaded.message().empty());
      expect_empty(*engine);
    }
  }
  const auto loaded = load(*engine, good);
  ASSERT_TRUE(loaded.ok()) << loaded.message();
  EXPECT_EQ(loaded->loaded, (SnapshotCounts{2, 1}));
}

TEST(PrefixSnapshot, AnyOtherLengthIsFound) {
  Rig rig;
  const std::vector<std::byte> good = small_snapshot(rig);
  const auto engine = rig.engine(cached_options());
  for (std::size_t size = 0; size < good.size() + 3; ++size) {
    std::vector<std::byte> bad = good;
    bad.resize(size);
    if (size != good.size()) {
      ASSERT_FALSE(load(*engine, bad).ok()) << size << " of " << good.size();
      expect_empty(*engine);
    }
  }
}

TEST(PrefixSnapshot, RecordsOfAnotherSnapshotAreFound) {
  Rig rig;
  const auto bytes_of = [&](std::uint64_t key) {
    const auto engine = rig.engine(cached_options());
    run_one(*engine, cacheable_request(random_tokens(17, key), 1, 1));
    return saved(*engine);
  };
  std::vector<std::byte> mixed = bytes_of(1);
  const std::vector<std::byte> other = bytes_of(2);
  ASSERT_EQ(mixed.size(), other.size());
  const std::ptrdiff_t half = isize(mixed) - 200;
  std::copy(other.begin() + half, other.end(), mixed.begin() + half);
  const auto engine = rig.engine(cached_options());
  EXPECT_THAT(load(*engine, mixed).message(), HasSubstr("checksum"));
  expect_empty(*engine);
}

TEST(PrefixSnapshot, WhatDiffersIsNamed) {
  Rig rig;
  const std::vector<std::byte> bytes = small_snapshot(rig);
  const auto engine = rig.engine(cached_options());
  MemoryReader reader(bytes);
  EXPECT_THAT(
      engine->load_prefix_cache({{"weights", "2"}, {"device", "a machine"}}, reader).message(),
      AllOf(HasSubstr("saved with 'weights 1'"), HasSubstr("expected 'weights 2'")));
  MemoryReader shorter(bytes);
  EXPECT_FALSE(engine->load_prefix_cache({{"weights", "1"}}, shorter).ok());
  expect_empty(*engine);

  const auto refusal = [&](const EngineOptions& options) {
    return load(*rig.engine(options), bytes).message();
  };
  EngineOptions options = cached_options();
  options.page_size = 8;
  EXPECT_THAT(refusal(options), HasSubstr("expected 'page_size 8'"));
  options = cached_options();
  options.checkpoint_tokens = 16;
  EXPECT_THAT(refusal(options), HasSubstr("expected 'block_tokens 16'"));
  options.prefix_cache = false;
  EXPECT_THAT(refusal(options), HasSubstr("expected 'block_tokens 0'"));

  std::vector<std::byte> newer = bytes;
  newer[8] = std::byte{9};
  EXPECT_THAT(load(*engine, newer).message(), HasSubstr("format version is 9: expected 1"));
  EXPECT_THAT(load(*engine, std::vector<std::byte>(100)).message(),
              HasSubstr("not a saved prefix cache"));
}

TEST(PrefixSnapshot, FailuresOfTheDiskLeaveTheEngineAsItWas) {
  Rig rig;
  const auto first = rig.engine(cached_options());
  const Request request = cacheable_request(random_tokens(33, 1), 2, 1);
  run_one(*first, request);
  MemoryWriter whole;
  (void)first->save_prefix_cache(test_key(), whole);
  for (std::int64_t n = 0; n < whole.num_writes(); ++n) {
    MemoryWriter writer;
    writer.throw_at = n;
    EXPECT_THROW((void)first->save_prefix_cache(test_key(), writer), Error);
    first->check_integrity();
  }
  EXPECT_EQ(run_one(*first, request).cached_tokens, 32);

  const auto second = rig.engine(cached_options());
  for (std::int64_t n = 0;; ++n) {
    MemoryReader reader(whole.bytes());
    reader.fail_at = n;
    const auto loaded = second->load_prefix_cache(test_key(), reader);
    if (loaded.ok()) {
      EXPECT_EQ(n, reader.num_reads());
      EXPECT_GT(n, 5);
      break;
    }
    EXPECT_EQ(loaded.message(), "the disk is gone");
    expect_empty(*second);
  }
  EXPECT_EQ(run_one(*second, request).cached_tokens, 32);
}

TEST(PrefixSnapshot, IsWrittenInPieces) {
  Rig rig;
  const auto engine = rig.engine(roomy_options());
  run_all(rig, *engine, requests_with_shared_prefixes());
  MemoryWriter writer;
  const SnapshotCounts counts = engine->save_prefix_cache(test_key(), writer);
  // Of the records the largest is that of a block: its tokens' rows in all layers and a checksum.
  const std::int64_t table = 64 + counts.blocks * (12 + 8 * 4);
  EXPECT_LE(writer.largest(), std::max<std::int64_t>(table, 8 * 20 + 8));
  EXPECT_GT(writer.num_writes(), counts.blocks + 2 * counts.checkpoints);
}

}  // namespace
}  // namespace tandem::test
