#include "engine/cache/prefix_tree.h"

#include <algorithm>
#include <array>
#include <numeric>

#include <gtest/gtest.h>

namespace tandem {
namespace {

const CacheSpec kSpec{
    .state_layers =
        {{.num_heads = 1, .key_dim = 2, .value_dim = 1, .conv_rows = 1, .conv_channels = 1}},
    .latent_widths = {3}};

/// A tree of blocks of 4 tokens in pages of 2, and the sequences' side of it.
class PrefixTreeTest : public ::testing::Test {
 protected:
  static std::vector<std::int32_t> tokens(std::int32_t first, std::size_t count) {
    std::vector<std::int32_t> ids(count);
    std::iota(ids.begin(), ids.end(), first);
    return ids;
  }
  /// 0, 1, 2, 3, then a block of its own.
  static std::vector<std::int32_t> longer_than_first_block(std::int32_t next) {
    std::vector<std::int32_t> ids = tokens(0, 4);
    const std::vector<std::int32_t> block = tokens(next, 4);
    ids.insert(ids.end(), block.begin(), block.end());
    return ids;
  }
  std::vector<PageId> take_pages(std::size_t count) {
    std::vector<PageId> pages(count);
    std::ranges::generate(pages, [&] { return pages_.take(); });
    return pages;
  }
  /// As a sequence that computed `ids`, left a checkpoint at `depth`, and ended.
  void leave(const std::vector<std::int32_t>& ids, std::int64_t depth, const CacheSalt& salt = {}) {
    std::vector<PageId> pages = take_pages(ids.size() / 2);
    const NodeId node = tree_.insert(ids, salt, pages);
    tree_.attach(node, depth, tree_.take_checkpoint(state_).value());
    end(pages, node);
  }
  void end(const std::vector<PageId>& pages, NodeId node) {
    for (const PageId page : pages) {
      pages_.release(page);
    }
    tree_.unlock(node);
    check();
  }
  void check(std::span<const NodeId> locked = {}) {
    std::vector<std::int32_t> references(usize(pages_.num_pages()), 0);
    std::vector<bool> used(usize(slots_.num_slots()), false);
    tree_.check_integrity(references, used, locked);
    EXPECT_EQ(std::accumulate(references.begin(), references.end(), 0), tree_.num_pages());
  }

  PagePool pages_{kSpec.latent_widths, LatentFormat::kF32, 20, 2};
  StatePool slots_{kSpec.state_layers, 4};
  SlotId state_ = slots_.take();
  PrefixTree tree_{pages_, slots_, {.block_tokens = 4, .num_checkpoints = 3}};
};

TEST_F(PrefixTreeTest, MatchesWholeBlocksUpToTheDeepestCheckpoint) {
  const std::vector<std::int32_t> ids = tokens(0, 12);
  EXPECT_EQ(tree_.match(ids, {}).kv_len, 0);
  leave(ids, 12);
  leave(tokens(0, 8), 8);
  EXPECT_EQ(tree_.num_pages(), 6);
  for (std::size_t size = 0; size <= 12; ++size) {
    const PrefixMatch match = tree_.match(std::span(ids).first(size), {});
    EXPECT_EQ(match.kv_len, static_cast<std::int64_t>(size / 4 * 4));
    EXPECT_EQ(match.state_len, size < 8 ? 0 : match.kv_len);  // no checkpoint after 4 tokens
    EXPECT_EQ(match.node.has_value(), size >= 8);
  }
  std::vector<std::int32_t> other = ids;
  other[5] = 99;
  EXPECT_EQ(tree_.match(other, {}).kv_len, 4);
  EXPECT_EQ(tree_.match(std::span(ids).subspan(4), {}).kv_len, 0);  // the same block elsewhere
}

TEST_F(PrefixTreeTest, SaltsKeepNamespacesApart) {
  const auto salt = [](const char* text) { return std::make_shared<const std::string>(text); };
  leave(tokens(0, 8), 8, salt("alice"));
  EXPECT_EQ(tree_.match(tokens(0, 8), salt("alice")).state_len, 8);  // another object, same text
  EXPECT_EQ(tree_.match(tokens(0, 8), salt("bob")).kv_len, 0);
  EXPECT_EQ(tree_.match(tokens(0, 8), {}).kv_len, 0);
  leave(tokens(0, 8), 8);
  EXPECT_EQ(tree_.num_pages(), 8);
}

TEST_F(PrefixTreeTest, WhatWasComputedTwiceIsKeptOnce) {
  leave(tokens(0, 8), 8);
  std::vector<PageId> pages = take_pages(6);
  const std::vector<PageId> own = pages;
  const NodeId node = tree_.insert(tokens(0, 12), {}, pages);
  EXPECT_NE(pages[0], own[0]);  // the tree's now, and the sequence's own are free
  EXPECT_NE(pages[3], own[3]);
  EXPECT_EQ(pages[4], own[4]);
  EXPECT_EQ(pages_.refcount(own[0]), 0);
  EXPECT_EQ(pages_.refcount(pages[0]), 2);
  EXPECT_TRUE(tree_.begins_with(pages, node));
  EXPECT_FALSE(tree_.begins_with(own, node));
  EXPECT_EQ(tree_.num_evictable_pages(), 0);
  check(std::array{node});
  end(pages, node);  // without a checkpoint of its own the end is of no use
  EXPECT_EQ(tree_.num_pages(), 4);
  EXPECT_EQ(tree_.num_evictable_pages(), 4);
  EXPECT_EQ(pages_.num_free(), 16);
}

TEST_F(PrefixTreeTest, EvictsTheLeastRecentlyUsedEndAndWhatOnlyItNeeded) {
  leave(tokens(0, 12), 12);
  leave(longer_than_first_block(50), 8);
  leave(longer_than_first_block(60), 8);
  EXPECT_EQ(tree_.num_pages(), 2 * (3 + 1 + 1));
  tree_.touch(tree_.match(tokens(0, 12), {}).node.value());
  EXPECT_TRUE(tree_.evict());
  EXPECT_EQ(tree_.match(longer_than_first_block(50), {}).kv_len, 4);
  EXPECT_EQ(tree_.match(longer_than_first_block(60), {}).state_len, 8);
  EXPECT_TRUE(tree_.evict());
  EXPECT_EQ(tree_.match(tokens(0, 12), {}).state_len, 12);
  check();
  EXPECT_TRUE(tree_.evict());  // three blocks at once: nothing else needs them
  EXPECT_FALSE(tree_.evict());
  EXPECT_EQ(tree_.num_pages(), 0);
  EXPECT_EQ(pages_.num_free(), 20);
  EXPECT_EQ(tree_.num_evicted_checkpoints(), 3);
  EXPECT_EQ(tree_.num_evicted_pages(), 10);
}

TEST_F(PrefixTreeTest, LocksKeepAPathAndOnlyIt) {
  leave(tokens(0, 12), 12);
  leave(longer_than_first_block(50), 8);
  const NodeId node = tree_.match(tokens(0, 12), {}).node.value();
  tree_.lock(node);
  EXPECT_EQ(tree_.num_evictable_pages(), 2);
  EXPECT_TRUE(tree_.evict());
  EXPECT_FALSE(tree_.evict());
  EXPECT_EQ(tree_.match(tokens(0, 12), {}).kv_len, 12);
  check(std::array{node});
  EXPECT_DEATH(tree_.clear(), "num_nodes_");
  tree_.unlock(node);
  tree_.clear();
  EXPECT_EQ(pages_.num_free(), 20);
  EXPECT_EQ(tree_.num_evicted_pages(), 2);  // clearing is not eviction
}

TEST_F(PrefixTreeTest, TakesTheOldestCheckpointWhenSlotsRunOut) {
  leave(tokens(0, 12), 4);
  EXPECT_EQ(tree_.num_pages(), 2);  // nothing after the checkpoint is of use
  leave(tokens(0, 12), 12);
  leave(tokens(100, 4), 4);
  const SlotId slot = tree_.take_checkpoint(state_).value();  // that of the inner node
  EXPECT_EQ(tree_.match(tokens(0, 12), {}).state_len, 12);
  EXPECT_EQ(tree_.match(tokens(0, 4), {}).kv_len, 4);
  EXPECT_EQ(tree_.match(tokens(0, 4), {}).state_len, 0);
  const SlotId second = tree_.take_checkpoint(state_).value();  // an end: its pages go as well
  EXPECT_EQ(tree_.match(tokens(0, 12), {}).kv_len, 0);
  const SlotId third = tree_.take_checkpoint(state_).value();
  EXPECT_EQ(tree_.take_checkpoint(state_), std::nullopt);
  EXPECT_EQ(tree_.num_pending(), 3);
  for (const SlotId id : {slot, second, third}) {
    tree_.drop_checkpoint(id);
  }
  EXPECT_EQ(tree_.num_reserved_slots(), 3);
  check();
}

TEST_F(PrefixTreeTest, ACheckpointBelongsToItsOwnLengthOnly) {
  std::vector<PageId> pages = take_pages(4);
  const NodeId node = tree_.insert(tokens(0, 8), {}, pages);
  const SlotId slot = tree_.take_checkpoint(state_).value();
  EXPECT_DEATH(tree_.attach(node, 6, slot), "depth");
  tree_.attach(node, 4, slot);
  EXPECT_EQ(tree_.match(tokens(0, 8), {}).state_len, 4);
  // A second one for the same length is given back.
  tree_.attach(node, 4, tree_.take_checkpoint(state_).value());
  EXPECT_EQ(tree_.num_checkpoints(), 1);
  EXPECT_EQ(tree_.num_reserved_slots(), 2);
  end(pages, node);
}

TEST(PrefixTree, WithoutCheckpointsThereIsNone) {
  PagePool pages(kSpec.latent_widths, LatentFormat::kF32, 4, 2);
  StatePool slots(kSpec.state_layers, 1);
  PrefixTree tree(pages, slots, {});
  const std::vector<std::int32_t> ids{1, 2, 3, 4};
  EXPECT_EQ(tree.match(ids, {}).kv_len, 0);
  EXPECT_EQ(tree.take_checkpoint(slots.take()), std::nullopt);
  EXPECT_FALSE(tree.evict());
  EXPECT_EQ(tree.num_evictable_pages(), 0);
}

}  // namespace
}  // namespace tandem
