#include <gtest/gtest.h>

#include "engine/cache/cache_manager.h"

namespace tandem {
namespace {

const CacheSpec kSpec{
    .state_layers =
        {{.num_heads = 2, .key_dim = 3, .value_dim = 2, .conv_rows = 2, .conv_channels = 3}},
    .latent_widths = {5, 2}};

TEST(PagePool, GivesTheLowestFreePageFirst) {
  PagePool pool(kSpec.latent_widths, LatentFormat::kF32, 5, 4);
  for (std::int32_t i = 0; i < 5; ++i) {
    EXPECT_EQ(pool.take(), PageId{i});
  }
  pool.release(PageId{3});
  pool.release(PageId{1});
  pool.release(PageId{4});
  EXPECT_EQ(pool.take(), PageId{1});
  pool.release(PageId{0});
  EXPECT_EQ(pool.take(), PageId{0});
  EXPECT_EQ(pool.take(), PageId{3});
  pool.check_integrity();
}

TEST(PagePool, FreesAPageWithItsLastReference) {
  PagePool pool(kSpec.latent_widths, LatentFormat::kF32, 2, 4);
  const PageId page = pool.take();
  pool.share(page);
  pool.release(page);
  EXPECT_EQ(pool.num_free(), 1);
  EXPECT_EQ(pool.refcount(page), 1);
  pool.release(page);
  EXPECT_EQ(pool.num_free(), 2);
  pool.check_integrity();
}

TEST(PagePoolDeathTest, RefusesWhatWouldCorruptIt) {
  PagePool pool(kSpec.latent_widths, LatentFormat::kF32, 1, 4);
  EXPECT_DEATH(pool.release(PageId{0}), "count > 0");
  EXPECT_DEATH(pool.share(PageId{0}), "refcount");
  (void)pool.take();
  EXPECT_DEATH((void)pool.take(), "empty");
}

class PagePoolFormats : public ::testing::TestWithParam<LatentFormat> {};
INSTANTIATE_TEST_SUITE_P(All, PagePoolFormats,
                         ::testing::Values(LatentFormat::kF32, LatentFormat::kBF16,
                                           LatentFormat::kFp8));

TEST_P(PagePoolFormats, CopiesTheRowsOfOnePageInEveryLayer) {
  PagePool pool(kSpec.latent_widths, GetParam(), 3, 4);
  EXPECT_EQ(pool.layers()[0].row_bytes, 5 * element_bytes(GetParam()));
  for (const LatentRows& layer : pool.layers()) {
    for (std::int64_t i = 0; i < layer.num_rows * layer.row_bytes; ++i) {
      layer.data[i] = std::byte(i);
    }
  }
  pool.copy(PageId{2}, PageId{0});
  for (const LatentRows& layer : pool.layers()) {
    for (std::int64_t i = 0; i < 4 * layer.row_bytes; ++i) {
      EXPECT_EQ(layer.row(8)[i], layer.row(0)[i]);
      EXPECT_EQ(layer.row(4)[i], std::byte(4 * layer.row_bytes + i));
    }
  }
}

TEST(StatePool, ZeroesASlotEachTimeItIsTakenAndNoOther) {
  StatePool pool(kSpec.state_layers, 2);
  const SlotId first = pool.take();
  const SlotId second = pool.take();
  const StateBuffer& buffer = pool.layers()[0];
  const std::int64_t state_floats = kSpec.state_layers[0].state_floats();
  std::fill_n(buffer.states, 2 * state_floats, 1.0F);
  std::fill_n(buffer.conv.data(), buffer.conv.numel(), 1.0F);
  pool.release(first);
  EXPECT_EQ(pool.take(), first);
  for (std::int64_t i = 0; i < state_floats; ++i) {
    EXPECT_EQ(buffer.states[i], 0.0F);
    EXPECT_EQ(buffer.states[state_floats + i], 1.0F);
  }
  for (std::int64_t i = 0; i < buffer.conv.numel() / 2; ++i) {
    EXPECT_EQ(buffer.conv.row(0)[i], 0.0F);
    EXPECT_EQ(buffer.conv.row(1)[i], 1.0F);
  }
  pool.copy(first, second);
  for (std::int64_t i = 0; i < state_floats; ++i) {
    EXPECT_EQ(buffer.states[i], 1.0F);
  }
  for (std::int64_t i = 0; i < buffer.conv.numel() / 2; ++i) {
    EXPECT_EQ(buffer.conv.row(0)[i], 1.0F);
  }
  pool.check_integrity();
  pool.release(second);
  EXPECT_DEATH(pool.release(second), "owned");
}

TEST(CacheManager, GivesAllOrNothing) {
  CacheManager cache(kSpec, 3, 4, 2);
  SeqCache a;
  SeqCache b;
  SeqCache c;
  EXPECT_TRUE(cache.open(a, 5));  // 2 pages
  EXPECT_FALSE(cache.open(b, 5));
  EXPECT_EQ(cache.num_free_pages(), 1);
  EXPECT_EQ(cache.num_free_slots(), 1);
  EXPECT_TRUE(cache.open(b, 4));
  EXPECT_TRUE(cache.extend(a, 8));  // fits into what it has
  EXPECT_FALSE(cache.extend(a, 9));
  EXPECT_FALSE(cache.open(c, 0));  // no slot
  const std::vector<const SeqCache*> live{&a, &b, &c};
  cache.check_integrity(live);
  cache.release(a);
  cache.release(a);  // holds nothing: no effect
  EXPECT_TRUE(cache.open(c, 8));
  cache.check_integrity(live);
}

TEST(CacheManager, ForkSharesFullPagesAndCopiesTheRest) {
  CacheManager cache(kSpec, 8, 4, 3);
  SeqCache parent;
  ASSERT_TRUE(cache.open(parent, 10));
  for (const LatentRows& layer : cache.buffers().latent_layers) {
    for (std::int64_t i = 0; i < layer.num_rows * layer.row_bytes; ++i) {
      layer.data[i] = std::byte(i);
    }
  }
  const StateBuffer& states = cache.buffers().state_layers[0];
  const std::int64_t state_floats = kSpec.state_layers[0].state_floats();
  std::fill_n(states.states, state_floats, 3.0F);
  std::fill_n(states.conv.row(0), kSpec.state_layers[0].conv_floats(), 4.0F);
  parent.length = 10;
  SeqCache child;
  ASSERT_TRUE(cache.open_fork(child, 10));
  cache.fork(child, parent);
  EXPECT_EQ(child.length, 10);
  ASSERT_EQ(child.pages.size(), 3U);
  EXPECT_EQ(child.pages[0], parent.pages[0]);
  EXPECT_EQ(child.pages[1], parent.pages[1]);
  EXPECT_NE(child.pages[2], parent.pages[2]);
  for (const LatentRows& layer : cache.buffers().latent_layers) {
    for (std::int64_t i = 0; i < 2 * layer.row_bytes; ++i) {
      EXPECT_EQ(layer.row(index_of(child.pages[2]) * 4)[i],
                layer.row(index_of(parent.pages[2]) * 4)[i]);
    }
  }
  EXPECT_EQ(states.states[index_of(*child.slot) * state_floats], 3.0F);
  EXPECT_EQ(states.conv.row(index_of(*child.slot))[0], 4.0F);
  const std::vector<const SeqCache*> live{&parent, &child};
  cache.check_integrity(live);
  EXPECT_EQ(cache.row_to_write(child, 10), index_of(child.pages[2]) * 4 + 2);
  EXPECT_DEATH((void)cache.row_to_write(child, 7), "refcount");  // a shared page is never written
  cache.release(parent);
  EXPECT_EQ(cache.row_to_write(child, 7), index_of(child.pages[1]) * 4 + 3);
  cache.release(child);
  EXPECT_EQ(cache.num_free_pages(), 8);
  EXPECT_EQ(cache.num_free_slots(), 3);
}

TEST(CacheManager, ForkOnAPageBoundaryNeedsNoPage) {
  CacheManager cache(kSpec, 2, 4, 2);
  SeqCache parent;
  ASSERT_TRUE(cache.open(parent, 8));
  parent.length = 8;
  SeqCache child;
  ASSERT_TRUE(cache.open_fork(child, 8));
  cache.fork(child, parent);
  EXPECT_EQ(child.pages, parent.pages);
  const std::vector<const SeqCache*> live{&parent, &child};
  cache.check_integrity(live);
}

TEST(CacheManagerDeathTest, IntegrityNoticesALostReference) {
  CacheManager cache(kSpec, 2, 4, 2);
  SeqCache seq;
  ASSERT_TRUE(cache.open(seq, 4));
  EXPECT_DEATH(cache.check_integrity({}), "references");
  SeqCache stolen = seq;
  const std::vector<const SeqCache*> live{&seq, &stolen};
  EXPECT_DEATH(cache.check_integrity(live), "slot_used");
}

}  // namespace
}  // namespace tandem
