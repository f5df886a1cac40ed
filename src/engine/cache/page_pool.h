// page_pool.h — the latent rows of every MLA layer, in pages of `page_size` tokens. A page id means
// the same rows in every layer. Pages are counted: sequences that share a prompt share its full
// pages, and a shared page is never written.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/cache/free_list.h"
#include "engine/ids.h"
#include "tensor/latent_rows.h"
#include "tensor/storage.h"

namespace tandem {

class PagePool {
 public:
  /// One buffer [num_pages * page_size, width] a layer. Errors: std::bad_alloc, or what the device
  /// throws.
  PagePool(std::span<const std::int64_t> latent_widths, LatentFormat format, std::int64_t num_pages,
           std::int64_t page_size, Device& device = host_device());

  [[nodiscard]] std::int64_t num_pages() const { return isize(refcounts_); }
  [[nodiscard]] std::int64_t page_size() const { return page_size_; }
  [[nodiscard]] std::int64_t num_free() const { return free_.size(); }
  [[nodiscard]] std::int32_t refcount(PageId page) const {
    return refcounts_[usize(index_of(page))];
  }
  [[nodiscard]] const std::vector<LatentRows>& layers() const { return layers_; }

  /// The lowest free page, with one reference; there must be one. Its rows hold old data: nothing
  /// reads a row before it is written.
  [[nodiscard]] PageId take();
  void share(PageId page);
  /// Drops a reference; the last one frees the page.
  void release(PageId page);
  /// Copies the rows of every layer.
  void copy(PageId to, PageId from);
  /// Of a page in all layers.
  [[nodiscard]] std::int64_t page_bytes() const;
  /// To host memory, layer after layer: page_bytes() of them.
  void download(std::span<std::byte> to, PageId page) const;
  void upload(PageId page, std::span<const std::byte> from);

  /// Free and owned pages make up the pool, none twice. TDM_CHECK fails otherwise.
  void check_integrity() const;

 private:
  Device& device_;
  std::int64_t page_size_;
  FreeList free_;
  std::vector<std::int32_t> refcounts_;  // [pages]; 0 = free
  std::vector<Storage> storage_;
  std::vector<LatentRows> layers_;  // views of storage_
};

}  // namespace tandem
