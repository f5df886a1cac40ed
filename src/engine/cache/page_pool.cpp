#include "engine/cache/page_pool.h"

#include <algorithm>

namespace tandem {

PagePool::PagePool(std::span<const std::int64_t> latent_widths, LatentFormat format,
                   std::int64_t num_pages, std::int64_t page_size, Device& device)
    : device_(device), page_size_(page_size), free_(num_pages), refcounts_(usize(num_pages), 0) {
  for (const std::int64_t width : latent_widths) {
    const std::int64_t rows = num_pages * page_size;
    Storage& memory = storage_.emplace_back(rows * width * element_bytes(format), device);
    layers_.emplace_back(memory.data(), format, rows, width);
  }
}

PageId PagePool::take() {
  const std::int32_t id = free_.take();
  TDM_CHECK(refcounts_[usize(id)] == 0, id, refcounts_[usize(id)]);
  refcounts_[usize(id)] = 1;
  return PageId{id};
}

void PagePool::share(PageId page) {
  TDM_CHECK(refcount(page) > 0, index_of(page));
  ++refcounts_[usize(index_of(page))];
}

void PagePool::release(PageId page) {
  std::int32_t& count = refcounts_[usize(index_of(page))];
  TDM_CHECK(count > 0, index_of(page));
  if (--count == 0) {
    free_.put(static_cast<std::int32_t>(page));
  }
}

void PagePool::copy(PageId to, PageId from) {
  for (const LatentRows& layer : layers_) {
    device_.copy(layer.row(index_of(to) * page_size_), layer.row(index_of(from) * page_size_),
                 usize(page_size_ * layer.row_bytes));
  }
}

std::int64_t PagePool::page_bytes() const {
  std::int64_t bytes = 0;
  for (const LatentRows& layer : layers_) {
    bytes += page_size_ * layer.row_bytes;
  }
  return bytes;
}

void PagePool::download(std::span<std::byte> to, PageId page) const {
  TDM_CHECK(isize(to) == page_bytes(), to.size());
  for (const LatentRows& layer : layers_) {
    const std::size_t bytes = usize(page_size_ * layer.row_bytes);
    device_.download(to.data(), layer.row(index_of(page) * page_size_), bytes);
    to = to.subspan(bytes);
  }
}

void PagePool::upload(PageId page, std::span<const std::byte> from) {
  TDM_CHECK(isize(from) == page_bytes(), from.size());
  for (const LatentRows& layer : layers_) {
    const std::size_t bytes = usize(page_size_ * layer.row_bytes);
    device_.upload(layer.row(index_of(page) * page_size_), from.data(), bytes);
    from = from.subspan(bytes);
  }
}

void PagePool::check_integrity() const {
  std::vector<bool> is_free(refcounts_.size(), false);
  for (const std::int32_t id : free_.ids()) {
    TDM_CHECK(!is_free[usize(id)], id);
    TDM_CHECK(refcounts_[usize(id)] == 0, id, refcounts_[usize(id)]);
    is_free[usize(id)] = true;
  }
  const auto owned = std::count_if(refcounts_.begin(), refcounts_.end(),
                                   [](std::int32_t count) { return count > 0; });
  TDM_CHECK(num_free() + owned == num_pages(), num_free(), owned, num_pages());
}

}  // namespace tandem
